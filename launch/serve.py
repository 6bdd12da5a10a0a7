"""Serves a policy of a workdir, the newest by default, to clients of OpenAI's API, until Ctrl-C.

python -m launch.serve --workdir=runs/calculator [--phase=sft] [--step=300] [--port=8000] [--key=sk-mine] [--follow]
"""

from __future__ import annotations

import time

import rich.console
from absl import flags, logging

from launch import _flags
from sao_jax import interrupt
from sao_jax.config import RunConfig
from sao_jax.configuration.paths import located
from sao_jax.errors import ConfigError
from sao_jax.evaluation.serving import make_server
from sao_jax.gateway.listening import listen
from sao_jax.learner import sampler_side, setup
from sao_jax.parallel.agreement import shared_stop
from sao_jax.training import phases
from sao_jax.training.heap import frozen_heap

_PHASE = flags.DEFINE_enum(
  "phase", "", ["", "base", "sft", "train"], "Whose policy; base: model.checkpoint. By default the newest."
)
_STEP = flags.DEFINE_string("step", "", "Step of a checkpoint that was kept, or best. By default the newest.")
_FOLLOW = flags.DEFINE_bool("follow", False, "Goes on with newer checkpoints as a run beside saves them.")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; one that others can reach needs a key.")
_PORT = flags.DEFINE_integer("port", 8000, "Port to listen on; 0 takes a free one.", lower_bound=0, upper_bound=65535)
_KEY = flags.DEFINE_string("key", "", "API key of clients. By default everybody on this machine may come.")

EXAMPLE = """curl {url}/completions -H 'Content-Type: application/json'{key} \\
  -d '{{"model": "{model}", "prompt": "Hello", "max_tokens": 32}}'"""


def main(config: RunConfig, workdir: str) -> None:
  """Loads the policy, and answers requests until the process is asked to stop."""
  listener = listen(_HOST.value, _PORT.value, keyed=bool(_KEY.value))  # a port that is taken is told at once
  learner = setup.make_learner(config)
  if _FOLLOW.value and (_STEP.value or learner.processes.count > 1):
    raise ConfigError("--follow", "it takes the newest policy, in one process.", "Leave out --step, or --follow.")
  publish, folder = sampler_side.make_publisher(learner), located(workdir)
  policy = phases.latest_policy(config, learner, folder, _PHASE.value, _STEP.value)
  params = publish(policy.params)
  if not learner.devices.samples:
    return  # of several processes, those that sample serve
  with (
    learner.processes.busy(),
    interrupt.Interrupt() as own_stop,
    sampler_side.make_service(config, params, seed=config.training.seed, version=policy.version) as service,
  ):
    stop = shared_stop(own_stop, learner.processes)
    if learner.devices.follows:
      service.wait(lambda: stop.requested)  # for the process that leads its sampler
      return
    with make_server(config, service, key=_KEY.value, listener=listener) as server:
      console, header = rich.console.Console(), f" -H 'Authorization: Bearer {_KEY.value}'" if _KEY.value else ""
      console.print(f"{policy.phase}, policy version {policy.version}, served at {server.url}", soft_wrap=True)
      example = EXAMPLE.format(url=server.url, key=header, model=config.name)
      console.print(example, soft_wrap=True, markup=False, highlight=False)

      # Requests are answered in threads; this one waits for the end of either side, or for new checkpoints.
      with frozen_heap():
        while not stop.requested and service.error is None:
          time.sleep(interrupt.POLL)
          newer = phases.newer_policy(config, learner, folder, _PHASE.value, policy) if _FOLLOW.value else None
          if newer is not None:
            policy = newer
            service.publish(publish(policy.params), policy.version)
            logging.info("now %s, policy version %d", policy.phase, policy.version)
    if service.error is not None:
      raise service.error


if __name__ == "__main__":
  _flags.run(main, writes=False, needs_run=False)
