"""Plugins: found without importing them, loaded or quarantined, asked hook by hook, and reported."""
