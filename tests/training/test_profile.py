"""Traces of train steps: they begin and end where they should, whatever becomes of the run."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import pytest

from sao_jax.training.profile import Profile


@pytest.fixture
def calls(monkeypatch):
  """The calls of jax's profiler, which writes nothing."""
  calls = []
  monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append("start"))
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
  return calls


def run(profile: Profile, steps: range, calls: list) -> None:
  for step in steps:
    with profile.step(step):
      calls.append(step)


@pytest.mark.parametrize(
  "traced, steps, expected",
  [
    ((), range(1, 4), [1, 2, 3]),
    ((2, 3), range(1, 6), [1, "start", 2, 3, "stop", 4, 5]),
    ((2, 2), range(1, 4), [1, "start", 2, "stop", 3]),
    ((2, 9), range(1, 4), [1, "start", 2, 3, "stop"]),  # the run ends before the trace does
    ((2, 4), range(3, 7), ["start", 3, 4, "stop", 5, 6]),  # resumed in the middle
    ((2, 4), range(5, 7), [5, 6]),  # resumed behind it
  ],
)
def test_a_trace_is_of_its_steps(tmp_path, calls, traced, steps, expected):
  with Profile(tmp_path, traced) as profile:
    run(profile, steps, calls)
  assert calls == expected


def test_a_failure_ends_the_trace_and_passes_on(tmp_path, calls):
  with pytest.raises(ZeroDivisionError), Profile(tmp_path, (1, 5)) as profile, profile.step(1):
    raise ZeroDivisionError
  assert calls == ["start", "stop"]


def test_a_real_trace_holds_the_steps(tmp_path):
  folder = tmp_path / "profile"
  with Profile(folder, (1, 1)) as profile:
    for step in (1, 2):
      with profile.step(step):
        jax.block_until_ready(jnp.ones(4) + 1)
  (trace,) = folder.rglob("*.xplane.pb")
  assert b"train" in pathlib.Path(trace).read_bytes()
