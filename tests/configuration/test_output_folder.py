"""Folders to write to: found out before any work, or written whole, with nothing left of what failed."""

from __future__ import annotations

import os

import pytest

from sao_jax.configuration.output_folder import UNFINISHED, check_output_folder, whole_folder
from sao_jax.errors import ConfigError


def write(path, failure=None):
  """Writes two files; returns the names in the folder at the moment when the second one is there."""
  check_output_folder(path, "--output")
  with whole_folder(path, last="config.json") as folder:
    (folder / "config.json").write_text("{}")
    (folder / "weights").write_text("1")
    if failure is not None:
      raise failure
    return sorted(os.listdir(path))


def new(tmp_path):
  return tmp_path / "deep" / "new"


def empty(tmp_path):
  (tmp_path / "empty").mkdir()
  return tmp_path / "empty"


def link(tmp_path):
  (tmp_path / "target").mkdir()
  (tmp_path / "link").symlink_to("target")
  return tmp_path / "link"


def current(tmp_path):
  return "."


@pytest.mark.parametrize("place", [new, empty, link, current])
def test_places_that_can_be_written(tmp_path, monkeypatch, place):
  """They stay what they were: a link, the current folder. A mounted disk is like an empty folder."""
  (tmp_path / "here").mkdir()
  monkeypatch.chdir(tmp_path / "here")
  path = place(tmp_path)
  before = os.stat(path).st_ino if os.path.exists(path) else None
  with pytest.raises(KeyboardInterrupt):
    write(path, failure=KeyboardInterrupt())
  assert not os.path.exists(path) if before is None else not os.listdir(path)
  assert write(path) == [UNFINISHED]
  assert sorted(os.listdir(path)) == ["config.json", "weights"] and before in (None, os.stat(path).st_ino)
  with pytest.raises(ConfigError, match="--output: .* is not empty: it holds config.json, weights"):
    write(path)


def test_what_a_killed_program_has_left_makes_way(tmp_path):
  left = tmp_path / "a" / UNFINISHED
  left.mkdir(parents=True)
  (left / "model-00001-of-00009.safetensors").write_text("half")
  write(tmp_path / "a")
  assert sorted(os.listdir(tmp_path / "a")) == ["config.json", "weights"]


def test_the_last_file_comes_last(tmp_path, monkeypatch):
  """A folder with it is whole."""
  moved, replace = [], os.replace
  monkeypatch.setattr(os, "replace", lambda source, target: moved.append(target.name) or replace(source, target))
  write(tmp_path / "a")
  assert moved == ["weights", "config.json"]


def test_a_program_stopped_while_its_files_move_up_leaves_nothing(tmp_path, monkeypatch):
  replace = os.replace

  def interrupted(source, target):
    replace(source, target)
    if target == tmp_path / "a" / "weights":
      raise KeyboardInterrupt

  monkeypatch.setattr(os, "replace", interrupted)
  with pytest.raises(KeyboardInterrupt):
    write(tmp_path / "a")
  assert not os.listdir(tmp_path)


def test_what_a_program_killed_while_its_files_moved_up_has_left_is_said(tmp_path):
  (tmp_path / "a" / UNFINISHED).mkdir(parents=True)
  (tmp_path / "a" / "weights").write_text("1")
  with pytest.raises(ConfigError, match="'unfinished' in it is what a killed program left"):
    write(tmp_path / "a")
  assert (tmp_path / "a" / "weights").exists()


def file(tmp_path):
  (tmp_path / "file").write_text("")
  return tmp_path / "file"


def below_a_file(tmp_path):
  return file(tmp_path) / "a"


def dangling(tmp_path):
  (tmp_path / "dangling").symlink_to("nowhere")
  return tmp_path / "dangling"


def long_name(tmp_path):
  return tmp_path / ("x" * 256)


def no_folder(tmp_path):
  return "/proc/none/a"


@pytest.mark.parametrize(
  "place, words",
  [
    (file, "is a file"),
    (dangling, "is a link to nowhere, which is not there"),
    (below_a_file, "cannot write .*(File exists|Not a directory)"),
    (long_name, "cannot write .*too long"),
    (no_folder, "cannot write"),
  ],
)
def test_places_that_cannot(tmp_path, place, words):
  path = place(tmp_path)
  with pytest.raises(ConfigError, match=f"--output: .*{words}"):
    check_output_folder(path, "--output")
