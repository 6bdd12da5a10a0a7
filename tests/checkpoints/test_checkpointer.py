"""Checkpoints: exact, asynchronous, atomic, without pickle; damaged ones are skipped and foreign ones refused."""

from __future__ import annotations

import contextlib
import errno
import pathlib
import pickle
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from toys.shared_store import SharedStore

from sao_jax.checkpoints import checkpointer as checkpointer_module
from sao_jax.checkpoints import host_state
from sao_jax.checkpoints.checkpointer import Checkpointer, CheckpointFailure, load_host_state, load_params
from sao_jax.errors import ConfigError
from sao_jax.parallel.agreement import Processes
from sao_jax.types import NetworkState, TrainState

WIDTH = 16


def make_network(offset: float, width: int = WIDTH) -> NetworkState:
  params = {
    "embed": jnp.arange(8 * width, dtype=jnp.float32).reshape(8, width) + offset,
    "layers": {
      "attention": {"q": jnp.full((2, width, width), offset, jnp.bfloat16)},
      "norm": jnp.ones((2, width), jnp.float32),
    },
  }
  return NetworkState(params=params, opt_state=optax.adamw(1e-3).init(params), step=jnp.asarray(3, jnp.int32))


def make_state(version: int = 7, width: int = WIDTH) -> TrainState:
  return TrainState(make_network(version, width), make_network(-version, width), jnp.asarray(version, jnp.int32))


def assert_same(got, expected) -> None:
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


HOST_STATE = {
  "iterator": {"next_index": 12, "epoch": None},
  "buffer": [{"token_ids": np.arange(5, dtype=np.int32), "logprobs": np.array([np.nan, -0.5], np.float32)}],
  "counters": {"submitted": 40, "seconds": 0.1 + 0.2, "nan": float("nan")},
  "empty": np.zeros((0, 3), bool),
}


def test_a_state_comes_back_bit_for_bit(tmp_path):
  state = make_state()
  with Checkpointer(tmp_path, keep=2, every=10) as checkpointer:
    assert checkpointer.restore(state) is None
    checkpointer.save(10, state, HOST_STATE)
  with Checkpointer(tmp_path, keep=2, every=10) as checkpointer:
    step, restored, host = checkpointer.restore(jax.eval_shape(lambda: state))
  assert step == 10
  assert_same(restored, state)
  assert host["iterator"] == HOST_STATE["iterator"] and host["counters"]["seconds"] == HOST_STATE["counters"]["seconds"]
  assert np.isnan(host["counters"]["nan"])
  for name, array in HOST_STATE["buffer"][0].items():
    assert host["buffer"][0][name].dtype == array.dtype
    np.testing.assert_array_equal(host["buffer"][0][name], array)
  assert host["empty"].shape == (0, 3)


def test_the_state_may_be_donated_as_soon_as_save_returns(tmp_path):
  overwrite = jax.jit(lambda state: jax.tree.map(lambda x: (x * 0 - 1).astype(x.dtype), state), donate_argnums=0)
  expected, state = make_state(), make_state()
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(100, state)
    overwritten = overwrite(state)
    checkpointer.wait()
    restored = checkpointer.restore(expected, step=100)
  assert_same(restored.state, expected)
  assert float(overwritten.policy.params["embed"][0, 0]) == -1


def test_only_the_newest_checkpoints_stay_and_due_counts_steps(tmp_path):
  state = make_state()
  with Checkpointer(tmp_path, keep=2, every=10) as checkpointer:
    for step in range(1, 41):
      if checkpointer.due(step):
        checkpointer.save(step, state, {"step": step})
    checkpointer.wait()
    assert checkpointer.latest_step() == 40
    assert sorted(path.name for path in tmp_path.iterdir()) == ["30", "40"]
    assert checkpointer.restore(state, step=30).host_state == {"step": 30}


def test_saving_the_same_step_twice_is_harmless(tmp_path):
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(5, make_state(1))
    checkpointer.save(5, make_state(1))
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.restore(make_state())
    checkpointer.save(5, make_state(1))
  assert [path.name for path in tmp_path.iterdir()] == ["5"]


def test_restores_onto_other_shardings(tmp_path):
  state = make_state()
  assert len(jax.devices()) == 8
  mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))

  def placed(leaf):
    spec = PartitionSpec(*(None,) * (leaf.ndim - 2), "fsdp", "tensor") if leaf.ndim >= 2 else PartitionSpec()
    return jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec if leaf.shape != (2, WIDTH) else PartitionSpec())
    )

  sharded = jax.tree.map(placed, state)
  with Checkpointer(tmp_path / "one") as checkpointer:
    checkpointer.save(1, state)
    on_eight = checkpointer.restore(sharded).state
  assert_same(on_eight, state)
  for leaf, target in zip(jax.tree.leaves(on_eight), jax.tree.leaves(sharded)):
    assert leaf.sharding.is_equivalent_to(target.sharding, leaf.ndim)
  with Checkpointer(tmp_path / "eight") as checkpointer:
    checkpointer.save(1, on_eight)
    assert_same(checkpointer.restore(state).state, state)


@pytest.mark.parametrize(
  "other, names",
  [
    (lambda: make_state(width=8), ["policy/embed", "float32[8, 8]", "float32[8, 16]", "more differ"]),
    (
      lambda: make_state().replace(critic=make_network(0, 8)),
      ["critic/embed", "float32[8, 8]", "float32[8, 16]"],
    ),
    (
      lambda: make_state().replace(policy_version=jnp.asarray(0, jnp.float32)),
      ["rest/policy_version", "float32[]", "int32[]"],
    ),
    (
      lambda: make_state().replace(policy=make_network(0).replace(params={"head": jnp.zeros((2, 2), jnp.float32)})),
      ["policy/head", "found no such array"],
    ),
  ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, other, names):
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, make_state())
    with pytest.raises(ConfigError) as error:
      checkpointer.restore(other())
  for name in [*names, "step 1", "remedy", "--workdir"]:
    assert name in str(error.value)


def damage_no_files(step: pathlib.Path) -> None:
  shutil.rmtree(step)
  step.mkdir()


def damage_no_host(step: pathlib.Path) -> None:
  shutil.rmtree(step / "host")


def damage_host_cut_short(step: pathlib.Path) -> None:
  file = next((step / "host").iterdir())
  file.write_bytes(file.read_bytes()[:40])


def damage_no_critic(step: pathlib.Path) -> None:
  shutil.rmtree(step / "critic")


def damage_arrays_cut_short(step: pathlib.Path) -> None:
  for file in (step / "policy").rglob("d/*"):
    file.write_bytes(file.read_bytes()[:10])


def damage_metadata(step: pathlib.Path) -> None:
  (step / "policy" / "_METADATA").write_text("{")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # TensorStore, on a cut file
@pytest.mark.parametrize(
  "damage",
  [damage_no_files, damage_no_host, damage_host_cut_short, damage_no_critic, damage_arrays_cut_short, damage_metadata],
)
def test_the_last_complete_checkpoint_is_taken_when_a_newer_one_is_damaged(tmp_path, damage):
  with Checkpointer(tmp_path, keep=3, every=1) as checkpointer:
    checkpointer.save(1, make_state(1), {"step": 1})
    checkpointer.save(2, make_state(2), {"step": 2})
  damage(tmp_path / "2")
  with Checkpointer(tmp_path, keep=3, every=1) as checkpointer:
    restored = checkpointer.restore(make_state())
    assert restored.step == 1 and restored.host_state == {"step": 1}
    assert_same(restored.state, make_state(1))
    # The run goes on: the damaged checkpoint gives way, and is not lost either.
    checkpointer.save(2, make_state(3), {"step": 2})
    checkpointer.wait()
    assert_same(checkpointer.restore(make_state()).state, make_state(3))
    assert (tmp_path / "abandoned" / "2").is_dir()


def test_a_save_that_was_killed_leaves_no_checkpoint_and_is_cleaned_up_by_the_next_save(tmp_path):
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, make_state(1))
  shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
  shutil.rmtree(tmp_path / "2.orbax-checkpoint-tmp" / "critic")
  with Checkpointer(tmp_path) as checkpointer:
    assert checkpointer.latest_step() == 1 and checkpointer.restore(make_state()).step == 1
    assert (tmp_path / "2.orbax-checkpoint-tmp").exists()  # reading changes nothing
    checkpointer.save(2, make_state(2))
    checkpointer.wait()
    assert_same(checkpointer.restore(make_state()).state, make_state(2))
  assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_no_readable_checkpoint_at_all_is_an_error_not_a_fresh_start(tmp_path):
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, make_state())
  damage_no_critic(tmp_path / "1")
  damage_host_cut_short(tmp_path / "1")
  with Checkpointer(tmp_path) as checkpointer, pytest.raises(ConfigError, match="none of the checkpoints"):
    checkpointer.restore(make_state())


def test_going_back_to_an_older_step_moves_the_abandoned_future_aside(tmp_path):
  with Checkpointer(tmp_path, keep=3) as checkpointer:
    for step in (1, 2, 3):
      checkpointer.save(step, make_state(step))
  with Checkpointer(tmp_path, keep=3) as checkpointer:
    checkpointer.restore(make_state(), step=1)
    checkpointer.save(2, make_state(20))
    checkpointer.wait()
    assert checkpointer.latest_step() == 2
    assert_same(checkpointer.restore(make_state()).state, make_state(20))
  assert sorted(path.name for path in (tmp_path / "abandoned").iterdir()) == ["2", "3"]


class FullDisk:
  """Stands in for the file of the host state, which is written in the background."""

  def write_bytes(self, data):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def full_disk(monkeypatch):
  """A context manager: writing fails inside it."""

  @contextlib.contextmanager
  def full():
    with monkeypatch.context() as patch:
      patch.setattr(host_state, "_path", lambda directory, index: FullDisk())
      yield

  return full


@pytest.mark.parametrize("noticed_by", ["due", "save", "save the same step", "wait", "restore"])
def test_a_background_save_that_fails_is_said_and_made_up_for(tmp_path, full_disk, caplog, noticed_by):
  with Checkpointer(tmp_path, every=1) as checkpointer:
    checkpointer.save(1, make_state(1))
    checkpointer.wait()
    with full_disk():
      checkpointer.save(2, make_state(2))
      with pytest.raises(OSError, match="No space left"):
        checkpointer.wait()
    (said,) = [record.getMessage() for record in caplog.records if "was not written" in record.getMessage()]
    assert "step 2 " in said and "No space left" in said and "the last good checkpoint is that of step 1" in said

    # Whoever asks if the step is on disk hears of it again; nothing pretends that it is.
    if noticed_by in ("wait", "restore"):
      with pytest.raises(OSError, match="No space left"):
        checkpointer.wait() if noticed_by == "wait" else checkpointer.restore(make_state())
    assert checkpointer.due(3)
    step = 2 if noticed_by == "save the same step" else 3
    checkpointer.save(step, make_state(step))
    checkpointer.wait()
    assert_same(checkpointer.restore(make_state()).state, make_state(step))
  assert [path.name for path in sorted(tmp_path.glob("?"))] == ["1", str(step)]


def test_a_second_save_that_fails_in_a_row_ends_the_run_and_names_the_last_good_checkpoint(tmp_path, full_disk):
  message = "2 checkpoints in a row .* step 5 .*No space.* of step 3"
  with pytest.raises(CheckpointFailure, match=message) as error, Checkpointer(tmp_path, keep=3) as checkpointer:
    # One failure, one success, and the count begins again.
    with full_disk():
      checkpointer.save(1, make_state(1))
      with pytest.raises(OSError):
        checkpointer.wait()
    checkpointer.save(2, make_state(2))
    checkpointer.save(3, make_state(3))
    checkpointer.wait()
    with full_disk():
      checkpointer.save(4, make_state(4))
      checkpointer.save(5, make_state(5))
      checkpointer.wait()
  assert isinstance(error.value.__cause__, OSError)


def test_the_first_save_that_fails_ends_a_run_of_several_processes(tmp_path, full_disk, monkeypatch):
  """To make up for it, all would have to begin anew together; those whose part was written know of nothing."""
  monkeypatch.setattr(checkpointer_module, "all_processes", lambda: Processes(1, 2, SharedStore()))
  message = "A checkpoint could not be written, the last one for step 2 .*No space.* of step 1"
  with pytest.raises(CheckpointFailure, match=message), Checkpointer(tmp_path, every=1) as checkpointer:
    checkpointer.save(1, make_state(1))
    checkpointer.wait()
    manager = checkpointer._manager
    with full_disk():
      checkpointer.save(2, make_state(2))
      try:
        checkpointer.wait()
      finally:
        assert checkpointer._manager is manager  # to make one, processes wait for each other


def test_no_context_ends_in_silence_with_a_save_that_failed(tmp_path, full_disk):
  with pytest.raises(OSError, match="No space left"), Checkpointer(tmp_path) as checkpointer, full_disk():
    checkpointer.save(1, make_state(1))
  with pytest.raises(KeyError), Checkpointer(tmp_path) as checkpointer, full_disk():
    checkpointer.save(2, make_state(2))
    raise KeyError("what failed first")


def test_a_save_that_fails_before_it_has_begun_counts_too(tmp_path, monkeypatch):
  with Checkpointer(tmp_path, every=1) as checkpointer:
    with monkeypatch.context() as patch:
      patch.setattr(Checkpointer, "_take_over", lambda self, step: (_ for _ in ()).throw(PermissionError("read-only")))
      checkpointer.save(1, make_state(1))
      with pytest.raises(CheckpointFailure, match="read-only.*there is no checkpoint"):
        checkpointer.save(2, make_state(2))
    checkpointer.save(2, make_state(2))
    checkpointer.wait()
    assert checkpointer.latest_step() == 2


def test_all_that_orbax_does_together_has_its_turn(tmp_path, monkeypatch):
  at = []

  @contextlib.contextmanager
  def turn():
    at.append("begin")
    yield
    at.append("end")

  with Checkpointer(tmp_path, before=lambda: at.append("before")) as checkpointer:
    for action in ("_take_over", "_manager.save"):
      owner, name = (checkpointer._manager, "save") if "." in action else (checkpointer, action)
      original = getattr(owner, name)
      note = lambda *given, action=action, original=original, **named: (at.append(action), original(*given, **named))
      monkeypatch.setattr(owner, name, note)
    checkpointer.save(1, make_state(), turn=turn)
  assert at == ["before", "begin", "_take_over", "_manager.save", "end"]


def test_load_params_reads_one_network(tmp_path):
  state = make_state()
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, make_state(1))
    checkpointer.save(2, state)
  assert_same(load_params(tmp_path), state.policy.params)
  assert_same(load_params(tmp_path, "critic"), state.critic.params)
  assert_same(load_params(tmp_path, "policy", step=1), make_state(1).policy.params)
  # Another dtype is a conversion, not a mistake.
  wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), state.policy.params)
  loaded = load_params(tmp_path, "policy", wanted)
  assert_same(loaded, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state.policy.params))


def test_load_params_takes_a_lone_network_for_the_policy(tmp_path):
  network = make_network(4)
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, network)
  assert_same(load_params(tmp_path), network.params)


def test_load_params_refuses_with_the_remedy(tmp_path):
  with pytest.raises(ConfigError, match="model.checkpoint: .* holds no checkpoint") as error:
    load_params(tmp_path / "nothing")
  assert "remedy" in str(error.value) and not (tmp_path / "nothing").exists()
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, make_network(0))
  with pytest.raises(ConfigError, match="there is no critic in .*, step 1"):
    load_params(tmp_path, "critic")
  with pytest.raises(ConfigError, match="holds no checkpoint of step 9"):
    load_params(tmp_path, step=9)
  with pytest.raises(ConfigError, match=r"policy/embed: expected float32\[8, 8\], found float32\[8, 16\]"):
    load_params(tmp_path, "policy", make_network(0, 8).params)
  shutil.rmtree(tmp_path / "1" / "policy")
  with pytest.raises(ConfigError, match="cannot be read at step 1"):
    load_params(tmp_path)


@pytest.mark.parametrize(
  "state, place",
  [
    ({"buffer": [object()]}, r"host_state.buffer\[0\]"),
    ({"a": {1: "x"}}, "host_state.a"),
    ({"a": np.array([None], object)}, "host_state.a"),
    ({"a": {3}}, "host_state.a"),
  ],
)
def test_host_state_refuses_what_only_pickle_could_store(tmp_path, state, place):
  with Checkpointer(tmp_path) as checkpointer, pytest.raises(TypeError, match=place):
    checkpointer.save(1, make_state(), state)


def test_a_damaged_host_state_is_no_error_while_processes_wait_for_each_other(tmp_path):
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, make_state(), {"step": 1})
  next((tmp_path / "1" / "host").glob("*.npz")).write_bytes(b"no archive")
  read = host_state.HostStateHandler().restore(tmp_path / "1" / "host")
  assert isinstance(read, host_state.Unreadable) and isinstance(read.error, ValueError)
  with pytest.raises(ValueError):
    load_host_state(tmp_path, 1)


def test_a_pickle_in_place_of_the_host_state_is_never_loaded(tmp_path):
  marker = tmp_path / "executed"

  class Payload:
    def __reduce__(self):
      return (pathlib.Path.touch, (marker,))

  with Checkpointer(tmp_path / "run") as checkpointer:
    checkpointer.save(1, make_state(), {"step": 1})
  next((tmp_path / "run" / "1" / "host").iterdir()).write_bytes(pickle.dumps(Payload()))
  with Checkpointer(tmp_path / "run") as checkpointer, pytest.raises(ConfigError):
    checkpointer.restore(make_state())
  assert not marker.exists()


def test_the_first_checkpoint_is_looked_at_before_the_run_goes_on(tmp_path, monkeypatch):
  """Under `[1]` the library writes what it does not find again; a name like it is refused, others are found out."""
  folder = tmp_path / "lr[1e-4]"
  with Checkpointer(folder) as checkpointer, pytest.raises(ConfigError, match=r"lr\[1e-4\] has \[ in it"):
    checkpointer.save(1, make_state())
  monkeypatch.setattr(checkpointer_module, "check_storable", lambda path, field: None)
  with Checkpointer(folder) as checkpointer:
    for _ in range(2):
      with pytest.raises(ConfigError, match="written to .* cannot be read again"):
        checkpointer.save(1, make_state())


def test_readers_change_nothing_beside_a_run_that_saves(tmp_path):
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, make_state(1), {"step": 1})
    checkpointer.wait()
    unfinished = tmp_path / "2.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "1", unfinished)
    before = sorted(path for path in tmp_path.rglob("*"))
    assert_same(load_params(tmp_path), make_state(1).policy.params)
    assert load_host_state(tmp_path, 1) == {"step": 1}
    with Checkpointer(tmp_path) as reader:
      assert reader.latest_step() == 1
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_a_copy_under_a_pattern_can_be_read_and_a_backslash_is_refused_by_name(tmp_path):
  with Checkpointer(tmp_path / "plain") as checkpointer:
    checkpointer.save(1, make_state(1))
  shutil.copytree(tmp_path / "plain", tmp_path / "seed[0]")
  assert_same(load_params(tmp_path / "seed[0]"), make_state(1).policy.params)
  with pytest.raises(ConfigError, match="model.checkpoint: .*backslash"):
    load_params(tmp_path / "a\\b")
