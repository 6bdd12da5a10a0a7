"""A small OpenEnv environment, served by that package's own code: a number between 1 and 9 is to be found."""

from __future__ import annotations

import time

from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
  guess: int


class Told(Observation):
  told: str = ""


class Numbers(Environment[Guess, Told, State]):
  SUPPORTS_CONCURRENT_SESSIONS = True

  def reset(self, seed=None, episode_id=None, hidden=None, **options):
    self.hidden = hidden or (seed or 0) % 9 + 1
    self.left = 4
    return Told(told="A number from 1 to 9.")

  def step(self, action, timeout_s=None, **options):
    self.left -= 1
    if action.guess == 77:
      raise ValueError("seventy-seven breaks it")
    if action.guess == 78:
      time.sleep(2)
    if action.guess == 79:
      return Told(told="gone", done=True)  # without any reward
    right = action.guess == self.hidden
    hint = "right" if right else "higher" if action.guess < self.hidden else "lower"
    return Told(told=hint, done=right or not self.left, reward=1.0 if right else 0.1)

  @property
  def state(self):
    return State()


app = create_app(Numbers, Guess, Told, max_concurrent_envs=2)


def read_guess(said: str) -> dict[str, int]:
  """Reads "I say 5"."""
  return {"guess": int(said.removeprefix("I say "))}


def show(fields) -> str:
  """Shouts."""
  return fields["told"].upper()
