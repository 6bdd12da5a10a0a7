"""Names of folders: `~` is a home, and what could be written but never read again is refused."""

from __future__ import annotations

import pathlib

import pytest
from absl import flags

from launch import _flags
from sao_jax.configuration.paths import check_readable, check_storable, expand
from sao_jax.errors import ConfigError
from sao_jax.huggingface.folder import is_hf_folder


def test_a_tilde_is_a_home_and_a_path_stays_where_it_is(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  assert expand("~/runs/a") == tmp_path / "runs" / "a" and expand("~") == tmp_path
  assert expand("runs/~a/") == pathlib.Path.cwd() / "runs" / "~a"
  argv = ["launcher", "--config=configs/calculator.py", "--workdir=~/runs/a"]
  assert _flags.parse(argv, flags.FlagValues())[1] == str(tmp_path / "runs" / "a")


def test_a_tilde_in_a_field_is_a_home(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  (tmp_path / "model").mkdir()
  (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
  assert is_hf_folder("~/model") and not is_hf_folder("")
  (tmp_path / "a.py").write_text(pathlib.Path("configs/calculator.py").read_text())
  assert _flags.load_config("~/a.py").name == "calculator"


@pytest.mark.parametrize(
  "name", ["lr[1e-4]", "seed[0]/run", "a*b", "a?", "a\\b", "\udcff", "x" * 200 + "/" + "y" * 4000]
)
def test_names_under_which_nothing_could_be_read_again_are_refused(name):
  with pytest.raises(ConfigError, match="--workdir: ") as error:
    check_storable(expand(f"runs/{name}"), "--workdir")
  assert len(error.value.problem) < 500 and error.value.problem.isprintable() and error.value.remedy
  with pytest.raises(ConfigError, match="--workdir"):
    _flags.parse(["launcher", "--config=configs/calculator.py", f"--workdir={name}"], flags.FlagValues())


@pytest.mark.parametrize("name", ["a b", "a\nb", "lr=1e-4,{x}", "]", "$HOME", "ü", "%41", "a:b|'\"", "x" * 250])
def test_other_odd_names_are_not(name):
  check_storable(expand(f"runs/{name}"), "--workdir")


def test_what_was_copied_under_a_pattern_may_be_read():
  check_readable(expand("runs/lr[1e-4]"), "model.checkpoint")
