"""Refusals and requests in the terms of OpenAI's API."""

from __future__ import annotations

import dataclasses

import pytest

from sao_jax.gateway.exchange import ChatRequest, RequestRefused, context_exceeded, unknown_key


def test_a_refusal_has_the_form_of_openai():
  refusal = RequestRefused(400, "temperature is 'hot'.", param="temperature", code="invalid_type")
  assert refusal.body() == {
    "error": {
      "message": "temperature is 'hot'.",
      "type": "invalid_request_error",
      "param": "temperature",
      "code": "invalid_type",
    }
  }


def test_a_wrong_key_and_a_missing_one_are_told_apart():
  missing, wrong = unknown_key(""), unknown_key("guess")
  assert missing.status == wrong.status == 401 and missing.code == "invalid_api_key"
  assert "guess" not in wrong.message and "Bearer" in missing.message


def test_a_long_prompt_is_refused_by_its_published_code():
  refusal = context_exceeded(50, 48)
  assert refusal.status == 400 and refusal.code == "context_length_exceeded" and "50" in refusal.message


def test_requests_are_frozen():
  request = ChatRequest(messages=({"role": "user", "content": "a"},))
  with pytest.raises(dataclasses.FrozenInstanceError):
    request.max_tokens = 3
