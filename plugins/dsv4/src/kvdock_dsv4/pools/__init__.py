"""KV pools of DeepSeek V4."""
