"""Configurations as trees of named fields: read, replaced, compared, and refused when they cannot work.

A `RunConfig` and overrides by dotted name enter; a checked `RunConfig`, or a `ConfigError` with field, problem and
remedy, leaves before any work starts. The fields themselves stand in `sao_jax.config`.
"""
