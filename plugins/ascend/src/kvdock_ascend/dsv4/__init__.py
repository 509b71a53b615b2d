"""DeepSeek V4 on Ascend devices: plain pages in every space, and pages of its own for each request."""
