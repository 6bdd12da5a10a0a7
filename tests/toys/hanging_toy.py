"""The toy run with an environment that never answers the first action, and says so by writing a file."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib

from toys import training_toy


class HangingEpisode(training_toy.ParityEpisode):
  """Hangs in its first step."""

  async def step(self, action_ids):
    if "SAO_TEST_MARK" in os.environ:
      pathlib.Path(os.environ["SAO_TEST_MARK"]).touch()
    await asyncio.sleep(3600)

  async def on_truncated(self, status):
    return await self.step(None)


@dataclasses.dataclass(frozen=True)
class Hanging(training_toy.Parity):
  """Its settings."""

  make = staticmethod(lambda tokenizer: HangingEpisode())


def get_config():
  """The toy run, with patience."""
  config = dataclasses.replace(training_toy.get_config(), environment=Hanging())
  return training_toy.replace(config, rollout={"environment_timeout": 3600.0}, training={"watchdog_seconds": 7200.0})
