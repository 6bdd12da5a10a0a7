"""Bodies of requests: what is understood, and that nothing else is overlooked."""

from __future__ import annotations

import json

import pytest
from toys.gateway_toy import ADD, chat_body, user

from sao_jax.gateway.exchange import RequestRefused
from sao_jax.gateway.reading import Delivery, read_chat, read_completion
from sao_jax.gateway.request_fields import read_body

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def refused(read, body) -> RequestRefused:
  with pytest.raises(RequestRefused) as caught:
    read(body)
  assert caught.value.status == 400
  return caught.value


def test_a_whole_chat_request():
  body = {
    "model": "toy",
    "messages": [
      {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
      user("1+1?"),
      {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm", "refusal": None},
      {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ],
    "tools": [ADD | {"function": ADD["function"] | {"strict": True}}],
    "tool_choice": "auto",
    "max_completion_tokens": 9,
    "temperature": 0.5,
    "top_p": 1,
    "stop": "END",
    "n": 2,
    "seed": 3,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 0,
    "return_token_ids": True,
    "user": "me",
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "presence_penalty": 0,
    "logit_bias": {},
    "frequency_penalty": None,
  }
  request, delivery = read_chat(body)
  assert delivery == Delivery(choices=2, stream=True, usage=True, logprobs=True, tokens=True)
  assert (request.max_tokens, request.temperature, request.top_p, request.seed) == (9, 0.5, 1.0, 3)
  assert request.stop == ("END",) and request.token_facts and request.tools == (ADD,)
  system, _, assistant, tool = request.messages
  assert system == {"role": "system", "content": "Be brief."}
  assert assistant["content"] == "" and assistant["reasoning_content"] == "hm"
  assert assistant["tool_calls"][0]["function"]["arguments"] == {"a": 1}
  assert tool == {"role": "tool", "content": "2", "tool_call_id": "call_1"}


def test_tools_may_be_switched_off():
  assert read_chat(chat_body(tools=[ADD], tool_choice="none"))[0].tools is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_may_be_wanted(choice):
  request, _ = read_chat(chat_body(tools=[ADD], tool_choice=choice))
  assert request.must_call and request.tools == (ADD,)
  assert not read_chat(chat_body(tools=[ADD], tool_choice="auto"))[0].must_call


@pytest.mark.parametrize(
  "fields, param, code",
  [
    ({"model": None}, "model", "missing_required_parameter"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": [3]}, "messages[0]", "invalid_type"),
    ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [user("a") | {"cache_control": {"x": 1}}]}, "messages[0].cache_control", "unknown_parameter"),
    (
      {"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]},
      "messages[0].content[0].type",
      "unsupported_parameter",
    ),
    ({"messages": [{"role": "tool", "content": "2"}]}, "messages[0].tool_call_id", "missing_required_parameter"),
    (
      {"messages": [{"role": "tool", "content": "2", "tool_call_id": "call_9"}]},
      "messages[0].tool_call_id",
      "invalid_value",
    ),
    (
      {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "{"}}]}]},
      "messages[0].tool_calls[0].function.arguments",
      "invalid_value",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [ADD], "tool_choice": {"function": {"name": "less"}}}, "tool_choice.function.name", "invalid_value"),
    ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "integer_out_of_bounds"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": 2.5}, "temperature", "decimal_out_of_bounds"),
    ({"top_p": 0}, "top_p", "decimal_out_of_bounds"),
    ({"stop": ["a", ""]}, "stop", "invalid_type"),
    ({"stop": list("abcde")}, "stop", "invalid_value"),
    ({"n": 0}, "n", "integer_out_of_bounds"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"top_logprobs": 0}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 2}, "top_logprobs", "unsupported_parameter"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"presence_penalty": 1}, "presence_penalty", "unsupported_parameter"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
    ({"top_k": 40}, "top_k", "unknown_parameter"),
  ],
)
def test_what_cannot_be_done_is_refused_by_name(fields, param, code):
  refusal = refused(read_chat, chat_body(**fields))
  assert (refusal.param, refusal.code) == (param, code) and param in refusal.message


def test_prompts_are_texts_or_token_ids_one_or_several():
  read = lambda prompt: [request.prompt for request in read_completion({"model": "toy", "prompt": prompt})[0]]
  assert read("a") == ["a"] and read(["a", "b"]) == ["a", "b"]
  assert read([1, 2]) == [(1, 2)] and read([[1, 2], [3]]) == [(1, 2), (3,)]
  for wrong in ("", [], [""], [[]], [1, "a"], [True], [-1], 5, {"a": 1}):
    assert refused(read_completion, {"model": "toy", "prompt": wrong}).param == "prompt"


def test_completions_know_the_log_probability_of_sampled_tokens_only():
  body = {"model": "toy", "prompt": "a"}
  assert read_completion(body | {"logprobs": 0})[1].logprobs and not read_completion(body)[1].logprobs
  for fields in ({"logprobs": 1}, {"logprobs": True}, {"echo": True}, {"suffix": "b"}, {"best_of": 2}):
    assert refused(read_completion, body | fields).param == next(iter(fields))


@pytest.mark.parametrize(
  "body",
  [
    b"{",
    b"[1]",
    b'"a"',
    b"\xff",
    b'{"a": NaN}',
    b'{"a": "\\ud800"}',
    b'{"a": "\xed\xa0\x80"}',
    b"[" * 100000,
    b'{"a": ' + b"9" * 5000 + b"}",
    b'{"a":' * 101 + b"1" + b"}" * 101,
    b'{"a": 1e999}',
  ],
  ids=["open", "list", "text", "bytes", "nan", "surrogate", "raw", "deep", "digits", "levels", "large"],
)
def test_bodies_that_are_no_json_object_are_refused(body):
  assert refused(read_body, body).code == "invalid_json"


def test_a_body_is_read_as_it_is():
  assert read_body(b"") == {} and read_body(json.dumps(chat_body()).encode()) == chat_body()
