"""Group statistics (M9)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.algorithm.baselines import group_advantages
from sao_jax.errors import ConfigError


@pytest.mark.parametrize(
  "rewards, expected",
  [
    ([[1, 3]], [[-0.7071, 0.7071]]),
    ([[1.0, 3.0], [0.0, 1.0]], [[-0.7071, 0.7071], [-0.7071, 0.7071]]),
    ([[0.0, 0.0, 1.0]], [[-0.57735, -0.57735, 1.154701]]),
    ([[0.5, 0.5, 0.5]], [[0.0, 0.0, 0.0]]),
  ],
)
def test_groups_are_standardised_with_the_sample_deviation(rewards, expected):
  np.testing.assert_allclose(group_advantages(jnp.asarray(rewards, jnp.float32)), expected, atol=1e-4)


def test_a_group_of_one_is_refused():
  with pytest.raises(ConfigError, match=r"(?s)groups of 1 rollouts.*remedy"):
    group_advantages(jnp.ones((4, 1), jnp.float32))
