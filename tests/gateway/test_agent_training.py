"""Two published agents, unchanged, and one that claims its episodes train a tiny policy: each token counts once."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
from toys import agent_toy, repositories, sandboxes, third_party, training_toy

from sao_jax.environments.mixture import Mixture, Part
from sao_jax.gateway.assistant_turns import read_turn
from sao_jax.report.metrics import read_metrics
from sao_jax.training.consumed import Record
from sao_jax.training.loop import train

TOKENIZER = third_party.Phrases()
STEPS = 3  # with the one that only the critic takes


def agent(name: str, tasks, claimed: bool = False) -> third_party.PhrasesAgent:
  harness = None if claimed else f"toys.third_party:{name}"
  return third_party.PhrasesAgent(harness, tasks, name=name, think_timeout=60.0, grace_seconds=20.0 * (not claimed))


@dataclasses.dataclass(frozen=True)
class Turn:
  """One turn of a trajectory: the context that it was sampled in, and its ids."""

  context: list[int]
  ids: list[int]


def turns_of(trajectory) -> list[Turn]:
  starts = [*trajectory.turn_starts.tolist(), len(trajectory)]
  segments = np.flatnonzero(trajectory.begins)
  turns = []
  for start, end in zip(starts, starts[1:]):
    segment = int(segments[segments <= start].max())
    sampled = np.flatnonzero(trajectory.action_mask[start:end])
    assert sampled.tolist() == list(range(len(sampled)))
    ids = trajectory.token_ids[start : start + len(sampled)].tolist()
    turns.append(Turn(trajectory.token_ids[segment:start].tolist(), ids))
  return turns


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A run of a random policy, its audit included."""
  with sandboxes.open_box():
    folder = tmp_path_factory.mktemp("agents")
  logging.getLogger("LiteLLM").setLevel(logging.CRITICAL)
  third_party.answered.clear()
  data = repositories.write_records(folder, *[third_party.RECORD] * 8)
  third_party.Repositories.tasks = repositories.make_task(data, tests="functions", python="/usr/bin/python3")
  claimed = agent("claimed", agent_toy.Tasks(), claimed=True)
  others = agent("repair", third_party.Repositories.tasks), agent("add_up", agent_toy.Tasks())
  mixture = Mixture(tuple(map(Part, (*others, claimed))))
  config = training_toy.replace(
    dataclasses.replace(training_toy.get_config(), environment=mixture),
    rollout={"max_turns": 6, "max_tokens": 40, "record": True},
    training={"steps": STEPS - 1},
  )
  with third_party.claiming(claimed):
    train(config, folder / "run")
  return folder / "run"


@pytest.fixture(scope="module")
def trained(folder):
  """(trajectory, its turns) of all that was trained on."""
  records = Record(folder, "train")
  trajectories = [trajectory for step in range(1, STEPS + 1) for trajectory in records.read(step)]
  return [(trajectory, turns_of(trajectory)) for trajectory in trajectories]


def test_all_agents_train_with_calls_broken_prefixes_and_rewards(folder, trained):
  assert len(trained) == 4 * STEPS
  assert {trajectory.key.environment for trajectory, _ in trained} == {"repair", "add_up", "claimed"}
  sessions = third_party.answered.values()
  assert any(choice.message.tool_calls for session in sessions for choice in session)
  assert any(len(turns) > 1 for _, turns in trained)
  assert any(trajectory.begins.sum() > 1 for trajectory, _ in trained)
  assert all(trajectory.info.get("unread_answers", 0.0) == 0.0 for trajectory, _ in trained)


def test_every_trajectory_is_one_session_token_by_token(trained):
  """An agent's answers are what its trajectory holds; a turn that was cut has no answer, and is the last one."""
  sessions = {key: [tuple(choice.token_ids) for choice in choices] for key, choices in third_party.answered.items()}
  taken = set()
  for trajectory, turns in trained:
    cut = trajectory.status.truncated and trajectory.token_ids[trajectory.action_mask][-1] not in TOKENIZER.stop_ids
    said = turns[:-1] if cut else turns
    ids = [tuple(turn.ids) for turn in said]
    if not said:
      continue
    contexts = [turn.context for turn in said]
    key = next(
      key
      for key, choices in sessions.items()
      if key not in taken and choices == ids and list(map(prompt_of, third_party.answered[key])) == contexts
    )
    taken.add(key)

    # As HTTP, each answer is the text of its ids.
    tools = third_party.TOOLS[trajectory.key.environment]
    for choice, turn in zip(third_party.answered[key], said):
      read = read_turn(TOKENIZER.decode(turn.ids[:-1]), tools, call_format="byte")
      assert (choice.message.content or "") == read.content
      calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
      assert calls == [(call.name, call.arguments) for call in read.tool_calls]


def prompt_of(choice) -> list[int]:
  """The ids of a prompt, which litellm keeps in a place of its own."""
  return list(getattr(choice, "prompt_token_ids", None) or choice.provider_specific_fields["prompt_token_ids"])


def test_versions_and_log_probs_are_those_of_the_sampler(folder, trained):
  for trajectory, _ in trained:
    versions = trajectory.policy_version[trajectory.action_mask]
    assert (np.diff(versions) >= 0).all() and versions.min() >= 0
    assert np.isfinite(trajectory.behavior_logprobs[trajectory.action_mask]).all()

  # The learner's own log-probs of the tokens of its own version; the audit has compared others before the first step.
  of_lag_0 = [
    line["delta_logprob_by_lag"][0] for line in read_metrics(folder, "train") if "delta_logprob_by_lag" in line
  ]
  measured = [delta for delta in of_lag_0 if delta is not None]
  assert measured and max(measured) < 1e-5
