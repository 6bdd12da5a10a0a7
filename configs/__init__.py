"""Configurations: each file has a `get_config()` that returns a `RunConfig`."""
