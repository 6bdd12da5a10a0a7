"""Configurations as trees of named fields: read, changed, compared and, by their own bounds and relations, refused.

A `RunConfig` enters, with the overrides of a command line; one that can work leaves, or a `ConfigError`.
"""

from __future__ import annotations

from sao_jax.configuration.config_tree import differences, replace
from sao_jax.configuration.relations import validate

__all__ = ["differences", "replace", "validate"]
