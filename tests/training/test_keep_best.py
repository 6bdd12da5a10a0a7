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

SUCCESSES = {0: 10, 1: 2, 2: 7, 3: 3, 4: 7, 5: 1}  # of ten, by version; version 0 is in no checkpoint


def test_the_best_version_is_kept_found_and_known_to_whoever_goes_on(tmp_path, monkeypatch):
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
  monkeypatch.setattr(
    pinned,
    "evaluate",
    lambda config, params, version, stop: Evaluation(success(SUCCESSES[version], 10), 0.0, 0.0, 0, version, []),
  )
  config = training_toy.replace(
    training_toy.get_config(),
    model={"num_experts": 0, "d_ff": 16},
    sampler={"prefill_batch": 1},
    training={"steps": 5, "audit": False, "checkpoint_every": 1000, "keep_checkpoints": 1, "keep_best": 1},
    evaluation={"every": 1},
  )

  # Critic-only steps come first, so a version is younger than the step that made it.
  warm_up = config.algorithm.critic_warmup_steps
  assert warm_up > 0
  best, last, folder = 2 + warm_up, 5 + warm_up, tmp_path / "train"
  assert loop.train(config, tmp_path).step == last
  assert kept_steps(folder) == [best, last]

  # A run that goes on knows what was measured, as far as it has gone itself.
  learner, phase = setup.make_learner(config), phases.reinforcement_learning(config)
  known = lambda step: loop._known_success(learner, tmp_path, tmp_path, phase, phases.Start(step, None))
  assert known(last) == {best: 0.7, last: 0.1} and known(last - 1) == {best: 0.7}

  # It is loaded by its step, or as the best; what there is not is refused with what there is.
  load = lambda step, phase="": phases.latest_policy(config, learner, tmp_path, phase, step)
  for step in ("best", str(best)):
    found = load(step)
    assert (found.version, found.phase, found.step, found.checkpoint) == (2, "train", best, str(folder / str(best)))
  assert load("").step == last
  with pytest.raises(ConfigError, match=f"no checkpoint of step '1' .*there are: train {best}, train {last}"):
    load("1")
  with pytest.raises(ConfigError, match="none of the checkpoints was evaluated"):
    load("best", "sft")
  with pytest.raises(ConfigError, match=r"model\.checkpoint has no steps"):
    load("3", "base")
