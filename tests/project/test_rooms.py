"""Every room says what it is for, and offers a handful of names that users start with."""

from __future__ import annotations

import importlib
import pathlib

import pytest
from toys.paths import REPOSITORY

PACKAGE = REPOSITORY / "sao_jax"
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_exports_three_to_eight_names(name):
  room = importlib.import_module(f"sao_jax.{name}")
  assert len(room.__doc__.strip().splitlines()) >= 3  # its purpose, then what enters and what leaves
  assert 3 <= len(room.__all__) <= 8
  assert room.__all__ == sorted(room.__all__)
  for exported in room.__all__:
    assert getattr(room, exported).__doc__ or isinstance(getattr(room, exported), dict)


@pytest.mark.parametrize("name", ROOMS)
def test_no_exported_name_hides_a_module(name):
  """`from sao_jax.room import module` must go on meaning the module."""
  modules = {path.stem for path in pathlib.Path(PACKAGE / name).glob("*.py")}
  assert not modules & set(importlib.import_module(f"sao_jax.{name}").__all__)
