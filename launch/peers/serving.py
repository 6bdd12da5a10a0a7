"""The peers' end of `sao_jax.benchmarks.peers`: a task done once for every line that is read."""

import sys


def serve(run, warm_up=1):
  """Does the task to compile it, then whenever it is asked for; says so each time."""
  for _ in range(warm_up):
    run()
  _say_done()
  for _ in sys.stdin:
    run()
    _say_done()


def _say_done():
  sys.stdout.write("done\n")
  sys.stdout.flush()
