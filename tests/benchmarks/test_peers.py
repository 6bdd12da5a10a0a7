"""Other frameworks beside ours: the protocol with their programs, what those are told, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import sys

import jax
import pytest
from toys.paths import REPOSITORY

from sao_jax.benchmarks import generation, learning
from sao_jax.benchmarks.peers import Peers, model_task, sampling_task, training_task
from sao_jax.benchmarks.scale import FULL, QUICK
from sao_jax.errors import ConfigError
from sao_jax.learner import placement

REAL = Peers(sys.executable, REPOSITORY / "launch" / "peers")
# Writes down its task and every time that it is done; "fails" ends it at the second.
PROGRAM = """
import json, pathlib, sys
from serving import serve
log = pathlib.Path(__file__).with_suffix(".log")
def run():
  print("a library says something")
  with log.open("a") as file:
    file.write(sys.argv[1] + "\\n")
  if "fails" in sys.argv[1] and len(log.read_text().splitlines()) > 1:
    sys.exit(3)
serve(run)
"""


@pytest.fixture
def peers(tmp_path, monkeypatch):
  """Programs that need no framework, for the Python of the tests."""
  for name in ("tunix_sampling", "tunix_training", "torch_training"):
    (tmp_path / f"{name}.py").write_text(PROGRAM)
  for name in ("serving.py", "requirements.txt"):
    (tmp_path / name).write_text((REAL.programs / name).read_text())
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
  return Peers(sys.executable, tmp_path)


def test_a_peer_does_its_task_once_when_it_starts_and_once_whenever_it_is_asked(peers):
  with peers.start("tunix_sampling", {"n": 1}) as run:
    log = peers.programs / "tunix_sampling.log"
    for done in (1, 2, 3):
      assert log.read_text().splitlines() == [json.dumps({"n": 1})] * done
      run()


def test_a_peer_that_ends_is_an_error_with_its_status(peers):
  with (
    peers.start("tunix_sampling", {"fails": True}) as run,
    pytest.raises(RuntimeError, match="tunix_sampling ended with status 3"),
  ):
    run()


def test_a_python_without_the_peers_or_with_others_is_refused(peers):
  with pytest.raises(ConfigError, match="--peers: no-such-python is no Python that runs"):
    Peers("no-such-python", peers.programs).check()
  with pytest.raises(ConfigError, match="--peers: /bin/echo is no Python"):
    Peers("/bin/echo", peers.programs).check()

  (peers.programs / "requirements.txt").write_text(f"jax=={jax.__version__}\n")
  assert peers.check() == {"jax": jax.__version__}
  for line, found in (
    ("jax==0.0.1", f"has jax {jax.__version__}, and 0.0.1"),
    ("nothing-of-this-name==1", "None, and 1"),
  ):
    (peers.programs / "requirements.txt").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=found):
      peers.check()


def test_the_real_programs_have_a_version_of_all_that_they_import():
  assert REAL.requirements().keys() == {"google-tunix", "torch", "transformers"}
  assert {path.stem for path in REAL.programs.glob("*_*.py")} == {"tunix_sampling", "tunix_training", "torch_training"}


def test_peers_get_the_same_requests_rows_and_model():
  lengths = generation.uneven_lengths(FULL)
  waves = [lengths[:64], lengths[64:]]
  task = json.loads(json.dumps(sampling_task(FULL, FULL.moe, waves)))
  assert [tuple(request) for wave in task["waves"] for request in wave] == lengths
  assert (task["longest_prompt"], task["longest_answer"]) == (64, 128)

  task = training_task(FULL, FULL.dense)
  assert (task["rows"], task["prompt"] + task["answer"]) == (64, 128)
  actions = learning.full_batch(FULL, FULL.dense.vocab_size).action_mask
  assert actions[:, task["prompt"] :].all() and not actions[:, : task["prompt"]].any()
  assert task["model"]["hidden_size"] == 128 and task["model"]["num_experts"] == 0
  assert model_task(FULL.moe)["moe_intermediate_size"] == 128


def test_ratios_are_of_rounds_in_which_both_ran(peers):
  """As many rounds as ours, and one that compiles; the ratio of times is that of rates."""
  scale = dataclasses.replace(QUICK, dense=QUICK.moe)
  batching = generation.batching(scale, peers)["dense"]
  assert batching["useful_over_tunix"] > 0 and batching["tunix_useful_tokens_per_second"] > 0
  runs = (peers.programs / "tunix_sampling.log").read_text().splitlines()
  assert len(runs) == 2 * (1 + 1 + scale.rounds)  # two models, each when it starts, when ours compile, and in rounds
