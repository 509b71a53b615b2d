"""Families whose cache has a form of its own on AMD devices."""
