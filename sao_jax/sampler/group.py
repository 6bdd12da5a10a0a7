"""A sampler of several processes: the first one leads, the others follow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from sao_jax.parallel.agreement import Processes
from sao_jax.parallel.group_channel import PATIENCE, Patience, open_channel
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.follower import FollowingService
from sao_jax.sampler.leader import LeadingEngine, LeadingService, Plan
from sao_jax.sampler.scheduler import Scheduler


def make_group_service(
  make_engine: Callable[[Callable[..., Engine]], Engine],
  processes: Processes,
  members: Sequence[int],
  *,
  warm_up: Callable[[Engine], None] = lambda engine: None,
  patience: Patience = PATIENCE,
) -> LeadingService | FollowingService:
  """Makes the service of this process, not started; all members of the group call it together.

  What the leader's main thread does from here on (`turn`, `publish`), those of the followers do too, in the same order.

  Args:
    make_engine: makes this process's engine by the constructor that it is given.
    processes: all of the run.
    members: those of the group; the first one leads.
    warm_up: what the leader does with its engine before it serves; the followers' engines do the same once they have
      started.
    patience: with the others.

  Raises:
    ProcessFailed: another process has failed, or does not come.
  """
  channel = open_channel(processes, members, patience)
  if not channel.leads:
    return FollowingService(make_engine(Engine), channel)
  plan = Plan(channel)
  engine = make_engine(functools.partial(LeadingEngine, plan))
  warm_up(engine)
  return LeadingService(Scheduler(engine), plan)
