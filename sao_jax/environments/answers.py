"""Single-turn answers: how a question is posed, where its answer stands in what was said, and episodes that give one.

As a chat, the answer stands between <answer> and </answer>. In the tokens of the built-in tokenizer:

    <|bos|><|user|>question<|end|><|assistant|>     prompt
    thinking<|answer|>answer<|end|>                 action (thinking is optional)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from sao_jax.chat.conversation import ChatRenderer
from sao_jax.chat.template import Message
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.base import Demonstration
from sao_jax.rewards.answer_text import without_thinking

INSTRUCTION = "Write your final answer between <answer> and </answer>, and nothing else between them."  # of a chat


def read_answer(said: str) -> str | None:
  """Returns the text between the last <answer> and the next </answer> outside the thinking, or None without both."""
  shown = without_thinking(said)
  start = -1 if shown is None else shown.rfind("<answer>")
  if start < 0:
    return None
  answer, end, _ = shown[start + len("<answer>") :].partition("</answer>")
  return answer.strip() if end else None


def byte_answer(tokenizer: ByteTokenizer, action_ids: Int[np.ndarray, "n"], *, marked: bool = True) -> str | None:
  """Returns the text between the last answer token, or the beginning, and the end-of-turn token; None without both.

  Args:
    tokenizer: the built-in one.
    action_ids: int32 [n], one action.
    marked: an answer token has to stand before the answer; False: all that was said is the answer.
  """
  ids = np.asarray(action_ids)
  markers = np.flatnonzero(ids == tokenizer.answer_id)
  if (marked and not len(markers)) or not len(ids) or ids[-1] != tokenizer.end_id:
    return None
  text = tokenizer.decode_bytes(ids[markers[-1] + 1 if marked else 0 : -1])
  return text.strip() if text is not None else None


def encode_question(tokenizer: ByteTokenizer, question: str) -> Int[np.ndarray, "n"]:
  """Encodes the prompt: the question between its turn markers."""
  before, after = (tokenizer.encode_with_specials(text) for text in ("<|bos|><|user|>", "<|end|><|assistant|>"))
  return np.concatenate([before, tokenizer.encode(question), after])


def byte_episode(
  tokenizer: ByteTokenizer, question: str, answer: str, reward: float, *, marked: bool = True
) -> Demonstration:
  """Makes the episode in which the byte tokenizer's policy gives the answer at once."""
  prompt = encode_question(tokenizer, question)
  marker = [tokenizer.answer_id] if marked else []
  action = np.concatenate([marker, tokenizer.encode(answer), [tokenizer.end_id]]).astype(np.int32)
  mask = np.concatenate([np.zeros(len(prompt), dtype=bool), np.ones(len(action), dtype=bool)])
  return Demonstration(np.concatenate([prompt, action]), mask, reward)


def chat_episode(renderer: ChatRenderer, messages: Sequence[Message], said: str, reward: float) -> Demonstration:
  """Makes the episode in which the assistant says a text at once."""
  session = renderer.start(messages)
  session.act(session.action_ids(said))
  (segment,) = session.segments
  return Demonstration(segment.token_ids, segment.action_mask, reward)
