"""Environments that speak text: a tool task through the episode driver, and reasoning-gym tasks as chats."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from toys import chat_toy
from toys.chat_toy import MARKERS, PLAIN, THINKING, TOOLS, message

from sao_jax.chat.conversation import ChatRenderer
from sao_jax.chat.hf_tokenizer import HFTokenizer
from sao_jax.chat.tool_calls import ParseError, parse_hermes
from sao_jax.environments.answers import INSTRUCTION, read_answer
from sao_jax.environments.base import check_step_result
from sao_jax.environments.chat_environment import ChatEnvironment, Reply
from sao_jax.environments.reasoning_gym import ReasoningGym
from sao_jax.episode import Prompt, PromptKey, Status
from sao_jax.errors import ConfigError
from sao_jax.rollout.run_episode import EpisodeLimits, run_episode
from sao_jax.sampler.requests import Completion

pytest.importorskip("tokenizers", reason="the extra `hf` is not installed")
pytest.importorskip("jinja2", reason="the extra `hf` is not installed")

PROMPT = Prompt(PromptKey("search", 0, 0), {"question": "what is 12 times 7?"})


class Search(ChatEnvironment):
  """Answers every call with 84, broken calls with what is wrong, and anything else with a question or the end."""

  def __init__(self, renderer: ChatRenderer, **options):
    super().__init__("search", renderer, **options)
    self.tools = TOOLS

  async def open(self, prompt):
    return [message("user", prompt.data["question"])]

  async def respond(self, said):
    calls = parse_hermes(said).calls
    if calls:
      return Reply([message("tool", call.observation if isinstance(call, ParseError) else "84") for call in calls])
    if "?" in said:
      return Reply([message("user", "no questions")])
    return Reply(done=True, reward=float("84" in said), info={"length": float(len(said))})


@pytest.fixture(scope="module")
def renderers(tmp_path_factory) -> dict[str, ChatRenderer]:
  templates = {"plain": PLAIN, "thinking": THINKING, "markers": MARKERS}
  return {
    name: ChatRenderer(HFTokenizer(chat_toy.save_folder(tmp_path_factory.mktemp(name), template, bos="<s>")))
    for name, template in templates.items()
  }


def play(environment, renderer, turns, prompt=PROMPT):
  """The episode in which the policy samples these texts, by the driver of rollouts."""
  actions = [renderer.tokenizer.encode_with_specials(turn) for turn in turns]
  waiting = iter(actions)

  async def generate(request):
    ids = next(waiting)
    return Completion(ids, np.full(len(ids), -1.0, np.float32), np.zeros(len(ids), np.int32), "stop")

  limits = EpisodeLimits(9, 10**6, 10**6, 10**6, 10**6, renderer.tokenizer.vocab_size)
  return actions, asyncio.run(run_episode(environment, prompt, generate, 0, limits, session_id=0))


def test_an_episode_holds_the_sampled_ids_and_the_templates_text(renderers):
  renderer = renderers["thinking"]
  turns = [
    '<think>\na\n</think>\n\n<tool_call>\n{"name": "search", "arguments": {"n": "12"}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "search"}\n</tool_call><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>',
    "it is 84<|im_end|>",
  ]
  actions, trajectory = play(Search(renderer), renderer, turns)
  assert (trajectory.reward, trajectory.status) == (1.0, Status.TERMINATED)
  assert trajectory.token_ids[trajectory.action_mask].tolist() == np.concatenate(actions).tolist()
  said = [turn.removesuffix("<|im_end|>") for turn in turns]
  broken = parse_hermes(said[1]).calls[0].observation
  history = [
    *(message("user", PROMPT.data["question"]), message("assistant", said[0]), message("tool", "84")),
    *(message("assistant", said[1]), message("tool", broken), message("tool", "84")),
  ]
  context = trajectory.token_ids[: trajectory.turn_starts[-1]]
  assert context.tolist() == renderer.prompt_ids(history, TOOLS).tolist()
  assert "could not be read" in renderer.tokenizer.decode(context)
  assert trajectory.info["template_deviations"] == 0.0 and trajectory.info["length"] == len("it is 84")


def test_markers_of_the_next_role_end_turns(renderers):
  renderer = renderers["markers"]
  environment = Search(renderer)
  assert environment.stop_ids == renderer.stop_ids
  call = '\n<think>a</think>\n<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
  _, trajectory = play(environment, renderer, [f"{call}<|observation|>", "\n<think>b</think>\n84<|user|>"])
  ids = trajectory.token_ids.tolist()
  assert trajectory.reward == 1.0 and ids.count(renderer.tokenizer.bos_id) == 1
  assert ids.count(renderer.tokenizer.id_of("<|observation|>")) == 1  # the sampled one
  sampled = trajectory.token_ids[trajectory.action_mask].tolist()
  assert renderer.tokenizer.id_of("<|observation|>") in sampled


def test_white_space_that_the_template_changes_is_counted(renderers):
  renderer = renderers["thinking"]
  call = '<think>a</think><tool_call>{"name": "search", "arguments": {}}</tool_call><|im_end|>'
  _, trajectory = play(Search(renderer), renderer, [call, "84<|im_end|>"])
  assert trajectory.info["template_deviations"] == 1.0


def test_rewritten_history_begins_a_new_segment_or_is_kept(renderers):  # T4
  renderer = renderers["thinking"]
  turns = ["<think>\na\n</think>\n\nreally?<|im_end|>", "84<|im_end|>"]
  actions, trajectory = play(Search(renderer), renderer, turns)
  assert trajectory.reward == 1.0 and trajectory.info["template_deviations"] == 0.0
  assert trajectory.token_ids[trajectory.action_mask].tolist() == np.concatenate(actions).tolist()
  first, second = trajectory.segment_starts
  assert first == 0 and trajectory.turn_starts[0] < second < trajectory.turn_starts[1]
  rewritten = renderer.tokenizer.decode(trajectory.token_ids[second : trajectory.turn_starts[1]])
  assert "really?" in rewritten and "<think>\na" not in rewritten
  actions, trajectory = play(Search(renderer, rewrite="keep"), renderer, turns)
  assert trajectory.reward == 1.0 and trajectory.info["template_deviations"] == 1.0
  assert trajectory.token_ids[trajectory.action_mask].tolist() == np.concatenate(actions).tolist()


def test_a_chat_environment_has_both_methods(renderers):
  with pytest.raises(TypeError, match="abstract"):
    ChatEnvironment("half", renderers["plain"])


# --- reasoning-gym ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["thinking", "markers"])
def settings(request, renderers) -> ReasoningGym:
  pytest.importorskip("reasoning_gym", reason="the extra `envs` is not installed")
  folder = str(renderers[request.param].tokenizer.folder)
  return ReasoningGym("chain_sum", {"max_terms": 2, "max_digits": 1}, tokenizer_folder=folder, grader_processes=1)


def test_a_question_is_a_chat_of_one_turn(settings):
  tokenizer = settings.tokenizer()
  assert isinstance(tokenizer, HFTokenizer) and settings.tokenizer() is tokenizer
  prompt = settings.prompts(tokenizer, "train", 0)[0]
  answer = settings.entry(prompt)["answer"]

  async def episode(action):
    environment = settings.make(tokenizer)
    ids = await environment.reset(prompt)
    action_ids = np.append(tokenizer.encode_with_specials(action), environment.stop_ids[-1])
    return ids, await environment.step(action_ids)

  for action, reward in (
    (f"<think>\nhm\n</think>\n\n<answer> {answer} </answer>", 1.0),
    (f"<answer>9999</answer> no, <answer>{answer}</answer>", 1.0),
    (f"<think><answer>{answer}</answer></think>", 0.0),
    (answer, 0.0),
    ("", 0.0),
  ):
    ids, result = asyncio.run(episode(action))
    result = check_step_result(result, environment=settings.name, vocab_size=tokenizer.vocab_size)
    assert (result.done, result.reward, len(result.observation)) == (True, reward, 0)
  shown = tokenizer.decode(ids)
  assert INSTRUCTION in shown and prompt.data["question"] in shown and shown.endswith(("assistant\n", "<|assistant|>"))


def test_demonstrations_are_episodes(settings):
  tokenizer = settings.tokenizer()
  source = settings.prompts(tokenizer, "train", 0)
  rewards = []
  for index in range(8):
    shown = settings.demonstration(source[index], tokenizer, np.random.default_rng(index))
    action = shown.token_ids[shown.action_mask]
    said = read_answer(tokenizer.decode(action[:-1]))
    assert (said == settings.entry(source[index])["answer"]) == (shown.reward == 1.0)
    assert action[-1] in settings.make(tokenizer).stop_ids and not shown.action_mask[0]
    rewards.append(shown.reward)
  assert 0.0 < np.mean(rewards) < 1.0


@pytest.mark.parametrize(
  "said, answer",
  [
    ("<answer>4</answer>", "4"),
    ("so <answer>\n4 \n</answer>.", "4"),
    ("<answer>3</answer><answer>4</answer>", "4"),
    ("<answer>3</answer><answer>4", None),
    ("<think><answer>3</answer></think>", None),
    ("<think><answer>3</answer>", None),
    ("<think>a</think>b</think><answer>4</answer>", "4"),
    ("<answer></answer>", ""),
    ("4", None),
  ],
)
def test_what_counts_as_the_answer(said, answer):
  assert read_answer(said) == answer


def test_a_folder_that_is_none_is_refused(tmp_path):
  pytest.importorskip("reasoning_gym", reason="the extra `envs` is not installed")
  with pytest.raises(ConfigError, match="has no tokenizer.json"):
    ReasoningGym("chain_sum", tokenizer_folder=str(tmp_path)).tokenizer()


def test_options_reach_the_template(renderers):
  folder = str(renderers["thinking"].tokenizer.folder)
  settings = ReasoningGym("chain_sum", tokenizer_folder=folder, template_options={"enable_thinking": False})
  pytest.importorskip("reasoning_gym", reason="the extra `envs` is not installed")
  prompt = settings.prompts(settings.tokenizer(), "train", 0)[0]
  ids = asyncio.run(settings.make(settings.tokenizer()).reset(prompt))
  assert settings.tokenizer().decode(ids).endswith("<think>\n\n</think>\n\n")
