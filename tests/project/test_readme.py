"""What the READMEs show is what the tests run: names, paths, overrides, tables and links of all of them."""

from __future__ import annotations

import ast
import fnmatch
import pathlib
import pkgutil
import re

import jax
import pytest
from toys import algorithm_toy
from toys.metrics_table import explained_metrics
from toys.paths import REPOSITORY

from sao_jax.huggingface.published import size_table
from sao_jax.sampler.slot_times import SLOT_STATES
from sao_jax.training.step_metrics import OVER_THE_RUN, WAITS

FRONT = REPOSITORY / "README.md"
READMES = sorted(
  path
  for pattern in ("*.md", "launch/*.md", "configs/*.md", "notebooks/*.md", "sao_jax/**/*.md")
  for path in REPOSITORY.glob(pattern)
)
WIDTH = 120
MODULE = re.compile(r"`(sao_jax(?:\.\w+)+)[`(]")
LINK = re.compile(r"\]\(([^)\s]+)\)")

each_readme = pytest.mark.parametrize("path", READMES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())


def text(name: str | pathlib.Path) -> str:
  return (REPOSITORY / name).read_text(encoding="utf-8")


def everything() -> str:
  return "\n".join(text(path) for path in READMES)


def anchors(markdown: str) -> set[str]:
  """The anchors that GitHub makes of the headings."""
  without_code = re.sub(r"^```.*?^```$", "", markdown, flags=re.DOTALL | re.MULTILINE)
  headings = re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)
  return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_all_readmes_are_found():
  names = {path.relative_to(REPOSITORY).as_posix() for path in READMES}
  rooms = ("benchmarks", "environments", "huggingface", "models", "parallel", "rollout")
  assert names >= {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "launch/README.md"}
  assert names >= {f"sao_jax/{room}/README.md" for room in rooms}


def test_the_front_page_is_short_and_leads_to_all_others():
  assert len(text(FRONT).splitlines()) <= 150
  linked = {(REPOSITORY / link).resolve() for link in LINK.findall(text(FRONT)) if "://" not in link}
  assert not [path for path in READMES if path != FRONT and path.resolve() not in linked]


@each_readme
def test_lines_are_short(path):
  lines = [re.sub(r"\(https?://[^)]+\)", "()", line) for line in text(path).splitlines()]
  assert not [line for line in lines if len(line) > WIDTH]


@each_readme
def test_relative_links_resolve(path):
  wrong = []
  for link in LINK.findall(text(path)):
    if "://" in link:
      continue
    name, _, anchor = link.partition("#")
    target = (path.parent / name).resolve() if name else path
    if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
      wrong.append(link)
  assert not wrong


@each_readme
def test_programs_files_and_keys_exist(path):
  for name in re.findall(r"\blaunch\.(\w+)", text(path)):
    assert (REPOSITORY / "launch" / f"{name}.py").exists(), name
  for name in re.findall(r"`((?:sao_jax|configs|launch|tests|notebooks)/[\w/.]+\.\w+)`", text(path)):
    assert (REPOSITORY / name).exists(), name


@each_readme
def test_modules_and_functions_exist(path):
  for name in MODULE.findall(text(path)):
    pkgutil.resolve_name(name)  # raises


@each_readme
def test_python_blocks_are_python_and_import_what_there_is(path):
  for block in re.findall(r"^```python\n(.*?)^```$", text(path), re.DOTALL | re.MULTILINE):
    # A snippet may await, as in a notebook.
    tree = compile(block, str(path), "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
      if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in ("sao_jax", "configs", "launch"):
        for alias in node.names:
          pkgutil.resolve_name(f"{node.module}.{alias.name}")


@each_readme
def test_no_placeholder_is_left(path):
  assert not re.findall(r"\b(?:TODO|TBD|[A-Z]+_FIGURES)\b|@@", text(path))


def test_the_functions_that_read_tool_calls_are_named():
  names = set(MODULE.findall(text("sao_jax/environments/WRITE.md")))
  assert {"sao_jax.chat.tool_calls.parse_hermes", "sao_jax.chat.tool_calls.parse_glm"} <= names


def test_the_environment_is_the_tested_one_and_short():
  source = text("tests/toys/readme_environment.py").rstrip()
  assert f"```python\n{source}\n```" in text("sao_jax/environments/WRITE.md")
  assert len(source.splitlines()) <= 40


def test_the_map_of_the_code_is_the_tree():
  (tree,) = re.findall(r"^```\nsao_jax/\n(.*?)^```$", text(FRONT), re.DOTALL | re.MULTILINE)
  mapped = re.findall(r"^  ([\w.]+/?) ", tree, re.MULTILINE)
  package = REPOSITORY / "sao_jax"
  rooms = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
  assert {name for name in mapped if name.endswith("/")} == rooms
  assert all((package / name).exists() for name in mapped) and len(mapped) == len(set(mapped))


def test_the_map_of_the_code_goes_up_as_the_rooms_do():
  """The README says that a room imports from those above it: its order is that of the test of the layers."""
  (order,) = (
    node.value
    for node in ast.parse(text("tests/project/test_import_layers.py")).body
    if isinstance(node, ast.Assign) and node.targets[0].id == "ROOMS"
  )
  rooms = [node.value for node in ast.walk(order) if isinstance(node, ast.Constant)]
  (tree,) = re.findall(r"^```\nsao_jax/\n(.*?)^```$", text(FRONT), re.DOTALL | re.MULTILINE)
  mapped = re.findall(r"^  (\w+)/ ", tree, re.MULTILINE)
  assert sorted(mapped, key=rooms.index) == mapped


def test_every_override_they_mention_is_a_field():
  from configs.calculator import get_config
  from sao_jax.configuration import config_tree
  from sao_jax.environments.mixture import Mixture, Part
  from sao_jax.environments.online_styles import OnlineStyles
  from sao_jax.environments.question_answer import QuestionAnswer

  config = config_tree.replace(get_config(), {"sampler.mesh.data": 1})  # a section that is None by default
  mixture = Mixture((Part(config.environment), Part(QuestionAnswer("questions.jsonl"))))
  known = {path for path, _, _ in config_tree.leaves(config)}
  for environment in (mixture, OnlineStyles()):
    known |= {path for path, _, _ in config_tree.leaves(environment, "environment.")}
  mentioned = set(re.findall(r"--config\.([a-z0-9_.]+)\b", everything()))
  assert len(mentioned) > 15 and mentioned <= known


def test_every_field_they_mention_is_one():
  """`rollout.max_staleness` and the like, without the dashes."""
  from configs.calculator import get_config
  from sao_jax.configuration import config_tree

  known = {path for path, _, _ in config_tree.leaves(get_config())}
  sections = "|".join(sorted({path.partition(".")[0] for path in known if "." in path}))
  mentioned = set(re.findall(rf"`((?:{sections})\.(?!safetensors)[a-z_.]+)(?:=[^`]*)?`", everything()))
  assert len(mentioned) > 10 and mentioned <= known


def test_the_metrics_they_explain_are_those_of_a_train_step():
  batch = algorithm_toy.pack(algorithm_toy.SPREAD, 16)
  step = algorithm_toy.train_step(algorithm_toy.CONFIG)
  _, metrics = jax.eval_shape(step, jax.eval_shape(algorithm_toy.train_state), batch)
  explained = explained_metrics()
  unexplained = {key for key in metrics if not any(fnmatch.fnmatch(key, name) for name in explained)}
  assert not unexplained
  source = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "sao_jax").rglob("*.py"))
  made = {f"{wait}_wait_{unit}" for wait in WAITS for unit in ("seconds", "fraction")}
  made |= {f"sampler_{state}_fraction" for state in SLOT_STATES}
  made |= {f"run_{name}" for name in OVER_THE_RUN}
  unknown = {key for key in explained - metrics.keys() - made if "*" not in key and f'"{key}"' not in source}
  assert not unknown


def test_the_axes_it_explains_are_those_of_the_mesh():
  from sao_jax.parallel.mesh import AXES

  assert re.findall(r"^\| `(\w+)` \| [^|]+ \|$", text("sao_jax/parallel/README.md").split("\n\n    ")[0], re.M) == [
    *AXES
  ]
  named = re.search(r"axes ((?:`\w+`(?:, | and )?)+)", text(FRONT))
  assert re.findall(r"`(\w+)`", named[1]) == [*AXES]


def test_every_outcome_is_explained():
  from sao_jax.rollout.outcomes import Outcome

  explained = re.findall(r"^\| `(\w+)` \|", text("sao_jax/rollout/README.md").split("## ")[0], re.MULTILINE)
  assert explained == [outcome.value for outcome in Outcome]


def test_the_table_of_sizes_is_the_computed_one():
  assert f"\n\n{size_table()}\n\n" in text("sao_jax/huggingface/README.md")


def test_every_extra_is_explained():
  setup = text("setup.py")
  (extras,) = (
    node.value for node in ast.parse(setup).body if isinstance(node, ast.Assign) and node.targets[0].id == "EXTRAS"
  )
  table = text("launch/README.md").split("| extra | for |")[1].split("\n\n")[0]
  explained = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line)}
  assert explained == {key.value for key in extras.keys}


def test_it_names_the_release_of_transformers_that_setup_asks_for():
  (wanted,) = re.findall(r'"hf": \["transformers>=([\d.]+),', text("setup.py"))
  assert re.findall(r"GLM-5\.2 need transformers ≥ ([\d.]+):", text("sao_jax/huggingface/README.md")) == [wanted]


def test_modules_that_moved_are_where_the_changelog_says():
  rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text("CHANGELOG.md").split("| 0.1.0 | now |")[1], re.MULTILINE)
  moved = [name for _, now in rows if "---" not in now for name in now.split(", ")]
  package = REPOSITORY / "sao_jax"
  missing = [name for name in moved if not ((package / f"{name}.py").exists() or (package / name).exists())]
  assert len(moved) > 40 and not missing
