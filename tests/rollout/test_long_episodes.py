"""Episodes whose history is rewritten again and again: no row holds them, and every sampled token is trained."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from toys import chat_toy, pieces_toy
from toys.chat_toy import message
from toys.rewriting import Rewriting, play
from toys.rollout_fakes import STOP, fill, make_buffer, make_trajectory

from sao_jax.algorithm.train_step import make_train_step
from sao_jax.chat.conversation import ChatRenderer
from sao_jax.chat.hf_tokenizer import HFTokenizer
from sao_jax.config import AlgorithmConfig, RolloutConfig
from sao_jax.environments.chat_environment import ChatEnvironment, Reply
from sao_jax.episode import Prompt, PromptKey, Status
from sao_jax.learner.packing import pack, unpack
from sao_jax.rollout.outcomes import BadEvidence, check_identity
from sao_jax.rollout.run_episode import EpisodeLimits, run_episode
from sao_jax.sampler.requests import Completion

# The history is forgotten but for what the user says.
FORGETFUL = r"""{%- for message in messages[-1:] %}
  {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""


class Endless(ChatEnvironment):
  """Asks `turns` times, and rewards every tenth answer."""

  def __init__(self, renderer, turns):
    super().__init__("endless", renderer)
    self.turns, self.count = turns, 0

  async def open(self, prompt):
    return [message("user", "what is 12 times 7?")]

  async def respond(self, said):
    self.count += 1
    reward = 0.1 if self.count % 10 == 0 else None
    if self.count == self.turns:
      return Reply(done=True, reward=1.0)
    return Reply([message("user", f"and now {self.count % 7}?")], reward=reward)


def test_300_turns_with_rewritten_history_are_trained_without_loss(tmp_path):
  """From the chat environment to the gradients, against a plain loop; the rows hold a hundredth of an episode."""
  pytest.importorskip("tokenizers", reason="the extra `hf` is not installed")
  pytest.importorskip("jinja2", reason="the extra `hf` is not installed")
  renderer = ChatRenderer(HFTokenizer(chat_toy.save_folder(tmp_path, FORGETFUL)))
  vocabulary = renderer.tokenizer.vocab_size
  config = RolloutConfig(max_turns=300, row_lengths=(64,), row_counts=(4,))
  limits = EpisodeLimits.of(config, context_length=64, vocab_size=vocabulary)

  async def generate(request):
    ids = chat_toy.ids_of(renderer, f"it is {request.rollout_id} {request.new_token_ids[-4]}<|im_end|>")
    return Completion(ids, np.full(len(ids), -3.0, np.float32), np.zeros(len(ids), np.int32), "stop")

  def episode(rollout_id, turns, limits=limits):
    prompt = Prompt(PromptKey("endless", rollout_id, 0), {})
    return asyncio.run(run_episode(Endless(renderer, turns), prompt, generate, rollout_id, limits, session_id=0))

  trajectories = [episode(0, 300), episode(1, 300, dataclasses.replace(limits, max_turns=50)), episode(2, 1)]
  first, cut, _ = trajectories
  assert first.status is Status.TERMINATED and cut.status is Status.TRUNCATED_TURNS
  assert len(first.turn_starts) == len(first.segment_starts) == 300 and len(cut.turn_starts) == 50
  assert first.reward == pytest.approx(29 * 0.1 + 1.0) and len(first) > 64 * 100

  # The buffer promises a batch, and the rows hold it.
  buffer = make_buffer(
    batch_size=3,
    longest_context=64,
    make_batch=lambda batch: pack(batch, config.row_lengths, config.row_counts),
  )
  assert fill(buffer, *trajectories) == [True] * 3
  batch = buffer.take(3, 0)
  assert batch.token_ids.shape[1] == 64 and batch.token_ids.shape[0] % 4 == 0
  found = {one["token_ids"].tobytes(): one for one in unpack(batch)}
  for trajectory in trajectories:
    one = found[trajectory.token_ids.tobytes()]
    np.testing.assert_array_equal(one["behavior_logprobs"], trajectory.behavior_logprobs)
    np.testing.assert_array_equal(one["rewards"], trajectory.token_rewards)

  algorithm = AlgorithmConfig(
    truncation="bootstrap", gamma=0.99, whiten_advantages=False, advantage_values="pre", value_updates=1
  )
  step = make_train_step(algorithm, pieces_toy.POLICY, pieces_toy.CRITIC)
  state, metrics = step(pieces_toy.train_state(vocabulary), batch)
  assert metrics["num_trained_tokens"] == sum(trajectory.num_sampled for trajectory in trajectories)
  pieces_toy.assert_equal_to_plain_loop(algorithm, trajectories, state, metrics, vocabulary)


def test_rows_do_not_limit_an_episode():
  """Twenty turns whose contexts use 28 of 64 tokens: 280 tokens in all, in rows of 64."""
  config = RolloutConfig(max_turns=20, row_lengths=(64,))
  limits = dataclasses.asdict(EpisodeLimits.of(config, context_length=64, vocab_size=100))
  _, trajectory = play(Rewriting(turns=20, fresh=range(3, 14)), [9] * 7 + [STOP], **limits)
  assert (trajectory.status, len(trajectory.turn_starts)) == (Status.TERMINATED, 20)
  assert len(trajectory) > 3 * 64 and trajectory.longest_segment == 28


def test_an_episode_may_be_bounded_in_all_its_contexts():
  config = RolloutConfig(max_turns=20, row_lengths=(64,), max_trajectory_tokens=100)
  limits = dataclasses.asdict(EpisodeLimits.of(config, context_length=64, vocab_size=100))
  _, trajectory = play(Rewriting(turns=20, fresh=range(3, 14)), [9] * 7 + [STOP], **limits)
  assert trajectory.status is Status.TRUNCATED_CONTEXT and 64 < len(trajectory) <= 100


def test_a_context_longer_than_a_row_is_filtered_before_a_batch_is_promised():
  buffer = make_buffer(batch_size=2, longest_context=12)
  with pytest.raises(BadEvidence) as error:
    fill(buffer, make_trajectory(0, turns=((12, 0),)))
  assert error.value.reason == "context longer than a row"


def test_a_saved_trajectory_that_no_row_holds_any_more_does_not_stop_the_resume():
  """The rows were made shorter: it is filtered and counted, and the others are trained."""
  before = make_buffer(batch_size=2)
  fill(before, make_trajectory(0), make_trajectory(1, turns=((30, 0),)), make_trajectory(2))
  after = make_buffer(batch_size=2, longest_context=16, make_batch=lambda trajectories: pack(trajectories, (16,), (1,)))
  after.restore(before.snapshot())
  counters = after.ledger.counters()
  check_identity(counters)
  assert (counters["filtered"], counters["filtered/context longer than a row"], len(after)) == (1, 1, 2)
  assert after.take(2, 0).action_mask.sum() == 8
