"""An agent's episode: its requests are the prompt, what is sampled is its answer, and all it does has an outcome."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import time
import urllib.error
import urllib.request

import numpy as np
import openai
import pytest
from toys import agent_toy, training_toy
from toys.agent_toy import LIMITS, TOKENIZER, Speaker, Tasks, ask, assistant, count, episode, texts_of, user

from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.calculator import Calculator
from sao_jax.environments.mixture import Mixture, Part
from sao_jax.episode import GraderFailure, PromptKey, Status
from sao_jax.errors import ConfigError
from sao_jax.evaluation.fixed_policy import check_prompts
from sao_jax.gateway.agent import Agent
from sao_jax.gateway.agent_episode import AgentSilent
from sao_jax.gateway.harness import HarnessFailure

PLAYED = Agent("toys.agent_toy:played", Tasks(), grace_seconds=2.0)
BEGIN, END = "<|bos|><|user|>", "<|end|><|assistant|>"


@pytest.fixture
def play(monkeypatch):
  """Plays one episode of a harness that is a function in the test."""

  def run(harness, speaker=None, agent=PLAYED, **options):
    monkeypatch.setattr(agent_toy.Played, "play", staticmethod(harness))
    return asyncio.run(episode(agent, speaker or Speaker(), **options))

  return run


@pytest.mark.parametrize("harness", ["count", "count_together"])  # a function, a coroutine
def test_tokens_and_masks_are_those_of_the_conversation(harness):
  agent = Agent(f"toys.agent_toy:{harness}", Tasks())
  speaker = Speaker("yes", "no")

  async def both():
    return await asyncio.gather(episode(agent, speaker, 3), episode(agent, Speaker("maybe"), 5))

  trajectory, other = asyncio.run(both())
  assert texts_of(trajectory) == [f"{BEGIN}one{END}yes<|end|><|user|>two{END}no<|end|>"]
  assert TOKENIZER.decode(trajectory.token_ids[trajectory.action_mask]) == "yes<|end|>no<|end|>"
  assert trajectory.policy_version[trajectory.action_mask].tolist() == [0] * 4 + [1] * 3
  assert (trajectory.reward, other.reward) == (3.0, 5.0)
  assert trajectory.key == PromptKey("agent", 3, 0) and trajectory.status is Status.TERMINATED
  assert (trajectory.info["requests"], trajectory.info["segments"]) == (2.0, 1.0)


def test_answers_are_what_was_sampled_with_calls_and_counts(play):
  tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}}]
  answers = []

  def harness(task):
    client = openai.OpenAI(base_url=task.base_url, api_key=task.key)
    messages = [user("one")]
    for _ in range(2):
      answer = client.chat.completions.create(
        model=task.model, messages=messages, tools=tools, extra_body={"return_token_ids": True}
      )
      answers.append(answer)
      (call,) = answer.choices[0].message.tool_calls
      messages.append(answer.choices[0].message.model_dump(exclude_none=True))
      messages.append({"role": "tool", "tool_call_id": call.id, "content": "three"})
    return 1.0

  trajectory = play(harness, Speaker("I look.<|tool_call|>f two", "<|tool_call|>f four"))
  first, second = (answer.choices[0] for answer in answers)
  assert (first.finish_reason, first.message.content, second.message.content) == ("tool_calls", "I look.", None)
  assert json.loads(first.message.tool_calls[0].function.arguments) == {"x": "two"}
  whole = f"<|bos|><|reserved_1|>f(x)<|end|><|user|>one{END}I look.<|tool_call|>f two<|end|><|observation|>three{END}"
  assert texts_of(trajectory) == [f"{whole}<|tool_call|>f four<|end|>"]

  # What the agent is told of tokens is what the trajectory holds.
  starts = trajectory.turn_starts.tolist()
  for choice, start, answer in zip((first, second), starts, answers):
    assert choice.prompt_token_ids == trajectory.token_ids[:start].tolist()
    assert choice.token_ids == trajectory.token_ids[start : start + len(choice.token_ids)].tolist()
    assert trajectory.action_mask[start : start + len(choice.token_ids)].all()
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (start, len(choice.token_ids))


def test_a_history_that_is_compacted_begins_a_segment(play):  # T4
  def harness(task):
    said = ask(task, user("one"))
    more = ask(task, user("one"), assistant(said), user("two"))
    compacted = (user(f"So far: {said}, {more}"),)
    said = ask(task, *compacted)
    ask(task, *compacted, assistant(f"{said}\n"), user("three"))
    return 0.5

  trajectory = play(harness, Speaker("a", "b", "c", "d"))
  assert texts_of(trajectory) == [
    f"{BEGIN}one{END}a<|end|><|user|>two{END}b<|end|>",
    f"{BEGIN}So far: a, b{END}c<|end|><|user|>three{END}d<|end|>",
  ]
  # Every sampled token once, in the context in which it was sampled; one reward for all.
  assert TOKENIZER.decode(trajectory.token_ids[trajectory.action_mask]) == "".join(f"{c}<|end|>" for c in "abcd")
  assert trajectory.reward == 0.5 and trajectory.info["segments"] == 2.0
  assert trajectory.turn_rewards is None


def test_agents_beside_each_other_in_one_session_are_segments(play):
  def harness(task):
    with concurrent.futures.ThreadPoolExecutor() as pool:
      said = list(pool.map(lambda text: ask(task, user(text)), ["left", "right"]))
    return float(sorted(said) == ["a", "b"])

  trajectory = play(harness, Speaker("a", "b"))
  assert trajectory.reward == 1.0
  texts = texts_of(trajectory)
  assert sorted(text[len(BEGIN) :].partition("<")[0] for text in texts) == ["left", "right"]


def test_sampling_of_its_own_is_overridden_and_counted(play):
  def harness(task):
    ask(task, user("one"), temperature=1.0, top_p=1.0)
    ask(task, user("two"), temperature=0.0)
    ask(task, user("three"), max_tokens=3, stop=["x"])
    tool = {"type": "function", "function": {"name": "f"}}
    ask(task, user("four"), tools=[tool], tool_choice="required")  # as smolagents asks
    return 1.0

  speaker = Speaker("a long answer")
  trajectory = play(harness, speaker)
  assert trajectory.info["overridden_requests"] == 3.0
  assert {(request.temperature, request.max_tokens) for request in speaker.requests} == {(1.0, 64)}


def test_a_lost_connection_costs_no_second_sample(play):
  def harness(task):
    said = ask(task, user("one"), retries=2, timeout=0.4)  # the client of OpenAI tries again by itself
    return float(said == "slow")

  speaker = Speaker("slow", before=lambda turn: time.sleep(0.8))
  trajectory = play(harness, speaker)
  assert len(speaker.requests) == 1 and trajectory.reward == 1.0 and trajectory.info["unread_answers"] == 0.0


def test_an_answer_that_was_lost_on_its_way_is_the_one_that_is_trained_on(play):
  def harness(task):
    with agent_toy.losing_answers(task.base_url, lost=1) as url:
      task = dataclasses.replace(task, base_url=url)
      said = ask(task, user("one"), retries=2)
      return float(ask(task, user("one"), assistant(said), user("two")) == "b")

  trajectory = play(harness, Speaker("a", "b", "c"))
  assert texts_of(trajectory) == [f"{BEGIN}one{END}a<|end|><|user|>two{END}b<|end|>"]
  assert trajectory.reward == 1.0
  assert (trajectory.info["requests"], trajectory.info["repeated_requests"]) == (2.0, 0.0)


def test_a_client_that_gives_up_and_asks_for_something_else_goes_on(play):
  def harness(task):
    with pytest.raises(openai.APITimeoutError):
      ask(task, user("one"), timeout=0.2)
    return float(ask(task, user("two")) == "b")

  trajectory = play(harness, Speaker("a", "b", before=lambda turn: time.sleep(0.5 * (turn == 0))))
  assert texts_of(trajectory) == [f"{BEGIN}one{END}a<|end|>", f"{BEGIN}two{END}b<|end|>"]
  assert trajectory.reward == 1.0 and trajectory.info["unread_answers"] == 1.0


def test_what_a_template_refuses_is_told_to_the_agent(play):
  def harness(task):
    with pytest.raises(openai.BadRequestError, match="role"):
      ask(task, {"role": "function", "name": "f", "content": "one"})
    return float(ask(task, user("two")) == "yes")

  assert play(harness).reward == 1.0


CUTS = {
  "length": (Status.TRUNCATED_LENGTH, {"max_tokens_per_turn": 2}),
  "budget": (Status.TRUNCATED_LENGTH, {"max_tokens": 4}),
  "turns": (Status.TRUNCATED_TURNS, {"max_turns": 1}),
  "context": (Status.TRUNCATED_CONTEXT, {"context_length": 40}),
}


@pytest.mark.parametrize("cut", CUTS)
def test_an_agent_that_is_cut_is_told_and_may_end_with_what_it_has(play, cut):
  status, limits = CUTS[cut]
  seen = []

  def harness(task):
    said = "nothing"
    try:
      said = ask(task, user("one"))
      ask(task, user("one"), assistant(said), user("a question that is longer than the context"))
    except openai.BadRequestError as error:
      seen.append(error.code)
      return 0.25
    return 1.0

  trajectory = play(harness, limits=dataclasses.replace(LIMITS, **limits))
  assert (trajectory.status, trajectory.reward, seen) == (status, 0.25, ["context_length_exceeded"])


def test_an_agent_that_fails_because_it_was_cut_has_earned_nothing(play):
  limits = dataclasses.replace(LIMITS, max_turns=1)
  trajectory = play(agent_toy.count, limits=limits)
  assert (trajectory.status, trajectory.reward) == (Status.TRUNCATED_TURNS, 0.0)


def test_a_harness_that_judges_for_too_long_after_a_cut_is_a_failure_and_no_zero(play):
  def harness(task):
    with pytest.raises(openai.BadRequestError):
      ask(task, user("one"))
    time.sleep(0.5)
    return 1.0

  with pytest.raises(HarnessFailure, match=r"at work still: .*0\.1 s \(grace_seconds\)"):
    agent = dataclasses.replace(PLAYED, grace_seconds=0.1)
    play(harness, Speaker("a long answer"), agent, limits=dataclasses.replace(LIMITS, max_tokens_per_turn=2))


def test_a_judge_that_fails_after_a_cut_is_a_failure_and_no_zero(play):
  def harness(task):
    with pytest.raises(openai.BadRequestError):
      ask(task, user("one"))
    raise GraderFailure("agent", "the sandbox of the tests is gone")

  with pytest.raises(GraderFailure, match="is gone"):
    play(harness, Speaker("a long answer"), limits=dataclasses.replace(LIMITS, max_tokens_per_turn=2))


def test_an_agent_that_has_failed_before_the_cut_is_a_failure_and_no_zero(play):
  speaker = Speaker("a long answer", before=lambda turn: time.sleep(0.6))
  with pytest.raises(HarnessFailure, match="APITimeoutError"):
    limits = dataclasses.replace(LIMITS, max_tokens_per_turn=2)
    play(lambda task: ask(task, user("one"), timeout=0.2), speaker, limits=limits)


def test_a_reward_function_grades_what_ended_without_a_reward(play):
  graded = dataclasses.replace(PLAYED, reward="toys.agent_toy:grade")
  assert play(lambda task: ask(task, user("one")) and None, Speaker("yes"), graded, number=3).reward == 4.0
  limits = dataclasses.replace(LIMITS, max_turns=1)
  assert play(agent_toy.count, Speaker("no"), graded, number=3, limits=limits).reward == 3.0
  graded.graders.close()


@pytest.mark.parametrize(
  "harness, failure, said",
  [
    (lambda task: ask(task, user("one")) and None, GraderFailure, "ended without a reward"),
    (lambda task: ask(task, user("one")) and float("nan"), GraderFailure, "got nan"),
    (lambda task: 1 / 0, HarnessFailure, "ZeroDivisionError: division by zero"),
    (lambda task: ask(task, user("one")) and {}["x"], HarnessFailure, "KeyError"),
    (lambda task: 1.0, HarnessFailure, "before its first request"),
    (lambda task: ask(task, user("one")) and exit(3), HarnessFailure, "SystemExit: 3"),
  ],
)
def test_an_agent_that_fails_is_a_failure_and_no_zero(play, harness, failure, said):
  with pytest.raises(failure, match=said) as raised:
    play(harness)
  assert not raised.value.retryable


@pytest.mark.parametrize("turns", [0, 1])
def test_an_agent_that_says_nothing_any_more_is_a_failure_after_a_while(play, turns):
  def harness(task):
    for _ in range(turns):
      ask(task, user("one"))
    time.sleep(0.6)

  silent = dataclasses.replace(PLAYED, think_timeout=0.3)
  with pytest.raises(AgentSilent, match="nothing for 0.3 s") as raised:
    play(harness, agent=silent)
  assert raised.value.retryable == (not turns)  # what was sampled is not sampled again in the hope of another end


def test_an_agent_may_think_for_longer_than_an_environment_may_take(play):
  def harness(task):
    time.sleep(0.4)
    ask(task, user("one"))
    time.sleep(0.4)
    return 1.0

  assert play(harness, timeout=0.3).reward == 1.0


def post(url: str, key: str, body: object, method: str = "POST") -> tuple[int, dict]:
  """One request of an agent's own."""
  data = None if method == "GET" else json.dumps(body).encode()
  headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
  try:
    with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method)) as response:
      return response.status, json.load(response)
  except urllib.error.HTTPError as error:
    return error.code, json.load(error)["error"]


def test_prompts_are_looked_at_before_work_without_any_agent(caplog):
  """They would wait for agents, or send those that have come away with a closed session."""
  agent = Agent(None, Tasks(), claim_timeout=60.0)
  config = training_toy.replace(training_toy.get_config(), model={"vocab_size": ByteTokenizer.vocab_size})
  began = time.monotonic()
  check_prompts(dataclasses.replace(config, environment=Mixture((Part(agent),))))
  assert time.monotonic() - began < 30.0 and "could not be checked" not in caplog.text
  agent.gateway.close()


def test_an_agent_that_runs_by_itself_claims_an_episode_and_rewards_it(monkeypatch, caplog):
  monkeypatch.setenv("SAO_AGENT_KEY", "secret")
  agent = Agent(None, Tasks())
  with caplog.at_level("INFO", logger="absl"):
    url, admin = f"{agent.gateway.url}/sessions", "secret"
  assert url in caplog.text and "SAO_AGENT_KEY" in caplog.text and "secret" not in caplog.text

  def work():
    status, claim = post(url, admin, {"wait": 20})
    assert status == 200 and claim["data"] == {"number": 2}
    task = agent_toy.AgentTask(**claim)
    assert post(f"{url}/{task.id}", task.key, None, "GET")[1]["state"] == "running"
    ask(task, user("one"))

    # The key of the policy's own programs is not that of the reward.
    assert post(task.reward_url, task.key, {"reward": 9.0})[0] == 401
    assert post(task.reward_url, task.reward_key, {"reward": "much"})[0] == 400
    assert post(task.reward_url, task.reward_key, {"reward": 0.75})[1]["reward"] == 0.75
    assert post(task.reward_url, task.reward_key, {"reward": 1.0})[0] == 409
    with pytest.raises(openai.AuthenticationError):
      ask(task, user("two"))

  async def both():
    return (await asyncio.gather(episode(agent, Speaker(), 2), asyncio.to_thread(work)))[0]

  trajectory = asyncio.run(both())
  assert trajectory.reward == 0.75 and texts_of(trajectory) == [f"{BEGIN}one{END}yes<|end|>"]


def test_settings_that_cannot_work_are_refused_by_name():
  mixed = Mixture((Part(Calculator(name="sums")), Part(Calculator(name="products"))))
  with pytest.raises(ConfigError, match="(?s)environment.tasks: .*several environments.*Make an Agent of each"):
    Agent("toys.agent_toy:count", mixed).prompts(TOKENIZER, "train", 0)
  port = PLAYED.gateway._server._port
  with pytest.raises(ConfigError, match="environment.port: cannot listen"):
    Agent(None, Tasks(), port=port).prompts(TOKENIZER, "train", 0)


def test_strangers_and_neighbours_are_kept_out():
  agent = Agent(None, Tasks(), claim_timeout=0.5, think_timeout=0.5)
  url, admin = f"{agent.gateway.url}/sessions", agent.gateway.key
  assert post(url, "guess", {})[0] == post(url, "", {})[0] == 401
  assert post(url, admin, {})[1]["code"] == "no_episode"
  assert post(url, admin, {"waits": 1})[0] == post(url, admin, {"wait": -1})[0] == 400
  assert post(f"{url}/nobody/reward", "guess", {"reward": 1})[0] == 404

  def work():
    (_, one), (_, two) = (post(url, admin, {"wait": 20}) for _ in range(2))
    assert post(one["reward_url"], two["reward_key"], {"reward": 1.0})[0] == 401
    assert post(f"{url}/{one['id']}", two["key"], None, "GET")[0] == 401
    assert post(f"{url}/{one['id']}", admin, None, "GET")[1]["requests"] == 0
    with pytest.raises(openai.AuthenticationError):
      ask(dataclasses.replace(agent_toy.AgentTask(**one), key=one["reward_key"]), user("one"))

  async def both():
    played = [episode(agent, Speaker(), number) for number in range(3)]  # two are claimed, and then say nothing
    return await asyncio.gather(*played, asyncio.to_thread(work), return_exceptions=True)

  *failures, worked = asyncio.run(both())
  assert worked is None and all(isinstance(failure, AgentSilent) for failure in failures)
  assert sorted(str(failure).rpartition("agent ")[2] for failure in failures) == [
    "has claimed the episode for 0.5 s",
    *["has sent nothing for 0.5 s"] * 2,
  ]
  assert all(failure.retryable for failure in failures)


def test_a_run_that_gives_an_episode_up_ends_its_agent(play):
  ended = []

  def harness(task):
    try:
      ask(task, user("one"))
    except openai.AuthenticationError as error:
      ended.append(error.code)

  async def hang(request):
    await asyncio.Event().wait()

  speaker = Speaker()
  speaker.generate = hang
  agent_toy.Played.play = staticmethod(harness)

  async def cut():
    with pytest.raises(TimeoutError):
      await asyncio.wait_for(episode(PLAYED, speaker), 0.5)
    while not ended:
      await asyncio.sleep(0.01)

  asyncio.run(cut())
  assert ended == ["session_closed"]


def test_log_probabilities_are_refused_since_an_episode_does_not_know_them(play):
  def harness(task):
    with pytest.raises(openai.BadRequestError, match="logprobs"):
      ask(task, user("one"), logprobs=True)
    return count(task)

  assert play(harness).reward == 0.0


def test_demonstrations_are_the_episodes_that_the_harness_would_play(play):
  agent = dataclasses.replace(PLAYED, demonstrations="toys.agent_toy:demonstrate")
  prompt = agent.prompts(TOKENIZER, "train", 0)[3]
  shown = agent.demonstration(prompt, TOKENIZER, np.random.default_rng(0))
  trajectory = play(agent_toy.count, Speaker("yes", "no"), number=3)
  np.testing.assert_array_equal(shown.token_ids, trajectory.token_ids)
  np.testing.assert_array_equal(shown.action_mask, trajectory.action_mask)
  assert shown.reward == trajectory.reward
  assert not hasattr(PLAYED, "demonstration")
