"""Train steps of several processes, each with its share of the same trajectories: `joined_steps.py OUT RUNS`.

RUNS are a mesh, a number of steps, and if the critic is measured after them. Process 0 writes what it has then to
OUT0.npz, OUT1.npz, ...
"""

from __future__ import annotations

import json
import pathlib
import sys


def train_steps(mesh, *counts, devices=None, heldout=False):
  """Returns parameters, shapes of the batches and last loss by name, after each number of steps of all processes.

  With `heldout`, in the end also the critic's explained variance.
  """
  import jax
  import numpy as np

  from sao_jax.learner import setup
  from sao_jax.learner.batches import packed_batch
  from sao_jax.models.critic import critic_params_from_policy
  from sao_jax.parallel.feeding import everywhere
  from sao_jax.training.heldout_critic import heldout_variance, make_reader
  from toys import training_toy
  from toys.trajectories import make_trajectories

  config = training_toy.replace(
    training_toy.get_config(),
    model={"num_heads": 4, "num_kv_heads": 2, "num_experts": 4, "d_ff_shared": 16},
    # A gradient that is nearly zero must not turn rounding into a whole Adam step.
    policy_optimizer={"learning_rate": 1e-2, "eps": 1e-3},
    critic_optimizer={"learning_rate": 1e-2, "eps": 1e-3},
    rollout={"row_lengths": (8, 16, 32), "row_counts": (8, 16), "batch_size": 24},
    mesh=mesh,
  )
  learner = setup.make_learner(config, devices)
  policy = setup.init_policy_params(learner, seed=0)
  state = setup.make_state(learner, policy, critic_params_from_policy(policy, config.model))
  step, index, count, shapes = setup.make_step(learner), learner.processes.index, learner.processes.count, []
  results = []

  # The long ones are on the last process, and the first needs shorter rows; there are fewer from step to step.
  trajectories = sorted(make_trajectories(), key=len)
  for number in range(max(counts)):
    batch = trajectories[2 * number :]
    rows = packed_batch(learner, batch[index * len(batch) // count : (index + 1) * len(batch) // count]).rows
    shapes.append(rows.token_ids.shape)
    state, metrics = step(state, rows)

    if number + 1 in counts:
      params = everywhere((state.policy.params, state.critic.params), learner.layout.sharding())
      leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
      results.append(leaves | {"shapes": np.array(shapes), "loss": np.asarray(metrics["policy_loss"])})

  # The critic is measured on some that are held out, of which the first process has more.
  if heldout:
    mine = trajectories[:5][index::count]
    variance = heldout_variance(learner, make_reader(learner), state.critic.params, mine)
    results[-1]["heldout"] = np.array(variance)
  return results


def main(out: str, runs: str) -> None:
  import numpy as np

  from sao_jax.parallel.agreement import all_processes
  from sao_jax.parallel.process import initialize_processes, leave_processes

  initialize_processes()
  for number, (mesh, count, heldout) in enumerate(json.loads(runs)):
    (result,) = train_steps(mesh, count, heldout=heldout)
    if all_processes().is_writer:
      np.savez(f"{out}{number}.npz", **result)
  leave_processes()


if __name__ == "__main__":
  sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
  main(*sys.argv[1:])
