"""One sampler over two processes with a device each: `group_toy.py DYING`, in both. They print JSON.

In the end the leader or the follower dies. Where it is the follower, sessions are played before; `played` plays them on
two devices of one process as well.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import signal
import sys
import threading

CASES = {
  "slots": {"cache_layout": "slots"},
  # Of 24 pages for all contexts: turns give way.
  "pages": {"cache_layout": "pages", "page_size": 8, "num_pages": 8, "kv_after_publish": "reprefill"},
}
AXES = {"slots": {"expert": 2}, "pages": {"tensor": 2}}


def engine_of(case, make, devices, version=0):
  """Makes an engine of two devices by `make(params, ...)`; returns it with another set of weights."""
  import jax

  from sao_jax.config import MeshConfig
  from sao_jax.models.transformer import param_specs
  from sao_jax.parallel.layout import SAMPLER_RULES, Layout
  from sao_jax.parallel.mesh import make_mesh
  from sao_jax.parallel.params import init_params
  from toys import engine_toy

  mesh = make_mesh(MeshConfig(fsdp=1, **AXES[case]), devices)
  model = dataclasses.replace(engine_toy.MOE, vocab_size=62, num_layers=1, num_dense_layers=0)
  specs = param_specs(model)
  place = Layout(mesh, SAMPLER_RULES).param_shardings(specs)
  first, second = (
    jax.jit(lambda key: init_params(specs, key), out_shardings=place)(jax.random.key(seed)) for seed in range(2)
  )
  config = dataclasses.replace(engine_toy.SMALL, **CASES[case])
  return make(first, model, config, seed=0, version=version, keep_experts=True, mesh=mesh), second


def played(engine, newer):
  """Sessions of several turns on few slots, with a publish in the middle and one of fixed weights, as plain data."""
  import jax

  from sao_jax.sampler.fixed_weights import Weights
  from sao_jax.sampler.requests import GenerateRequest
  from sao_jax.sampler.scheduler import Scheduler
  from toys import engine_toy

  engine.warm_up()
  scheduler, fixed = Scheduler(engine, park_after=1), []
  pinned = Weights(engine.params, engine.version, jax.random.key(5))

  def on_tick(tick):
    if tick == 2:
      scheduler.submit(GenerateRequest(99, 99, (7, 8, 9), 6, weights=pinned), fixed.append)
    if tick == 4:
      scheduler.publish(newer, 1)

  records = engine_toy.play(scheduler, engine_toy.multi_turns(6), on_tick, delay=2)
  data = [[record.ids, [float(x) for x in record.logprobs], [int(x) for x in record.versions]] for record in records]
  experts = [[turn.tolist() for turn in record.experts] for record in records]
  counts = {name: scheduler.stats()[name] for name in ("parked", "preempted", "reprefilled", "publishes")}
  return {
    "records": data,
    "experts": experts,
    "fixed": [fixed[0].token_ids.tolist(), fixed[0].logprobs.tolist(), fixed[0].policy_versions.tolist()],
    "counts": counts,
  }


def main(dying):
  import jax

  from sao_jax.parallel.agreement import all_processes
  from sao_jax.parallel.process import initialize_processes

  initialize_processes()
  processes, devices = all_processes(), tuple(jax.devices())
  if dying == "follower":
    play_together(processes, devices)
  end_early(dying, processes, devices)


def play_together(processes, devices):
  from sao_jax.parallel.group_channel import Patience, open_channel
  from sao_jax.sampler.engine import Engine
  from sao_jax.sampler.follower import FollowingService
  from sao_jax.sampler.leader import LeadingEngine, Plan

  answers = {}
  for case in CASES:
    channel = open_channel(processes, (0, 1), Patience(sign=0.5))
    if channel.leads:
      plan = Plan(channel)
      engine, second = engine_of(case, functools.partial(LeadingEngine, plan), devices)
      plan.hold(1, second)
      answers[case] = played(engine, second)
      channel.close()
    else:
      engine, second = engine_of(case, Engine, devices)
      with FollowingService(engine, channel) as service:
        service.publish(second, 1)
  if processes.is_writer:
    say(answers)


def end_early(dying, processes, devices):
  """Samples in a thread while the main threads run programs of both; then the process `dying` dies."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  from sao_jax.parallel.group_channel import Patience
  from sao_jax.sampler.group import make_group_service
  from sao_jax.sampler.requests import GenerateRequest

  leads, make = processes.index == 0, lambda make: engine_of("slots", make, devices)[0]
  service = make_group_service(make, processes, (0, 1), warm_up=lambda engine: engine.warm_up(), patience=Patience(0.5))
  both = NamedSharding(Mesh(devices, ("all",)), PartitionSpec("all"))
  ones = jax.jit(lambda: jnp.ones(2), out_shardings=both)()
  total = jax.jit(lambda x: jnp.broadcast_to(x.sum(), (2,)), out_shardings=both)

  waiting = []
  with service:
    if leads:
      ask = lambda i: service.submit(GenerateRequest(i, i, (1, 2, 3), 40))
      waiting = [ask(i) for i in range(4)]

    # Programs of the main threads, in between those of the sampler.
    for _ in range(5):
      with service.turn("sum"):
        ones = total(ones)
    if leads:
      say([float(ones.addressable_data(0)[0]), [len(each.result(60).token_ids) for each in waiting]])
      waiting = [ask(i) for i in range(4, 40)]
    with service.turn("the end"):
      pass
    if dying == ("leader" if leads else "follower"):
      os.kill(os.getpid(), signal.SIGKILL)

    # The other one learns it, whatever it does.
    errors = [each.exception(60) for each in waiting]
    gone = threading.Event()
    while service.error is None:
      gone.wait(0.05)
    say([str(service.error), len({str(error) for error in errors})])
    os._exit(0)


def say(value):
  sys.stdout.write(json.dumps(value) + "\n")
  sys.stdout.flush()


if __name__ == "__main__":
  sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
  main(*sys.argv[1:])
