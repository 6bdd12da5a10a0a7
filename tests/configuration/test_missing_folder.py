"""Errors for a model's folder that is none: they say how to get it."""

from __future__ import annotations

import pytest

from sao_jax.missing_folder import folder_error


@pytest.fixture
def here(tmp_path, monkeypatch):
  (tmp_path / "models" / "Qwen3-0.6B").mkdir(parents=True)
  monkeypatch.chdir(tmp_path)
  return tmp_path


def text(path):
  return str(folder_error("model.checkpoint", path, "It holds no model.", "Name another one."))


NAMES = (
  "Qwen/Qwen3-0.6B",
  "https://huggingface.co/Qwen/Qwen3-0.6B",
  "https://huggingface.co/Qwen/Qwen3-0.6B/tree/main",
)


@pytest.mark.parametrize("name", [*NAMES, "hf://Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B/"])
def test_a_name_of_the_hub_is_told_how_to_become_a_folder(here, name):
  said = text(name)
  assert "There is no such folder." in said and "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B" in said
  assert "Did you mean" not in said and said.endswith("Name another one.")
  assert text(here / "Qwen" / "Qwen3-0.6B") == text("Qwen/Qwen3-0.6B")  # made absolute on the way


@pytest.mark.parametrize("name", ["models/Qwen3-06B", "models/qwen3-0.6b", "model/Qwen3-0.6B", "./models/Qwen3_0.6B"])
def test_a_slip_is_answered_by_the_folder_that_is_there(here, name):
  assert "Did you mean models/Qwen3-0.6B?" in text(name)


def test_another_name_in_a_folder_that_is_there(here):
  said = text("models/GLM-4.5-Air")
  assert "Did you mean" not in said and "hf download OWNER/NAME --local-dir models/GLM-4.5-Air" in said


def test_folders_of_other_programs_and_files(here):
  cache = here / "models--Qwen--Qwen3-0.6B"
  snapshot = cache / "snapshots" / "0123abc"
  snapshot.mkdir(parents=True)
  (snapshot / "config.json").write_text("{}")
  assert f"Name {snapshot} in it." in text(cache)
  (here / "models" / "adapter_config.json").write_text("{}")
  assert "It is an adapter without its model" in text("models") and "merge_and_unload" in text("models")
  (here / "models" / "Qwen3-0.6B" / "a.gguf").write_text("")
  assert "GGUF files are not read" in text("models/Qwen3-0.6B")
  assert f"Name the folder that it is in, {snapshot}" in text(snapshot / "config.json")


@pytest.mark.parametrize("path", [".", "gs://bucket/models/a", "models"])
def test_nothing_is_added_where_nothing_is_known(here, path):
  assert text(path) == "model.checkpoint: It holds no model.\n  remedy: Name another one."
