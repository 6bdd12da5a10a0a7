"""Chat templates as published (the package trl carries them), by both sides: the same text, the same ids, or an error.

`launch/test.sh --parity` installs the package without what it needs itself; its files are read, never imported.
"""

from __future__ import annotations

import datetime
import importlib.util
import pathlib
import re

import pytest
from toys import chat_toy
from toys.chat_toy import message

from sao_jax.chat.conversation import ChatRenderer
from sao_jax.chat.hf_tokenizer import HFTokenizer
from sao_jax.chat.template import ChatTemplate
from sao_jax.errors import ConfigError

REASON = "transformers or trl is not installed (launch/test.sh --parity)"
transformers = pytest.importorskip("transformers", reason=REASON)
if (PACKAGE := importlib.util.find_spec("trl")) is None:  # found, not imported
  pytest.skip(REASON, allow_module_level=True)
FOLDER = pathlib.Path(PACKAGE.submodule_search_locations[0]) / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
# Those of the families here, whose ids are compared, too; the others say more about Jinja than about us.
OURS = [name for name in NAMES if re.match("qwen[23]|glm|deepseek|llama3", name) and not re.search("_vl|_train", name)]

SEARCH = {"type": "function", "function": {"name": "search", "arguments": {"n": "é <b>", "k": [1, {"x": None}]}}}
AS_TEXT = {"type": "function", "function": {"name": "search", "arguments": '{"n": "é"}'}}
ASKED = message("user", "what is 12 times 7?")
CONVERSATIONS = {
  "one message": [ASKED],
  "a system": [message("system", " be brief\n"), ASKED],
  "several turns": [message("system", "s"), ASKED, message("assistant", "84"), message("user", "so?\n\n")],
  "an answer at the end": [ASKED, message("assistant", "  yes \n")],
  "nothing said": [message("user", ""), message("assistant", ""), message("user", "")],
  "scripts": [
    message("user", "你好 👩‍👩‍👧 é e\u0301 \u00a0|"),
    message("assistant", "ﬁ ½"),
    message("user", "<b>&'\""),
  ],
  "thinking in the text": [
    *(ASKED, message("assistant", "<think>\nhard\n</think>\n\n84"), message("user", "more")),
    message("assistant", "<think>ok</think>85"),
  ],
  "thinking apart": [
    *(ASKED, message("assistant", "84") | {"reasoning_content": "hard"}, message("user", "more")),
    *(message("assistant", "85") | {"reasoning": "easy"}, message("user", "and?")),
  ],
  "a call": [ASKED, message("assistant", "wait") | {"tool_calls": [SEARCH]}, message("tool", "84")],
  "a call and its thinking": [
    *(ASKED, {"role": "assistant", "content": None, "thinking": "hm", "tool_calls": [SEARCH | {"id": "call_0001"}]}),
    message("tool", '{"n": [1]}') | {"tool_call_id": "call_0001", "name": "search"},
    message("assistant", "so"),
  ],
  "two calls": [
    *(ASKED, message("assistant", "") | {"tool_calls": [SEARCH, SEARCH]}, message("tool", "84")),
    *(message("tool", "eighty-four"), message("user", "so?")),
  ],
  "arguments as text": [ASKED, message("assistant", "") | {"tool_calls": [AS_TEXT]}, message("tool", "84")],
  "no user": [message("assistant", "first"), message("assistant", "second")],
  "a late system": [ASKED, message("system", "s"), ASKED],
  "an unknown role": [ASKED, message("critic", "b")],
  "blocks of text": [message("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
  "no content": [{"role": "user"}],
}
TOOLS = [
  {"type": "function", "function": chat_toy.TOOLS[0]["function"] | {"description": "Searches for 'é' & <b>."}},
  {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]
DOCUMENTS = [{"title": "On products", "text": "12 times 7 is 84."}]
WAYS = (
  {"tools": None, "documents": None, "add_generation_prompt": True},
  {"tools": TOOLS, "documents": DOCUMENTS, "add_generation_prompt": False},
)
VARIABLES = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
MARK = re.compile(r"<[|｜][^|｜'\"]+?[|｜]>|\[[A-Za-z]+\]|<sop>")


def same(theirs, ours, names: str = "") -> None:
  """Both give the same; where transformers raises anything, we raise a ConfigError that names what it said."""
  try:
    expected = theirs()
  except Exception as error:  # whatever a template does
    with pytest.raises(ConfigError) as caught:
      ours()
    assert f"{type(error).__name__}: {error}" in caught.value.problem and names in caught.value.problem
    return
  assert ours() == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_published_template_writes_the_same_text(tmp_path, name):
  source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
  (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
  options = VARIABLES | {"enable_thinking": False, "reasoning_effort": "low"} if len(name) % 2 else VARIABLES
  template, now = ChatTemplate(tmp_path, options), datetime.datetime.now()
  render = transformers.utils.chat_template_utils.render_jinja_template
  for number, conversation in enumerate(CONVERSATIONS.values()):
    given = [{key: value for key, value in one.items() if value is not None} for one in conversation]
    for way in WAYS if name in OURS else WAYS[number % 2 :][:1]:
      theirs = lambda way=way, given=given: render([given], chat_template=source, **way, **options)[0][0]
      ours = lambda way=way, given=given: template.render(given, now=now, **way)
      if datetime.date.today() == now.date():  # some write the date
        same(theirs, ours, names=f"the chat template of {tmp_path}")


@pytest.mark.parametrize("name", OURS)
def test_a_published_template_of_our_families_gives_the_same_ids(tmp_path, name):
  source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
  marks = sorted(set(MARK.findall(source)) - {*chat_toy.SPECIALS, *chat_toy.MARKUP, "<s>"})
  folder = chat_toy.save_folder(tmp_path, source, bos="<s>", settings={"additional_special_tokens": marks})
  reference, renderer = transformers.AutoTokenizer.from_pretrained(folder), ChatRenderer(HFTokenizer(folder))
  for conversation in CONVERSATIONS.values():
    for way in (*WAYS, {"continue_final_message": True}):
      theirs = lambda way=way, given=conversation: reference.apply_chat_template(given, return_dict=False, **way)
      ours = lambda way=way, given=conversation: renderer.prompt_ids(given, **way).tolist()
      if "continue_final_message" not in way:
        same(theirs, ours)
        continue

      # transformers has words of its own for a last message that it does not find.
      try:
        expected = theirs()
      except Exception:
        with pytest.raises(ConfigError):
          ours()
        continue
      assert ours() == expected

  # Turn by turn the same conversation: what was sampled, then the template's text behind it.
  session = renderer.start([ASKED])
  history = [ASKED, message("assistant", session.act(session.action_ids("84"))), message("user", "so?")]
  continuation = session.observe(history[2:])
  assert continuation.exact and renderer.turn_end_id in renderer.stop_ids
  written = renderer.prompt_ids(history).tolist()
  assert written == reference.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
  decode = renderer.tokenizer.decode  # the policy's text meets the template's in other tokens than in the whole
  assert decode(session.segments[-1].token_ids) == decode(written)
