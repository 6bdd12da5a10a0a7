"""`training.keep_best`: the version that did best on held-out prompts can be evaluated when the run is long over."""

from __future__ import annotations

import jax
import pytest
from toys import training_toy

from sao_jax.checkpoints.retention import kept_steps
from sao_jax.errors import ConfigError
from sao_jax.evaluation import pinned
from sao_jax.evaluation.heldout import Evaluation
from sao_jax.learner import placement, setup
from sao_jax.report.success_rate import success
from sao_jax.training import loop, phases

SUCCESSES = {0: 10, 1: 2, 2: 7, 3: 3, 4: 7, 5: 1, 6: 4}  # of ten, by version; version 0 is in no checkpoint


def test_the_best_version_is_kept_found_and_known_after_an_interruption(tmp_path, monkeypatch):
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
  monkeypatch.setattr(
    pinned,
    "evaluate",
    lambda config, params, version, stop: Evaluation(success(SUCCESSES[version], 10), 0.0, 0.0, 0, version, []),
  )

  def config(steps):
    settings = {"steps": steps, "audit": False, "checkpoint_every": 1000, "keep_checkpoints": 1, "keep_best": 1}
    return training_toy.replace(training_toy.get_config(), training=settings, evaluation={"every": 1})

  # Critic-only steps come first, so a version is two steps older than its number says.
  warm_up = config(1).algorithm.critic_warmup_steps
  best, folder = 2 + warm_up, tmp_path / "train"
  loop.train(config(3), tmp_path)
  assert kept_steps(folder) == [best, 3 + warm_up]
  result = loop.train(config(6), tmp_path)
  assert kept_steps(folder) == [best, 6 + warm_up] and result.step == 6 + warm_up

  # It is loaded by its step, or as the best; what there is not is refused with what there is.
  learner = setup.make_learner(config(6))
  load = lambda step, phase="": phases.latest_policy(config(6), learner, tmp_path, phase, step)
  for step in ("best", str(best)):
    found = load(step)
    assert (found.version, found.phase, found.step, found.checkpoint) == (2, "train", best, str(folder / str(best)))
  assert load("").step == 6 + warm_up
  with pytest.raises(ConfigError, match=f"no checkpoint of step '1' .*there are: train {best}, train {6 + warm_up}"):
    load("1")
  with pytest.raises(ConfigError, match="none of the checkpoints was evaluated"):
    load("best", "sft")
  with pytest.raises(ConfigError, match=r"model\.checkpoint has no steps"):
    load("3", "base")
