"""Where a phase begins, and what it says of phases that are missing or out of order."""

from __future__ import annotations

import json
import os

import jax.numpy as jnp
import pytest
from toys import training_toy
from toys.shared_store import SharedStore

from sao_jax.checkpoints.checkpointer import Checkpointer
from sao_jax.parallel.agreement import Processes
from sao_jax.training import origins
from sao_jax.training.origins import Origin, policy_origin

CONFIG = training_toy.get_config()
EARLIER = ["value_pretraining", "sft"]


def save(folder, step):
  with Checkpointer(folder) as checkpointer:
    checkpointer.save(step, {"params": {"w": jnp.zeros(1, jnp.float32)}})


def test_a_policy_comes_from_the_newest_phase_then_from_the_checkpoint_then_from_nowhere(tmp_path):
  elsewhere = tmp_path / "elsewhere"
  save(elsewhere, 7)
  assert policy_origin(CONFIG, tmp_path, EARLIER) == Origin()
  named = training_toy.replace(CONFIG, model={"checkpoint": str(elsewhere)})
  assert policy_origin(named, tmp_path, EARLIER) == Origin(elsewhere, 7)
  save(tmp_path / "sft", 3)
  assert policy_origin(named, tmp_path, EARLIER) == Origin(tmp_path / "sft", 3)
  save(tmp_path / "value_pretraining", 2)
  origin = policy_origin(named, tmp_path, EARLIER)
  assert origin.name == "value_pretraining/2" and str(origin).startswith("value_pretraining, step 2 (")
  assert (Origin().name, str(Origin())) == ("", "random initialisation")


def test_all_processes_take_the_step_that_the_first_one_sees(tmp_path, monkeypatch):
  """A run beside saves another one between their looks; each would load its part of another policy."""
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(4, {"w": jnp.zeros(2)})
  store = SharedStore()
  store.key_value_set("sao_jax/1/all", json.dumps([{"name": "the newest checkpoint", "value": 3}] * 2))
  monkeypatch.setattr(origins, "all_processes", lambda: Processes(1, 2, store))
  assert origins.latest_step(tmp_path) == 3


def test_a_policy_that_nothing_has_taught_is_a_warning_with_the_remedy(tmp_path, caplog):
  origins.warn_without_imitation(tmp_path, Origin(tmp_path / "sft", 3))
  assert not caplog.messages
  origins.warn_without_imitation(tmp_path, Origin())
  assert "run launch.sft first, or name a model in model.checkpoint" in caplog.text


@pytest.mark.parametrize(
  "began_from, overtaken",
  [("sft/3", False), ("sft/2", True), ("", True), (None, True)],  # None: the older files of an older version
)
def test_value_pretraining_that_sft_has_overtaken_is_said_with_the_choice(tmp_path, caplog, began_from, overtaken):
  save(tmp_path / "value_pretraining", 2)
  save(tmp_path / "sft", 3)
  os.utime(tmp_path / "value_pretraining" / "2", (1.0, 1.0))
  origins.warn_if_overtaken(tmp_path / "value_pretraining", 2, began_from, Origin(tmp_path / "sft", 3))
  assert (f"move {tmp_path / 'value_pretraining'} away" in caplog.text) == overtaken
  assert ("began from random initialisation" in caplog.text) == (began_from == "")


def test_a_phase_that_goes_on_behind_the_back_of_a_later_one_says_so(tmp_path, caplog):
  origins.warn_of_later_phases(tmp_path, "sft", ["value_pretraining", "train"])
  assert not caplog.messages
  save(tmp_path / "train", 5)
  origins.warn_of_later_phases(tmp_path, "sft", ["value_pretraining", "train"])
  assert "train has begun already (step 5), and what sft learns from now on does not reach it" in caplog.text
