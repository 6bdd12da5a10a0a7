"""Prints one held-out episode of the newest policy: prompt, actions and observations, each marked as such.

python -m launch.sample --workdir=runs/calculator [--prompt=3] [--phase=sft]
"""

from __future__ import annotations

import rich.console
import rich.text
from absl import flags

from launch import _flags
from sao_jax import interrupt
from sao_jax.config import RunConfig
from sao_jax.configuration.paths import located
from sao_jax.errors import ConfigError
from sao_jax.evaluation import fixed_policy
from sao_jax.learner import sampler_side, setup
from sao_jax.parallel.agreement import shared_stop
from sao_jax.report.episode_samples import episode_segments
from sao_jax.training import phases

_PHASE = flags.DEFINE_enum(
  "phase", "", ["", "base", "sft", "train"], "Whose policy; base: model.checkpoint. By default the newest."
)
_PROMPT = flags.DEFINE_integer("prompt", 0, "Which held-out prompt.", lower_bound=0)
_TEMPERATURE = flags.DEFINE_float(
  "temperature", 1.0, "Sampling temperature; 0 takes the most likely token.", lower_bound=0
)

STYLES = {"prompt": "cyan", "action": "bold green", "observation": "yellow"}


def main(config: RunConfig, workdir: str) -> None:
  """Runs one episode and prints it."""
  # The policy, and the prompt to show.
  learner = setup.make_learner(config)
  params, version, phase, _ = phases.latest_policy(config, learner, located(workdir), _PHASE.value)
  tokenizer = config.environment.tokenizer()
  prompts = config.environment.prompts(tokenizer, "heldout", config.evaluation.seed)
  if _PROMPT.value >= len(prompts):
    remedy = f"Name one from 0 to {len(prompts) - 1}." if len(prompts) else "Give the environment a held-out split."
    raise ConfigError("--prompt", f"there is no held-out prompt {_PROMPT.value}.", remedy)

  # One episode, as an evaluation runs it; a failed one leaves no trajectory to show.
  params = sampler_side.make_publisher(learner)(params)
  if not learner.devices.samples:
    return  # of several processes, those that sample show it
  with (
    learner.processes.busy(),
    interrupt.Interrupt() as own_stop,
    sampler_side.make_service(config, params, seed=config.training.seed, version=version) as service,
  ):
    stop = shared_stop(own_stop, learner.processes)
    if learner.devices.follows:
      service.wait(lambda: stop.requested)  # for the process that leads its sampler
      return
    trajectories, failures = fixed_policy.run_episodes(
      config, service, [prompts[_PROMPT.value]], temperature=_TEMPERATURE.value, interrupt=stop
    )
  if failures:
    if isinstance(failures[0], ConfigError):  # the prompt cannot be attempted
      raise failures[0]
    raise ConfigError("environment", f"the episode has no outcome: {failures[0]}.", "Mend it, or try again.")

  # Every segment with its kind in front; sampled text is bold.
  (trajectory,) = trajectories
  console = rich.console.Console()
  console.print(f"{phase}, policy version {version}, held-out prompt {_PROMPT.value}")
  for kind, text in episode_segments(trajectory, tokenizer):
    console.print(rich.text.Text(f"{kind:>11} | {text}", style=STYLES[kind]), soft_wrap=True)
  console.print(f"{trajectory.status.value}, reward {trajectory.reward:g}, {trajectory.num_sampled} sampled tokens")


if __name__ == "__main__":
  _flags.run(main, writes=False, needs_run=False)
