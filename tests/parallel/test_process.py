"""The place of a process among several: flags before variables, and nothing by halves."""

from __future__ import annotations

import jax
import pytest
from toys.processes import run_together

from sao_jax.errors import ConfigError
from sao_jax.parallel import process
from sao_jax.parallel.process import Joining, initialize_processes, joining

ADDRESS = "10.0.0.1:8476"
VARIABLES = {"JAX_COORDINATOR_ADDRESS": ADDRESS, "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}

# Sums that do not need each other, over more groups of devices than this machine may have cores.
SUMS = """
from sao_jax.parallel.process import initialize_processes, leave_processes
initialize_processes()
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "fsdp"))
@jax.jit
@functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data", "fsdp"), out_specs=P("data", "fsdp"))
def sums(x):
  axes = ["data", "fsdp", ("data", "fsdp")] * 8
  parts = [jax.lax.psum(jnp.sin(number * x) @ jnp.ones((64, 64)), axis) for number, axis in enumerate(axes, 1)]
  return x + 1e-6 * sum(jnp.sin(part).sum() for part in parts)

x = jax.device_put(np.ones((128, 128), np.float32), jax.NamedSharding(mesh, P("data", "fsdp")))
for _ in range(60):
  x = sums(x)
x.block_until_ready()
leave_processes()
"""


def test_collectives_over_several_axes_do_not_take_each_others_threads():
  run_together(["-c", SUMS], devices=2, seconds=60)


def test_flags_come_before_variables():
  assert joining(environment=VARIABLES) == Joining(ADDRESS, 4, 3)
  assert joining(None, 2, 1, VARIABLES) == Joining(ADDRESS, 2, 1)
  assert joining("host:1", 8, 0, {}) == Joining("host:1", 8, 0)
  assert joining(environment={}) is None
  # An address for what jax detects by itself.
  assert joining(environment={"JAX_COORDINATOR_ADDRESS": ADDRESS}) is None


@pytest.mark.parametrize(
  "place, environment, field, problem",
  [
    ((ADDRESS, None, None), {}, "--num_processes and --process_id", "missing"),
    ((None, 2, 0), {}, "--coordinator", "missing"),
    ((None, None, None), {"JAX_PROCESS_ID": "1"}, "--coordinator and --num_processes", "missing"),
    ((ADDRESS, 2, 2), {}, "--process_id", "2 is none of 2 processes"),
    ((ADDRESS, 0, 0), {}, "--num_processes", "there cannot be 0"),
    ((ADDRESS, 2, None), {"JAX_PROCESS_ID": "first"}, "JAX_PROCESS_ID", "'first' is no whole number"),
    ((None, 2, None), VARIABLES, "JAX_PROCESS_ID", "3 is none of 2 processes"),
    (("10.0.0.1", 2, 0), {}, "--coordinator", "no address with a port"),
    ((None, 2, 0), {"JAX_COORDINATOR_ADDRESS": ":x"}, "JAX_COORDINATOR_ADDRESS", "no address with a port"),
  ],
)
def test_half_a_place_is_refused_by_name(place, environment, field, problem):
  with pytest.raises(ConfigError, match=problem) as error:
    joining(*place, environment)
  assert error.value.field == field


@pytest.mark.parametrize(
  "variables, joins",
  [
    ({}, False),
    ({"SLURM_NTASKS": "4"}, False),  # in a batch script, outside of srun
    ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "a"}, False),
    ({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "a,b"}, True),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1;tcp://10.0.0.1:1"}, True),
    ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
    ({"TPU_WORKER_HOSTNAMES": "a"}, False),
    ({"JAX_COORDINATOR_ADDRESS": ADDRESS, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, False),
    (VARIABLES, True),
  ],
)
def test_a_process_joins_where_there_are_others(monkeypatch, variables, joins):
  joined = []
  for name in {*VARIABLES, "SLURM_NTASKS", "SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES"}:
    monkeypatch.delenv(name, raising=False)
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setattr(jax.distributed, "initialize", lambda *place, **options: joined.append((place, options)))
  monkeypatch.setattr(jax.config, "update", lambda name, value: None)
  called, detected = [], Joining("a:8476", 2, 1) if joins and variables is not VARIABLES else None
  monkeypatch.setattr(process, "_jax_place", lambda seconds: detected)
  monkeypatch.setattr(process, "call_roll", lambda *place, **options: called.append(place) or process.Lines())
  initialize_processes()
  assert [place[:3] for place in called] == ([(ADDRESS, 4, 3) if variables is VARIABLES else detected] * joins)
  assert len(joined) == joins
  if variables is VARIABLES:
    ((place, options),) = joined
    assert place == Joining(ADDRESS, 4, 3) and options["heartbeat_timeout_seconds"] == process.HEARTBEAT_SECONDS
    assert options["coordinator_bind_address"] is None  # all addresses


def test_the_loopback_is_left_to_itself():
  assert process._bind_address("127.0.0.1:99") == "127.0.0.1:99" and process._bind_address(ADDRESS) is None


def test_what_jax_detects_has_a_roll_call_too(monkeypatch):
  for name, value in {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
  }.items():
    monkeypatch.setenv(name, value)
  place = process._jax_place(1)
  assert place.coordinator.startswith("node1:") and place[1:] == (2, 1)
  monkeypatch.delenv("SLURM_PROCID")
  assert process._jax_place(1) is None
