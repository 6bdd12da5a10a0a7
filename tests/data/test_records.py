"""Records by number: JSON lines against plain json, parquet and Arrow files against what was written."""

from __future__ import annotations

import csv
import importlib
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.data import arrow_records
from sao_jax.data.csv_records import CSVRecords
from sao_jax.data.json_lines import JSONLines
from sao_jax.data.prompts import make_prompt_iterator
from sao_jax.data.records import RecordPrompts
from sao_jax.episode import BadPrompt
from sao_jax.errors import ConfigError

FIELDS = {"question": "q", "answer": "a"}
ROWS = [{"q": f"é{number}\u2028?", "a": number, "unused": "x" * 50} for number in range(10)]

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
objects = st.dictionaries(texts, st.none() | st.integers() | texts | st.lists(texts, max_size=2), max_size=3)


def open_prompts(path, split=""):
  return RecordPrompts(path, environment="e", fields=FIELDS, split=split)


def answers(prompts):
  return [prompts[index].data["answer"] for index in range(len(prompts))]


def write_lines(path, rows=ROWS):
  path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="\n")
  return path


@given(
  rows=st.lists(st.tuples(objects, st.sampled_from(["\n", "\r\n", "\n\n", "\r\n  \t\r\n"])), max_size=6),
  bom=st.booleans(),
  last_line_ends=st.booleans(),
  ascii=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_line_is_what_json_makes_of_it(tmp_path_factory, rows, bom, last_line_ends, ascii):
  text = "".join(json.dumps(row, ensure_ascii=ascii) + end for row, end in rows)
  if not last_line_ends:
    text = text.rstrip()
  path = tmp_path_factory.getbasetemp() / "lines.jsonl"
  path.write_bytes(b"\xef\xbb\xbf" * bom + text.encode("utf-8"))

  records = JSONLines(path)
  assert len(records) == len(rows)
  order = [*range(len(rows))][::-1]  # not as they stand in the file
  assert [records[index] for index in order] == [rows[index][0] for index in order]
  lines = path.read_bytes().split(b"\n")
  for index, (row, _) in enumerate(rows):
    number = int(records.place(index).rpartition(":")[2])
    assert json.loads(lines[number - 1].decode("utf-8-sig")) == row


@given(
  rows=st.lists(st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0")), min_size=2,
    max_size=2), max_size=6),
  bom=st.booleans(),
  end=st.sampled_from(["\n", "\r\n"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_every_record_of_a_csv_file_is_what_csv_makes_of_it(tmp_path_factory, rows, bom, end):
  path = tmp_path_factory.getbasetemp() / "rows.csv"
  with path.open("w", encoding="utf-8-sig" if bom else "utf-8", newline="") as file:
    writer = csv.writer(file, lineterminator=end)
    writer.writerows([["q", "a b"], *rows])
  with path.open(encoding="utf-8-sig", newline="") as file:
    expected = [*csv.DictReader(file)]
  records = CSVRecords(path, ["q", "a b"])
  assert [records[index] for index in reversed(range(len(records)))] == expected[::-1]


def test_a_csv_file_is_read_by_its_fields_and_damaged_records_are_named(tmp_path):
  path = tmp_path / "x.csv"
  path.write_text('Problem,Short Answer\n"two\nlines, ""so""",1\n\none,2,3\nlast,4\n"short ""\n,5""",6\nshort\n')
  prompts = RecordPrompts(path, environment="e", fields={"question": "Problem", "answer": "Short Answer"})
  assert [prompts[index].data for index in (0, 2)] == [
    {"question": 'two\nlines, "so"', "answer": "1"},
    {"question": "last", "answer": "4"},
  ]
  with pytest.raises(BadPrompt, match=r"x\.csv:5 has 3 values for 2 fields"):
    prompts[1]
  with pytest.raises(BadPrompt, match=r"x\.csv:9 has 1 values for 2 fields"):  # one is missing, and nobody knows which
    prompts[4]
  with pytest.raises(ConfigError, match=r"(?s)no column \['a', 'q'\].*Choose among \['Problem', 'Short Answer'\]"):
    open_prompts(path)
  path.write_bytes(b"q,a\n\xff,1\n")
  with pytest.raises(ConfigError, match="has no comma-separated values"):
    open_prompts(path)


def test_a_folder_of_csv_files_is_read_by_split(tmp_path):
  for name, rows in (("train-0.csv", "q,a\n1,2\n3,4\n"), ("train-1.csv", "q,a\n5,6\n"), ("test.csv", "q,a\n7,8\n")):
    (tmp_path / name).write_text(rows)
  records = RecordPrompts(str(tmp_path), environment="x", fields={"q": "q"}, split="train")
  assert [records[index].data["q"] for index in range(len(records))] == ["1", "3", "5"]

  # Beside files of another kind a table is none of the records.
  (tmp_path / "train.jsonl").write_text('{"q": "9"}\n')
  assert len(RecordPrompts(str(tmp_path), environment="x", fields={"q": "q"}, split="train")) == 1


def test_damaged_lines_are_refused_by_file_and_line_and_the_others_are_read(tmp_path):
  bad = [b"{", b"[1]", b'{"q": "\xff", "a": 1}', b"[" * 100_000, b'{"q": %s}' % (b"1" * 5000), b'{"q": "no answer"}']
  path = tmp_path / "questions.jsonl"
  path.write_bytes(b'{"q": "x", "a": 1}\n\n' + b"\n".join(bad) + b'\n{"q": "y", "a": 2}')
  prompts = open_prompts(path)
  assert len(prompts) == 8 and prompts[0].data["answer"] == 1 and prompts[7].data["answer"] == 2
  for index in range(1, 7):
    with pytest.raises(BadPrompt, match=rf"questions\.jsonl:{index + 2} ") as problem:
      prompts[index]
    assert problem.value.reason == "prompt_damaged"

  # The iterator says so for each, and goes on.
  iterator, seen, skipped = make_prompt_iterator(prompts, seed=0, epochs=1), [], 0
  while True:
    try:
      seen.append(next(iterator).data["answer"])
    except BadPrompt:
      skipped += 1
    except StopIteration:
      break
  assert sorted(seen) == [1, 2] and skipped == 6


def test_prompts_are_keyed_by_their_number_and_fields_lie_within_fields(tmp_path):
  path = write_lines(tmp_path / "x.jsonl", [{"extra": {"q": "1?"}, "a": [1]}])
  prompts = RecordPrompts(path, environment="sums", fields={"question": "extra.q", "answer": "a"})
  assert prompts[0].key == ("sums", 0, 0) and prompts[0].data == {"question": "1?", "answer": [1]}
  with pytest.raises(IndexError):
    prompts[1]


def test_a_parquet_file_is_read_by_row_groups_and_columns(tmp_path, monkeypatch):
  pyarrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
  parquet = importlib.import_module("pyarrow.parquet")
  path = tmp_path / "x.parquet"
  parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=3)
  prompts = open_prompts(path)
  (records,) = prompts._parts
  assert records._kept == {}  # the footer alone
  assert [prompts[index].data for index in (9, 0, 4)] == [
    {"question": ROWS[index]["q"], "answer": index} for index in (9, 0, 4)
  ]
  assert [*records._kept] == [3, 0, 1] and records._kept[0].column_names == ["a", "q"]

  # What was used longest ago makes room; one group stays even if it is larger than the bound.
  monkeypatch.setattr(arrow_records, "KEPT_BYTES", 0)
  assert answers(prompts) == [*range(10)] and [*records._kept] == [3]


def save_to_disk(folder, rows, files=2):
  """Writes what `datasets.Dataset.save_to_disk` writes: Arrow streams, and a state that names them in order."""
  import pyarrow

  folder.mkdir(parents=True)
  names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
  for number, name in enumerate(names):
    table = pyarrow.Table.from_pylist(rows[number * len(rows) // files : (number + 1) * len(rows) // files])
    with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
      stream.write_table(table, max_chunksize=2)
  state = {"_data_files": [{"filename": name} for name in names], "_format_type": None, "_split": None}
  (folder / "state.json").write_text(json.dumps(state))


def test_a_folder_that_datasets_saved_is_mapped(tmp_path):
  pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
  save_to_disk(tmp_path / "one", ROWS)
  assert answers(open_prompts(tmp_path / "one")) == [*range(10)]

  # A dictionary of splits.
  both = tmp_path / "both"
  save_to_disk(both / "train", ROWS[:7])
  save_to_disk(both / "test", ROWS[7:], files=1)
  (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
  assert answers(open_prompts(both, "test")) == [7, 8, 9]
  with pytest.raises(ConfigError, match="no split ''"):
    open_prompts(both)


def test_a_folder_of_files_is_read_by_split_in_the_order_of_their_names(tmp_path):
  write_lines(tmp_path / "train-00001-of-00002.jsonl", ROWS[3:5])
  write_lines(tmp_path / "train-00000-of-00002.jsonl", ROWS[:3])
  write_lines(tmp_path / "test.jsonl", ROWS[5:])
  write_lines(tmp_path / "empty.jsonl", [])
  assert answers(open_prompts(tmp_path, "train")) == [0, 1, 2, 3, 4]
  assert len(open_prompts(tmp_path, "empty")) == 0
  with pytest.raises(ConfigError, match=r"has the splits \['test', 'train'\]"):
    open_prompts(tmp_path)  # nobody trains on a test split by mistake
  (tmp_path / "train-00000-of-00002.parquet").touch()
  with pytest.raises(ConfigError, match="JSON lines and parquet"):
    open_prompts(tmp_path, "train")


@pytest.mark.parametrize(
  "name, split, found",
  [
    ("missing.jsonl", "", "Cannot read .*missing.jsonl"),
    ("missing.parquet", "", "Cannot read .*missing.parquet|pyarrow"),
    ("table.txt", "", "no kind of file"),
    ("nothing", "", "is not there"),
    ("x.jsonl", "test", "is one file"),
    ("", "test", "no files of split 'test'"),
  ],
)
def test_what_cannot_be_opened_is_refused_before_the_run(tmp_path, name, split, found):
  write_lines(tmp_path / "x.jsonl")
  (tmp_path / "table.txt").touch()
  with pytest.raises(ConfigError, match=found):
    open_prompts(tmp_path / name, split)


def test_a_column_that_is_missing_and_a_package_that_is_missing_are_named(tmp_path, monkeypatch):
  pyarrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
  parquet = importlib.import_module("pyarrow.parquet")
  path = tmp_path / "x.parquet"
  parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
  with pytest.raises(ConfigError, match=r"no column \['z'\](?s:.*)Choose among \['a', 'q', 'unused'\]"):
    RecordPrompts(path, environment="e", fields={"question": "z"})
  path.write_bytes(b"PAR1 and nothing else")
  with pytest.raises(ConfigError, match="Cannot read"):
    open_prompts(path)
  monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
  with pytest.raises(ConfigError, match=r"sao_jax\[data\]"):
    open_prompts(path)
