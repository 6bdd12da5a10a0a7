"""What launch.evaluate leaves behind: JSON that every parser reads, and a status that stops a script."""

from __future__ import annotations

import json
import math
import types

import pytest
from toys import training_toy
from toys.wiring import program_module

from sao_jax.evaluation.heldout import Evaluation
from sao_jax.parallel.process import WHOLE
from sao_jax.report.success_rate import success

evaluate = program_module("evaluate")


@pytest.mark.parametrize("ungraded, says", [(6, "each of the 6 episodes failed"), (0, "split has no prompts")])
def test_an_evaluation_that_could_grade_nothing_writes_null_and_fails(tmp_path, monkeypatch, ungraded, says):
  nothing = Evaluation(success(0, 0), math.nan, math.nan, ungraded, policy_version=3, trajectories=[])
  monkeypatch.setattr(evaluate, "_PHASE", types.SimpleNamespace(value=""))
  monkeypatch.setattr(evaluate, "_STEP", types.SimpleNamespace(value="3" if ungraded else ""))
  monkeypatch.setattr(evaluate.setup, "make_learner", lambda config: types.SimpleNamespace(share=WHOLE))
  monkeypatch.setattr(evaluate.sampler_side, "make_publisher", lambda learner: lambda params: params)
  monkeypatch.setattr(
    evaluate.phases, "latest_policy", lambda *arguments: evaluate.phases.LatestPolicy({}, 3, "train", "a/3")
  )
  monkeypatch.setattr(evaluate.heldout, "evaluate", lambda *arguments, **options: nothing)
  with pytest.raises(SystemExit, match=f"error: nothing could be graded: .*{says}.*evaluate again"):
    evaluate.main(training_toy.get_config(), str(tmp_path))

  def refuse(name):
    raise AssertionError(f"{name} is no JSON")

  path = tmp_path / ("evaluation_train_3.json" if ungraded else "evaluation_train.json")
  record = json.loads(path.read_text(), parse_constant=refuse)
  assert record["checkpoint"] == "a/3"  # the one that was loaded, whatever a run beside has saved since
  assert record["heldout_success"] is None and record["heldout_reward"] is None
  assert record["heldout_trials"] == 0 and record["heldout_ungraded"] == ungraded
  assert str(nothing.success) == "undefined (nothing was graded)"
