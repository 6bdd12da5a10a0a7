"""The critic's loss: squared error to the return (arXiv 2607.07508), or HL-Gauss classification as an option."""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol, runtime_checkable

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sao_jax.config import AlgorithmConfig


def value_loss(
  values: Float[Array, "*tokens"],
  targets: Float[Array, "*tokens"],
  action_mask: Bool[Array, "*tokens"],
  *,
  old_values: Float[Array, "*tokens"] | None = None,
  clip: float = 0.0,
) -> Float[Array, "*tokens"]:
  """The loss of every token, (V - G)², in fp32; no factor 1/2. Summed over the global batch and divided by N later.

  Args:
    values: V of the state before each token.
    targets: λ_critic-returns; the reward itself for γ = λ_critic = 1.
    action_mask: True on sampled tokens; values and targets may be anything elsewhere.
    old_values: V before this batch's updates; needed with `clip`.
    clip: PPO value clip: the larger of the squared errors of V and of V clipped to old_values ± clip. 0: off.

  Returns:
    Token losses, 0 where not sampled.
  """
  action_mask = jnp.asarray(action_mask, jnp.bool_)
  chex.assert_equal_shape([values, targets, action_mask])
  error = lambda v: jnp.square(jnp.where(action_mask, jnp.asarray(v, jnp.float32) - targets, 0.0))
  errors = error(values)
  if clip > 0.0:
    chex.assert_equal_shape([values, old_values])
    errors = jnp.maximum(errors, error(jnp.clip(values, old_values - clip, old_values + clip)))
  return errors


@runtime_checkable
class ValueHead(Protocol):
  """The meaning of the numbers that the critic puts out. Implementations are frozen dataclasses."""

  @property
  def num_outputs(self) -> int:
    """Outputs of the network per token."""

  def values(self, outputs: Float[Array, "*tokens O"]) -> Float[Array, "*tokens"]:
    """Expected returns, fp32."""

  def clips(self, targets: Float[Array, "*tokens"]) -> Bool[Array, "*tokens"]:
    """True on returns that the head cannot represent: the loss takes the nearest one that it can."""

  def losses(
    self,
    outputs: Float[Array, "*tokens O"],
    targets: Float[Array, "*tokens"],
    action_mask: Bool[Array, "*tokens"],
    old_values: Float[Array, "*tokens"] | None = None,
  ) -> Float[Array, "*tokens"]:
    """Token losses of outputs against returns, 0 where not sampled; arguments as in `value_loss`."""


@dataclasses.dataclass(frozen=True)
class ScalarHead:
  """One output, the value itself. `clip` as in `value_loss`."""

  clip: float = 0.0

  num_outputs = 1

  def values(self, outputs: Float[Array, "*tokens O"]) -> Float[Array, "*tokens"]:
    """The output itself."""
    return jnp.asarray(outputs[..., 0], jnp.float32)

  def clips(self, targets: Float[Array, "*tokens"]) -> Bool[Array, "*tokens"]:
    """False everywhere: a scalar represents every return."""
    return jnp.zeros(targets.shape, jnp.bool_)

  def losses(
    self,
    outputs: Float[Array, "*tokens O"],
    targets: Float[Array, "*tokens"],
    action_mask: Bool[Array, "*tokens"],
    old_values: Float[Array, "*tokens"] | None = None,
  ) -> Float[Array, "*tokens"]:
    """Squared errors, see `value_loss`."""
    return value_loss(self.values(outputs), targets, action_mask, old_values=old_values, clip=self.clip)


@dataclasses.dataclass(frozen=True)
class HLGaussHead:
  """Logits over bins, trained by cross-entropy to a discretised Gaussian around the return (arXiv 2403.03950).

  The Gaussian's deviation is 0.75 bins, as recommended there. The bins reach 3 deviations beyond [low, high] on both
  sides, so that returns at the ends of that range are represented without bias. Returns outside are clipped to it, and
  counted, see `clips`. A zero-initialised head gives the middle of the range.

  Attributes:
    num_outputs: number of bins, at least 6.
    low: smallest return.
    high: largest return.
  """

  num_outputs: int
  low: float
  high: float

  @property
  def _width(self) -> float:
    return (self.high - self.low) / (self.num_outputs - 2 * 3 * 0.75)

  @property
  def _edges(self) -> Float[Array, " edges"]:
    middle, half = (self.high + self.low) / 2, self._width * self.num_outputs / 2
    return jnp.linspace(middle - half, middle + half, self.num_outputs + 1, dtype=jnp.float32)

  def values(self, outputs: Float[Array, "*tokens O"]) -> Float[Array, "*tokens"]:
    """The mean of the predicted distribution."""
    centers = (self._edges[1:] + self._edges[:-1]) / 2
    return jnp.sum(jax.nn.softmax(jnp.asarray(outputs, jnp.float32), axis=-1) * centers, axis=-1)

  def clips(self, targets: Float[Array, "*tokens"]) -> Bool[Array, "*tokens"]:
    """True outside [low, high]."""
    return (targets < self.low) | (targets > self.high)

  def target_probabilities(self, targets: Float[Array, "*tokens"]) -> Float[Array, "*tokens O"]:
    """The discretised Gaussian around each return, normalised over the bins."""
    targets = jnp.clip(jnp.asarray(targets, jnp.float32), self.low, self.high)
    z = (self._edges - targets[..., None]) / (0.75 * self._width * math.sqrt(2.0))
    cdf = jax.scipy.special.erf(z)
    return (cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])

  def losses(
    self,
    outputs: Float[Array, "*tokens O"],
    targets: Float[Array, "*tokens"],
    action_mask: Bool[Array, "*tokens"],
    old_values: Float[Array, "*tokens"] | None = None,
  ) -> Float[Array, "*tokens"]:
    """Cross-entropies; `old_values` is not used."""
    del old_values
    action_mask = jnp.asarray(action_mask, jnp.bool_)
    # Masked before the softmax too: its gradient would turn 0 times a NaN output into NaN.
    logits = jnp.where(action_mask[..., None], jnp.asarray(outputs, jnp.float32), 0.0)
    probabilities = self.target_probabilities(jnp.where(action_mask, targets, self.low))
    losses = -jnp.sum(probabilities * jax.nn.log_softmax(logits, axis=-1), axis=-1)
    return jnp.where(action_mask, losses, 0.0)


def make_value_head(config: AlgorithmConfig) -> ValueHead:
  """The head that `config.value_head` names."""
  if config.value_head == "hl_gauss":
    return HLGaussHead(config.value_bins, config.value_min, config.value_max)
  return ScalarHead(config.value_clip)
