"""DeepSeek V4 on AMD devices: one buffer a layer, with a ring for each request before the compressed rows."""
