"""Gathers in stages move what one gather moves, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sao_jax.config import MeshConfig
from sao_jax.parallel.mesh import make_mesh
from sao_jax.parallel.staged_gather import Stage, gather, halves, line_length, scatter_sum, stages


@pytest.mark.parametrize("steps", [[Stage("fsdp"), Stage("context")], [*halves("fsdp", 4, 2), Stage("context")]])
def test_in_stages_as_at_once(steps):
  mesh = make_mesh(MeshConfig(fsdp=4, context=2))
  split = PartitionSpec(None, ("fsdp", "context"))
  x = jnp.arange(48, dtype=jnp.float32).reshape(3, 16)
  run = lambda fn, spec, out: jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False))
  np.testing.assert_array_equal(run(lambda x: gather(x, steps, 1), split, PartitionSpec())(x), x)

  # Device i adds x · (i + 1): 36 x in all.
  number = lambda: 2.0 * jax.lax.axis_index("fsdp") + jax.lax.axis_index("context") + 1.0
  added = run(lambda x: scatter_sum(x * number(), steps, 1), PartitionSpec(), split)(x)
  np.testing.assert_array_equal(added, 36 * x)


def test_a_line_of_the_torus():
  """Chips are split where a second dimension begins: by rows, by the first turn of a snake, not at all on a ring."""
  assert line_length([(x, y, z) for x in range(4) for y in range(4) for z in range(4)]) == 4
  assert line_length([(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]) == 3
  assert line_length([(i, 0) for i in range(8)]) == 8
  across, within = halves("fsdp", 64, 4)
  assert within.groups[1] == (4, 5, 6, 7) and across.groups[1] == tuple(range(1, 64, 4))


def test_other_axes_and_devices_without_places_are_gathered_at_once():
  mesh = make_mesh(MeshConfig(fsdp=4, context=2))
  assert stages(mesh, ["fsdp", "context"]) == (Stage("fsdp"), Stage("context"))
  assert stages(make_mesh(MeshConfig(fsdp=8)), ["fsdp"]) == (Stage("fsdp"),)
  assert stages(mesh, []) == ()
