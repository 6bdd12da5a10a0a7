"""Conversations that were written beforehand, as demonstrations: for SFT, in the tokens of a real episode."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sao_jax.chat.conversation import ChatRenderer, Tools
from sao_jax.chat.template import Message
from sao_jax.environments.base import Demonstration


def scripted_chat(
  renderer: ChatRenderer, messages: Sequence[Message], reward: float, tools: Tools = None
) -> Demonstration:
  """Makes the episode in which the assistant says what stands in its messages.

  >>> from sao_jax.data.tokenizer import ByteTokenizer
  >>> script = [
  ...   {"role": "user", "content": "12*7?"},
  ...   {"role": "assistant", "content": "<|tool_call|>python 12*7"},
  ...   {"role": "tool", "content": "84"},
  ...   {"role": "assistant", "content": "<|answer|>84"},
  ... ]
  >>> shown = scripted_chat(ChatRenderer(ByteTokenizer()), script, 1.0)
  >>> ByteTokenizer().decode(shown.token_ids[shown.action_mask])
  '<|tool_call|>python 12*7<|end|><|answer|>84<|end|>'

  Args:
    renderer: the tokenizer and chat template. A template that rewrites history is overruled: the context is extended.
    messages: the conversation. The assistant's turns are texts, with thinking and tool calls as it would write them;
      the last message is one of them.
    reward: the return that the episode earned.
    tools: JSON schemas of the tools.

  Raises:
    ValueError: no turn of the assistant, one behind another, or one that is not the last message.
  """
  # Turns of the assistant and what stands between them, in turn.
  stretches = [(said, list(group)) for said, group in itertools.groupby(messages, lambda m: m["role"] == "assistant")]
  kinds = [said for said, _ in stretches]
  if len(kinds) < 2 or kinds[0] or not kinds[-1] or any(said and len(group) > 1 for said, group in stretches):
    raise ValueError("a script begins with a message to the assistant, and each of its turns follows one; it ends so")

  # Play it: what the assistant says is imitated, all else is not.
  session = renderer.start(stretches[0][1], tools, rewrite="keep")
  for said, group in stretches[1:]:
    if said:
      session.act(session.action_ids(group[0]["content"]))
    else:
      session.observe(group)
  (segment,) = session.segments
  return Demonstration(segment.token_ids, segment.action_mask, reward)
