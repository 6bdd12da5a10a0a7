"""Environments with tools: every call of a turn is answered, in order, whatever is wrong with it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from toys import chat_toy
from toys.chat_toy import message

from sao_jax.chat.call_formats import FORMATS, write_call
from sao_jax.chat.conversation import ChatRenderer
from sao_jax.chat.hf_tokenizer import HFTokenizer
from sao_jax.chat.tool_calls import ToolCall
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.chat_environment import Reply
from sao_jax.environments.scripted_chat import scripted_chat
from sao_jax.environments.tool_environment import ToolEnvironment, ToolError
from sao_jax.environments.tool_output import MIN_TOKENS, clip_tokens
from sao_jax.episode import InfrastructureFailure, Prompt, PromptKey, Status
from sao_jax.rollout.run_episode import EpisodeLimits, run_episode
from sao_jax.sampler.requests import Completion

PROMPT = Prompt(PromptKey("repeater", 0, 0), {})
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
COUNT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS = [
  {"type": "function", "function": {"name": name, "parameters": parameters}}
  for name, parameters in (("repeat", SCHEMA), ("count", COUNT))
]
WIDE = EpisodeLimits(9, 10**6, 10**6, 10**6, 10**6, 10**6)


class Repeater(ToolEnvironment):
  """Repeats what it is told; some words are errors of the agent, or of the environment."""

  tools = TOOLS

  async def open(self, prompt):
    return [message("user", "a")]

  async def call(self, name, arguments):
    if arguments["text"] == "bad":
      raise ToolError("Error: bad")
    if arguments["text"] == "gone":
      raise InfrastructureFailure("repeater", "it is gone")
    return arguments["text"]

  async def finish(self, said):
    return Reply(done=True, reward=0.5, info={"length": float(len(said))})


def hf_renderer(folder) -> ChatRenderer:
  pytest.importorskip("tokenizers", reason="the extra `hf` is not installed")
  pytest.importorskip("jinja2", reason="the extra `hf` is not installed")
  return ChatRenderer(HFTokenizer(chat_toy.save_folder(folder)))


@pytest.fixture(scope="module", params=["byte", "hf"])
def renderer(request, tmp_path_factory) -> ChatRenderer:
  return ChatRenderer(ByteTokenizer()) if request.param == "byte" else hf_renderer(tmp_path_factory.mktemp("hf"))


def play(environment, renderer, turns, limits=WIDE):
  """The episode in which the policy samples these texts, by the driver of rollouts."""
  end = renderer.turn_end_id
  waiting = iter([np.append(renderer.tokenizer.encode_with_specials(turn), end).astype(np.int32) for turn in turns])

  async def generate(request):
    ids = next(waiting)
    return Completion(ids, np.full(len(ids), -1.0, np.float32), np.zeros(len(ids), np.int32), "stop")

  return asyncio.run(run_episode(environment, PROMPT, generate, 0, limits, session_id=0))


@pytest.mark.parametrize("call_format", FORMATS)
def test_every_call_is_answered_in_order_and_counted(renderer, call_format):
  if call_format == "byte" and not isinstance(renderer.tokenizer, ByteTokenizer):
    pytest.skip("a format of the built-in tokenizer")
  call = lambda name, **arguments: write_call(ToolCall(name, arguments), call_format, TOOLS)
  broken = {"hermes": "<tool_call>{}</tool_call>", "glm": "<tool_call></tool_call>", "byte": "<|tool_call|>"}
  turns = [
    call("repeat", text="one") + call("shout", text="two") + call("repeat", text="three"),
    broken[call_format] + call("repeat", text="bad") + call("count"),
    "done",
  ]
  trajectory = play(Repeater("repeater", renderer, call_format=call_format), renderer, turns)
  observed = renderer.tokenizer.decode(trajectory.token_ids[~trajectory.action_mask])
  shown = [
    observed.index(text) for text in ("one", "no tool 'shout'; the tools are: repeat, count", "three", "could not be")
  ]
  shown += [observed.index(text) for text in ("Error: bad", "Error: count needs 'n'")]
  assert shown == sorted(shown)
  assert (trajectory.reward, trajectory.status) == (0.5, Status.TERMINATED)
  facts = {name: trajectory.info[name] for name in ("turns", "tool_calls", "tool_errors", "length")}
  assert facts == {"turns": 3.0, "tool_calls": 6.0, "tool_errors": 4.0, "length": 4.0}
  assert 0.0 <= trajectory.info["tool_seconds"] <= trajectory.info["environment_seconds"]


def test_a_failure_that_is_not_the_agents_ends_the_episode():
  renderer = ChatRenderer(ByteTokenizer())
  with pytest.raises(InfrastructureFailure, match="it is gone"):
    play(Repeater("repeater", renderer), renderer, ["<|tool_call|>repeat gone"])


@pytest.mark.parametrize("left, status", [(1, Status.TRUNCATED_CONTEXT), (21, Status.TERMINATED)])
def test_an_output_that_does_not_fit_ends_the_episode_at_its_context(left, status):  # A7
  renderer = ChatRenderer(ByteTokenizer())
  turn = "<|tool_call|>repeat " + "x" * 17  # with its markers the observation has 20 tokens
  prompt = len(renderer.prompt_ids([message("user", "a")], TOOLS))
  used = prompt + len(renderer.tokenizer.encode_with_specials(turn)) + 1
  limits = EpisodeLimits(9, 10**6, 10**6, used + left, 10**6, 10**6)
  trajectory = play(Repeater("repeater", renderer), renderer, [turn, ""], limits)
  assert trajectory.status is status
  assert trajectory.info["tool_calls"] == 1.0  # also of an episode that was cut
  if status is Status.TRUNCATED_CONTEXT:
    assert len(trajectory) == used and trajectory.reward == 0.0


def test_a_long_output_is_cut_in_the_middle():
  renderer = ChatRenderer(ByteTokenizer())
  environment = Repeater("repeater", renderer, max_output_tokens=100)
  trajectory = play(environment, renderer, ["<|tool_call|>repeat " + "h" * 400 + "t" * 600, "done"])
  observed = trajectory.token_ids[trajectory.turn_starts[0] :][~trajectory.action_mask[trajectory.turn_starts[0] :]]
  text = renderer.tokenizer.decode(observed)
  assert len(observed) == 100 + len(renderer.tokenizer.encode_with_specials("<|observation|><|end|><|assistant|>"))
  assert f"{'h' * 35}\n[... 931 tokens left out ...]\n{'t' * 34}<|end|>" in text


TEXTS = (
  "a" * 900,
  "\u00e9\u20ac\U0001f600" * 150,
  "the cat sat on the mat \u20ac\n" * 60,
  "\ufffd" * 300,
  "x\ud800" * 400,
)


@pytest.mark.parametrize("max_tokens", [MIN_TOKENS, MIN_TOKENS + 1, 101, 200])
@pytest.mark.parametrize("text", TEXTS, ids=["letters", "wide", "words", "replaced", "surrogates"])
def test_a_text_is_cut_to_its_tokens_and_to_whole_characters(renderer, text, max_tokens):
  tokenizer = renderer.tokenizer
  whole = text.encode("utf-8", "replace").decode()
  clipped = clip_tokens(text, tokenizer, max_tokens)
  head, marker, tail = clipped.partition("\n[... ")
  number, _, tail = tail.partition(" tokens left out ...]\n")
  assert max_tokens - 8 <= len(tokenizer.encode(clipped)) <= max_tokens
  assert marker and whole.startswith(head) and whole.endswith(tail) and len(head) > 2 and len(tail) > 2
  assert int(number) == len(tokenizer.encode(whole)) - len(tokenizer.encode(head)) - len(tokenizer.encode(tail))


def test_a_text_that_fits_stays_as_it_is(renderer):
  for text in ("", "abc", "\u20ac" * 3):
    assert clip_tokens(text, renderer.tokenizer, MIN_TOKENS) == text
  exact = "\u20ac" * MIN_TOKENS
  number = len(renderer.tokenizer.encode(exact))
  assert clip_tokens(exact, renderer.tokenizer, number) == exact
  assert clip_tokens(exact, renderer.tokenizer, number - 1) != exact


def test_a_script_is_the_episode_that_the_environment_would_play(renderer):
  environment = Repeater("repeater", renderer)
  turns = [write_call(ToolCall("repeat", {"text": "one"}), environment.call_format, TOOLS), "done"]
  script = [message("user", "a"), message("assistant", turns[0]), message("tool", "one"), message("assistant", "done")]
  shown, played = scripted_chat(renderer, script, 0.5, TOOLS), play(environment, renderer, turns)
  assert shown.reward == 0.5
  assert shown.token_ids.tolist() == played.token_ids.tolist()
  assert shown.action_mask.tolist() == played.action_mask.tolist()


@pytest.mark.parametrize("roles", ["", "u", "a", "ua u", "uaa", "aua"])
def test_a_script_that_is_no_episode_is_refused(roles):
  names = {"u": "user", "a": "assistant"}
  with pytest.raises(ValueError, match="a script begins"):
    scripted_chat(ChatRenderer(ByteTokenizer()), [message(names[r], "x") for r in roles if r != " "], 0.0)
