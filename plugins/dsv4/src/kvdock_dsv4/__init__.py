"""DeepSeek V4 for kvdock: compressed attention with many spaces, state rings and an indexer."""

__version__ = "0.1.0"
