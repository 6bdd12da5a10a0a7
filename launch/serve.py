"""Serves a policy of a workdir, the newest by default, to clients of OpenAI's API, until Ctrl-C.

python -m launch.serve --workdir=runs/calculator [--phase=sft] [--step=300] [--port=8000] [--key=sk-mine]
"""

from __future__ import annotations

import time

import rich.console
from absl import flags

from launch import _flags
from sao_jax import interrupt
from sao_jax.config import RunConfig
from sao_jax.configuration.paths import located
from sao_jax.evaluation.serving import make_server
from sao_jax.gateway.listening import listen
from sao_jax.learner import sampler_side, setup
from sao_jax.parallel.agreement import shared_stop
from sao_jax.training import phases

_PHASE = flags.DEFINE_enum(
  "phase", "", ["", "base", "sft", "train"], "Whose policy; base: model.checkpoint. By default the newest."
)
_STEP = flags.DEFINE_string("step", "", "Step of a checkpoint that was kept, or best. By default the newest.")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; one that others can reach needs a key.")
_PORT = flags.DEFINE_integer("port", 8000, "Port to listen on; 0 takes a free one.", lower_bound=0, upper_bound=65535)
_KEY = flags.DEFINE_string("key", "", "API key of clients. By default everybody on this machine may come.")

EXAMPLE = """curl {url}/completions -H 'Content-Type: application/json'{key} \\
  -d '{{"model": "{model}", "prompt": "Hello", "max_tokens": 32}}'"""


def main(config: RunConfig, workdir: str) -> None:
  """Loads the policy, and answers requests until the process is asked to stop."""
  listener = listen(_HOST.value, _PORT.value, keyed=bool(_KEY.value))  # a port that is taken is told at once
  learner = setup.make_learner(config)
  policy = phases.latest_policy(config, learner, located(workdir), _PHASE.value, _STEP.value)
  params = sampler_side.make_publisher(learner)(policy.params)
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

      # Requests are answered in threads; this one waits for the end of either side.
      while not stop.requested and service.error is None:
        time.sleep(interrupt.POLL)
    if service.error is not None:
      raise service.error


if __name__ == "__main__":
  _flags.run(main, writes=False, needs_run=False)
