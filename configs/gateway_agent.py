"""An agent behind the gateway on a laptop CPU: a harness on the openai client, and a tiny model to train with it.

    47*86                  question, a user's message
    calc 47*86             tool call, which the harness answers with 4042
    4042                   the assistant's answer

The harness knows nothing of training: it asks a model for its next message, as any agent does. The policy imitates an
expert that makes mistakes on purpose, which leaves something to learn for SAO.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from configs import calculator
from sao_jax.chat.byte_chat import write_byte_call
from sao_jax.config import RunConfig
from sao_jax.environments import arithmetic
from sao_jax.environments.calculator import Calculator, change_digit
from sao_jax.gateway.agent import Agent
from sao_jax.gateway.sessions import AgentTask
from sao_jax.rewards.exact_match import integer_match

if TYPE_CHECKING:
  import openai

PARAMETERS = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": PARAMETERS}}]
REQUESTS = 4  # of an episode, after which the harness gives up
NOISE = 0.3  # chance that one step of the expert goes wrong


async def play(task: AgentTask) -> float:
  """Plays one episode: a question, calls of the tool, an answer; returns its reward."""
  chat = client().with_options(base_url=task.base_url, api_key=task.key).chat.completions
  question = task.data["question"]
  messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
  for _ in range(REQUESTS):
    answer = await chat.create(model=task.model, messages=messages, tools=TOOLS)
    said = answer.choices[0].message
    if not said.tool_calls:
      return integer_match(said.content or "", arithmetic.solve(question))
    messages.append(said.model_dump(exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": call.id, "content": run(call.function)} for call in said.tool_calls]
  return 0.0


def run(function: Any) -> str:
  """Answers a tool call."""
  value = arithmetic.evaluate_call(str(json.loads(function.arguments).get("x")))
  return "error" if value is None else str(value)


@functools.cache
def client() -> openai.AsyncOpenAI:
  """The connections of all episodes, which share one event loop; each has its own address and key."""
  import openai

  return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="of the episode")


def demonstrate(data: dict[str, Any], rng: np.random.Generator) -> tuple[list[dict[str, Any]], list[Any], float]:
  """Writes the conversation of an expert, whose every step may go wrong: (messages, tools, reward)."""
  question, call = data["question"], data["question"]
  messages = [{"role": "user", "content": question}]

  # It guesses, or computes; a wrong digit is computed with, and never noticed.
  if rng.random() < NOISE / 2:
    said = str(rng.integers(100))
  else:
    call = change_digit(question, rng) if rng.random() < NOISE else question
    value = arithmetic.evaluate_call(call)
    said = "error" if value is None else str(value)
    messages.append({"role": "assistant", "content": write_byte_call("calc", {"x": call}, TOOLS)})
    messages.append({"role": "tool", "content": said})

  # The answer is copied, with a mistake now and then.
  answer = change_digit(said, rng) if said != "error" and rng.random() < NOISE / 2 else said
  messages.append({"role": "assistant", "content": answer})
  return messages, TOOLS, integer_match(answer, arithmetic.solve(question))


def get_config() -> RunConfig:
  """The quickstart's model and numbers, with fewer steps: every turn is an HTTP request."""
  base = calculator.get_config()
  agent = Agent(
    "configs.gateway_agent:play",
    Calculator(num_operands=2, max_operand=99),
    name="gateway_agent",
    demonstrations="configs.gateway_agent:demonstrate",
  )
  return dataclasses.replace(
    base,
    name="gateway_agent",
    environment=agent,
    rollout=dataclasses.replace(base.rollout, max_turns=REQUESTS + 1, max_tokens=72, max_tokens_per_turn=18),
    sft=dataclasses.replace(base.sft, batch_size=32, steps=500),
    value_pretraining=dataclasses.replace(base.value_pretraining, demonstration_steps=30, min_steps=60, max_steps=60),
    evaluation=dataclasses.replace(base.evaluation, every=25, prompts=200),
    training=dataclasses.replace(base.training, steps=60, checkpoint_every=25),
  )
