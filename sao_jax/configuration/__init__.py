"""Configurations as trees of named fields: read, changed, compared and, by their own bounds and relations, refused.

A `RunConfig` enters, with the overrides of a command line; one that can work leaves, or a `ConfigError`.
"""
