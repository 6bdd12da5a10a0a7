"""Every field of the configuration reaches what uses it, in every phase; toys/wired_fields.py says where."""

from __future__ import annotations

import functools

import pytest
from toys import wiring
from toys.wired_fields import BUILT, FIELDS, FIRST, PRETRAIN, RUNS, SECOND, TRAIN

from sao_jax.configuration import config_tree


@functools.cache
def calls_of(run: str, phase: str) -> wiring.Calls:
  return wiring.build(phase, RUNS[run])


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_reaches_what_uses_it(path):
  for use in FIELDS[path].uses:
    for run, phase in BUILT:
      if phase not in use.phases:
        continue
      calls, config = calls_of(run, phase), RUNS[run]
      seen = [use.shows(each) for each in (calls.of(use.where) if isinstance(use.where, str) else use.where(calls))]
      expected = use.expected(config, phase) if use.expected else config_tree.get(config, path)
      assert all(each == expected for each in seen), f"{use.where} of {run} {phase}: {seen}, not {expected}"
      assert seen or (path in FIRST if run == "first" else path not in SECOND), f"{use.where}: not called in {phase}"


def test_networks_that_no_checkpoint_brings_are_made_from_the_seed():
  assert calls_of("second", TRAIN).of("init_sharded.seed") == [RUNS["second"].training.seed]


def test_rollouts_are_expected_to_grow_old_where_the_policy_changes():
  (pretraining,), (training,) = (calls_of("second", phase).of("Rollouts.expectation") for phase in (PRETRAIN, TRAIN))
  assert pretraining is None and training is not None
