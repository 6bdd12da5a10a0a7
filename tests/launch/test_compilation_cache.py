"""What a program compiles is kept for the next one, by default, where the user may write."""

from __future__ import annotations

import jax
import pytest
from absl import logging

from launch import _compilation_cache


@pytest.fixture
def updated(monkeypatch, tmp_path):
  """The settings of jax that are made, without making them."""
  values = {}
  for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.setattr(_compilation_cache.jax, "config", Settings(values))
  return values


class Settings:
  jax_compilation_cache_dir = None

  def __init__(self, values):
    self.update = values.__setitem__


def test_a_folder_per_kind_of_processor_with_a_bound(updated, tmp_path):
  _compilation_cache.enable()
  folder = updated["jax_compilation_cache_dir"]
  assert folder.startswith(str(tmp_path / "cache" / "sao_jax" / "compiled")) and folder == str(
    _compilation_cache._folder()
  )
  assert updated["jax_compilation_cache_max_size"] == 4 * 2**30
  assert updated["jax_persistent_cache_min_compile_time_secs"] == 0.3
  assert set(updated) <= set(jax._src.config.config._value_holders), "settings that jax does not have"


@pytest.mark.parametrize("value", ["", "/elsewhere"])
def test_the_users_own_choice_comes_first(updated, monkeypatch, value):
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", value)
  _compilation_cache.enable()
  assert updated == {}


def test_where_nothing_can_be_written_it_says_so_and_goes_on(updated, monkeypatch, tmp_path):
  said = []
  monkeypatch.setattr(logging, "info", lambda message, *arguments: said.append(message % arguments))
  (tmp_path / "cache").write_text("a file")
  _compilation_cache.enable()
  assert updated == {} and len(said) == 1 and "are not kept: cannot write to" in said[0]
