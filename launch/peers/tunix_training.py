"""google-tunix's PPO losses: one update of a critic and one of a policy, all parameters training, on fixed rows.

Runs in the peers' Python; see `sao_jax.benchmarks.peers`.
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from serving import serve
from tunix.rl.algo_core import ppo_policy_loss_fn, ppo_value_loss_fn
from tunix.rl.ppo.ppo_learner import PPOConfig
from tunix.rl.utils import create_critic_model
from tunix_sampling import PAD, make_model


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Example:
  """A batch, as far as the losses read it."""

  prompt_ids: jax.Array
  completion_ids: jax.Array
  completion_mask: jax.Array
  advantages: jax.Array
  old_per_token_logps: jax.Array
  old_values: jax.Array
  returns: jax.Array


def make_example(task):
  rng = np.random.default_rng(0)
  rows, vocab = task["rows"], task["model"]["vocab_size"]
  answers = (rows, task["answer"])
  ids = lambda *shape: jnp.asarray(rng.integers(PAD + 1, vocab, shape), jnp.int32)
  return Example(
    prompt_ids=ids(rows, task["prompt"]),
    completion_ids=ids(*answers),
    completion_mask=jnp.ones(answers, jnp.int32),
    advantages=jnp.asarray(rng.normal(size=answers), jnp.float32),
    old_per_token_logps=jnp.full(answers, -np.log(vocab), jnp.float32),
    old_values=jnp.zeros(answers, jnp.float32),
    returns=jnp.asarray(rng.integers(0, 2, answers), jnp.float32),
  )


def make_step(loss, **settings):
  def step(model, optimizer, example):
    (value, _), gradients = nnx.value_and_grad(loss, has_aux=True)(model, example, **settings)
    optimizer.update(model, gradients)
    return value

  return nnx.jit(step, donate_argnames=("model", "optimizer"))


def main():
  task = json.loads(sys.argv[1])
  policy = make_model(task["model"])
  critic = create_critic_model(policy)
  adamw = lambda rate, norm: optax.chain(optax.clip_by_global_norm(norm), optax.adamw(rate, b2=0.98, weight_decay=0.1))
  policy_optimizer = nnx.Optimizer(policy, adamw(1e-6, 1.0), wrt=nnx.Param)
  critic_optimizer = nnx.Optimizer(critic, adamw(5e-6, 10.0), wrt=nnx.Param)
  update_policy = make_step(ppo_policy_loss_fn, algo_config=PPOConfig(), pad_id=PAD, eos_id=-1)
  update_critic = make_step(ppo_value_loss_fn, clip_range_value=0.2, pad_id=PAD, eos_id=-1)
  example = make_example(task)

  def run():
    losses = update_critic(critic, critic_optimizer, example), update_policy(policy, policy_optimizer, example)
    assert all(np.isfinite(loss) for loss in jax.block_until_ready(losses))
    jax.block_until_ready((nnx.state(policy), nnx.state(critic)))

  serve(run)


if __name__ == "__main__":
  main()
