"""Bodies of chat and completion requests, checked field by field, and how their answers are to be delivered."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sao_jax.gateway.chat_messages import read_messages, read_tools
from sao_jax.gateway.exchange import ChatRequest, CompletionRequest
from sao_jax.gateway.request_fields import (
  check_defaults,
  check_known,
  flag_of,
  number_of,
  object_of,
  refuse,
  text_of,
  unsupported,
  whole_number_of,
)

MOST_TOKENS, MOST_CHOICES, MOST_STOPS, MOST_PROMPTS = 2**31 - 1, 128, 4, 128

# Fields that change nothing that is sampled: they are accepted, and nothing is done with them.
HARMLESS = frozenset(
  {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "store"}
)
SHARED = frozenset(
  {"model", "max_tokens", "temperature", "top_p", "stop", "n", "seed", "stream", "stream_options", "logprobs"}
  | {"return_token_ids"}
)
CHAT = SHARED | {"messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens", "top_logprobs"}
COMPLETION = SHARED | {"prompt"}

# Fields that are understood, but only with these values.
ONLY = {"frequency_penalty": (0, 0.0), "presence_penalty": (0, 0.0), "logit_bias": ()}
ONLY_CHAT = ONLY | {
  "response_format": ({"type": "text"},),
  "modalities": (["text"],),
  "parallel_tool_calls": (True,),
  "top_logprobs": (0,),
  **dict.fromkeys(("audio", "functions", "function_call", "prediction", "reasoning_effort", "verbosity"), ()),
  "web_search_options": (),
}
ONLY_COMPLETION = ONLY | {"echo": (False,), "suffix": (), "best_of": (1,)}


@dataclasses.dataclass(frozen=True)
class Delivery:
  """The form in which a client wants its answer.

  Attributes:
    choices: answers to each conversation or prompt.
    stream: send it as it is sampled.
    usage: with `stream`, the tokens' numbers in a last chunk.
    logprobs: with the log-probability of each sampled token.
    tokens: with the ids, and the versions of the policy that have sampled them.
  """

  choices: int = 1
  stream: bool = False
  usage: bool = False
  logprobs: bool = False
  tokens: bool = False


def read_chat(body: Mapping[str, Any]) -> tuple[ChatRequest, Delivery]:
  """Reads the body of a chat request.

  Raises:
    RequestRefused: naming the first field that is unknown, wrong, or asks for what the server does not do.
  """
  # Names first, then values.
  check_known(body, CHAT | HARMLESS | ONLY_CHAT.keys())
  check_defaults(body, ONLY_CHAT)
  sampling, delivery = _read_shared(body)
  delivery = dataclasses.replace(delivery, logprobs=flag_of(body, "logprobs"))
  if body.get("top_logprobs") is not None and not delivery.logprobs:
    raise refuse("top_logprobs", "it is only allowed together with logprobs.")

  # Two names for one bound.
  longest = whole_number_of(body, "max_completion_tokens", 1, MOST_TOKENS)
  if longest is not None and sampling["max_tokens"] not in (None, longest):
    raise refuse("max_completion_tokens", "it differs from max_tokens, its older name; send one of them.")
  sampling["max_tokens"] = longest or sampling["max_tokens"]
  sampling["token_facts"] = delivery.logprobs or delivery.tokens

  # The conversation itself.
  if "messages" not in body:
    raise refuse("messages", "it is missing.", "missing_required_parameter")
  must_call = body.get("tool_choice") not in (None, "none", "auto")
  messages, tools = read_messages(body["messages"]), read_tools(body)
  return ChatRequest(messages=messages, tools=tools, must_call=must_call, **sampling), delivery


def read_completion(body: Mapping[str, Any]) -> tuple[list[CompletionRequest], Delivery]:
  """Reads the body of a completion request: one prompt or several, as texts or as token ids.

  Raises:
    RequestRefused: as `read_chat`.
  """
  check_known(body, COMPLETION | HARMLESS | ONLY_COMPLETION.keys())
  check_defaults(body, ONLY_COMPLETION)
  sampling, delivery = _read_shared(body)

  # The number of likeliest tokens beside each sampled one; 0 asks for the sampled ones alone.
  if isinstance(body.get("logprobs"), bool):
    raise refuse("logprobs", "it must be an integer.", "invalid_type")
  if whole_number_of(body, "logprobs", 0, MOST_TOKENS):
    raise unsupported("logprobs", "this server knows those of sampled tokens only: send 0.")
  delivery = dataclasses.replace(delivery, logprobs=body.get("logprobs") is not None)
  sampling["token_facts"] = delivery.logprobs or delivery.tokens
  return [CompletionRequest(prompt=prompt, **sampling) for prompt in _read_prompts(body)], delivery


def _read_shared(body: Mapping[str, Any]) -> tuple[dict[str, Any], Delivery]:
  """Reads what both kinds of requests have: the fields of a `SamplingRequest`, and the delivery."""
  model = text_of(body, "model")
  if not model:
    raise refuse("model", "it is missing.", "missing_required_parameter")
  text_of(body, "user")

  # The rules of sampling.
  sampling = {
    "model": model,
    "max_tokens": whole_number_of(body, "max_tokens", 1, MOST_TOKENS),
    "temperature": number_of(body, "temperature", 0, 2),
    "top_p": number_of(body, "top_p", 0, 1),
    "stop": _read_stop(body.get("stop")),
    "seed": whole_number_of(body, "seed", -(2**63), 2**63 - 1),
  }
  if sampling["top_p"] == 0:
    raise refuse("top_p", "it must be above 0.", "decimal_out_of_bounds")

  # The options of a stream make sense for a stream only.
  stream, options = flag_of(body, "stream"), object_of(body.get("stream_options") or {}, "stream_options")
  check_known(options, ("include_usage", "include_obfuscation"), "stream_options.")
  check_defaults(options, {"include_obfuscation": (False,)})
  if options and not stream:
    raise refuse("stream_options", "it is only allowed together with stream.")
  return sampling, Delivery(
    choices=whole_number_of(body, "n", 1, MOST_CHOICES) or 1,
    stream=stream,
    usage=flag_of(options, "include_usage", "stream_options."),
    tokens=flag_of(body, "return_token_ids"),
  )


def _read_stop(value: Any) -> tuple[str, ...]:
  texts = [] if value is None else value if isinstance(value, list) else [value]
  if len(texts) > MOST_STOPS:
    raise refuse("stop", f"there are {len(texts)} texts; at most {MOST_STOPS} are allowed.")
  if not all(isinstance(text, str) and text for text in texts):
    raise refuse("stop", "it must be a string or a list of strings, none of them empty.", "invalid_type")
  return tuple(texts)


def _read_prompts(body: Mapping[str, Any]) -> list[str | tuple[int, ...]]:
  """Reads `prompt`: a text, texts, token ids, or lists of token ids."""
  prompt = body.get("prompt")
  if prompt is None:
    raise refuse("prompt", "it is missing.", "missing_required_parameter")

  # A list of numbers is one prompt, any other list has several.
  several = isinstance(prompt, list) and not all(_is_id(item) for item in prompt)
  prompts = prompt if several else [prompt]
  if not prompts or len(prompts) > MOST_PROMPTS:
    raise refuse("prompt", f"there must be 1 to {MOST_PROMPTS} of them.")

  read: list[str | tuple[int, ...]] = []
  for item in prompts:
    if not (isinstance(item, str) or (isinstance(item, list) and all(_is_id(token) for token in item))):
      raise refuse("prompt", "it must be a string, token ids, or a list of either.", "invalid_type")
    if not item:
      raise refuse("prompt", "it is empty: begin with at least one token.")
    read.append(item if isinstance(item, str) else tuple(item))
  return read


def _is_id(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_TOKENS
