"""A conversation for the real verifiers package: its environment answers as the user until a number is found."""

from __future__ import annotations

import verifiers.v1 as vf
from vf_sums import Direct


class GuessData(vf.TaskData):
  hidden: int


class Guess(vf.Task[GuessData, vf.State, vf.TaskConfig]):
  pass


class Guesses(vf.Taskset[Guess, vf.TasksetConfig]):
  INFINITE = True

  def load(self):
    number = 0
    while True:
      yield Guess(GuessData(prompt=f"Game {number}: 1 to 9?", hidden=number % 9 + 1), self.config.task)
      number += 1


class GuessEnvConfig(vf.EnvConfig):
  player: vf.AgentConfig = vf.AgentConfig()
  rounds: int = 4


class GuessEnv(vf.Env[GuessEnvConfig]):
  async def run(self, task, agents):
    found = False
    async with agents.player.interaction(task) as interaction:
      segment = await interaction.turn()
      for left in reversed(range(self.config.rounds)):
        found = not segment.terminated and segment.last_reply == str(task.data.hidden)
        if found or segment.terminated or not left:
          break
        segment = await interaction.turn("higher" if int(segment.last_reply) < task.data.hidden else "lower")
    interaction.trace.record_reward("found", float(found), 1.0)
    interaction.trace.record_metric("rounds", interaction.trace.num_turns)


__all__ = ["Direct", "GuessEnv", "Guesses"]
