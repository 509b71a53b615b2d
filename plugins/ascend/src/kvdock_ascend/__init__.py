"""Ascend devices for kvdock."""

__version__ = "0.1.0"
