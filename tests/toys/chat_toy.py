"""Tokenizer folders built on the spot, and chat templates of the published kinds, written for the tests."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from sao_jax.chat.conversation import ChatRenderer, ChatSession
from sao_jax.chat.hf_tokenizer import HFTokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SENTENCES = (
  *("the cat sat on the mat and thought about it", "user assistant system tool observation answer"),
  *('{"name": "search", "arguments": {"query": "jax"}}', "what is 12 times 7? it is 84\n\n", "hello hello there\n"),
)
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"properties": {"n": {"type": "string"}}}}}]

# Every turn is closed by <|im_end|> and a line break; nothing is ever rewritten.
PLAIN = r"""{%- if tools %}
  {{- '<|im_start|>system\n' }}
  {%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}
  {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

# The same, but turns before the last user message lose their thinking, and thinking is laid out anew.
THINKING = r"""{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {%- set said = message.content %}
    {%- set thought = '' %}
    {%- if '</think>' in said %}
      {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip() %}
      {%- set said = said.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if thought and loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
    {{- said + '<|im_end|>\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n' }}
  {%- if open_thinking %}{{ '<think>\n' }}{% endif %}
  {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

# No token of its own closes a turn: the marker of the next role does.
MARKERS = r"""{{- bos_token }}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {%- set thought, said = '', message.content %}
    {%- if '</think>' in said %}
      {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip() %}
      {%- set said = said.split('</think>')[-1] %}
    {%- endif %}
    {{- '<|assistant|>' }}
    {{- '\n<think>' + (thought if loop.index0 > ns.last else '') + '</think>' }}
    {%- if said.strip() %}{{ '\n' + said.strip() }}{% endif %}
  {%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
    {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
  {%- else %}
    {{- '<|' + message.role + '|>\n' + message.content }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def save_folder(
  folder: pathlib.Path,
  template: str | list | None = PLAIN,
  *,
  eos: str = "<|im_end|>",
  bos: str | None = None,
  stop: tuple[str, ...] = (),
  adds_bos: bool = False,
  settings: dict | None = None,
) -> pathlib.Path:
  """A byte-level BPE tokenizer trained on a few sentences, as a folder; `adds_bos` through its post-processor."""
  from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
  )
  tokenizer.train_from_iterator([*SENTENCES] * 4, trainer)
  tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in (*SPECIALS, *([bos] if bos else []))])
  tokenizer.add_tokens([AddedToken(name, normalized=False) for name in MARKUP])
  if adds_bos:
    tokenizer.post_processor = processors.TemplateProcessing(
      single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / "tokenizer.json"))
  config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": "<|endoftext|>"}
  config |= ({"bos_token": bos} if bos else {}) | ({"chat_template": template} if template else {}) | (settings or {})
  write_json(folder / "tokenizer_config.json", config)
  if stop:
    write_json(folder / "generation_config.json", {"eos_token_id": [tokenizer.token_to_id(name) for name in stop]})
  return folder


def write_json(path: pathlib.Path, value: object) -> None:
  path.write_text(json.dumps(value), encoding="utf-8")


def message(role: str, content: str) -> dict[str, str]:
  return {"role": role, "content": content}


def make_renderers(make_folder) -> dict[str, ChatRenderer]:
  """A renderer of every kind; `make_folder(name)` gives an empty folder."""

  def make(template, options=None, **settings):
    return ChatRenderer(HFTokenizer(save_folder(make_folder("folder"), template, **settings)), options=options)

  return {
    "plain": make(PLAIN, stop=("<|im_end|>", "<|endoftext|>")),
    "thinking": make(THINKING),
    "opened": make(THINKING, {"open_thinking": True}),
    "silent": make(THINKING, {"enable_thinking": False}),
    "markers": make(MARKERS, bos="<s>", eos="<|endoftext|>"),
  }


def ids_of(renderer: ChatRenderer, text: str) -> np.ndarray:
  """Ids that a policy would sample to say the text, in which names stand for control tokens."""
  return renderer.tokenizer.encode_with_specials(text)


def context(session: ChatSession) -> list[int]:
  return session.segments[-1].token_ids.tolist()


def check_masks(session: ChatSession, sampled: list[list[int]]) -> None:
  """The masks are True exactly on what was sampled: every sampled token stands in one segment, once."""
  masked = [segment.token_ids[segment.action_mask].tolist() for segment in session.segments]
  assert sum(masked, []) == sum(sampled, [])
  for segment in session.segments:
    assert segment.token_ids.dtype == np.int32 and segment.action_mask.dtype == np.bool_
    assert len(segment.token_ids) == len(segment.action_mask) and not segment.action_mask[0]
