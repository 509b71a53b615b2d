"""Families whose cache has a form of its own on Ascend devices."""
