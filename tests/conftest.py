"""Eight simulated CPU devices, one compilation cache, a quiet hypothesis profile, annotations that are checked."""

from __future__ import annotations

import gc
import os
import pathlib
import tempfile

from toys import processes

os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = {processes.DEVICES: "8"} | processes.QUICK_COMPILATION
os.environ["XLA_FLAGS"] = processes.xla_flags(os.environ.get("XLA_FLAGS", ""), **flags)
# One directory per user and machine: workers, and processes that tests start, share what any of them compiled.
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(tempfile.gettempdir()) / f"sao_jax_tests_{os.getuid()}")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # the least takes 14 ms, and 3 to be read

import hypothesis  # noqa: E402
import pytest  # noqa: E402
from toys import annotation_checks, selection  # noqa: E402

hypothesis.settings.register_profile(
  "sao",
  deadline=None,  # the first example compiles
  max_examples=30,
  derandomize=True,
  suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("sao")

annotation_checks.install()  # before anything imports the package

from toys import memory_maps, shared_steps  # noqa: E402

shared_steps.install()
# Tracing makes objects by the million that stay: with the default of 700 the collector takes a tenth of its time.
gc.set_threshold(50_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Marks what is slow, and puts it first: two processes that share the files end at about the same time."""
  slow = selection.read()
  for item in items:
    if selection.matches(slow, item.nodeid):
      item.add_marker(pytest.mark.slow)
  items.sort(key=lambda item: selection.rank(slow, item.nodeid))


@pytest.fixture(scope="module", autouse=True)
def released_programs(request):
  """Gives back what was compiled once there is much of it; fails when a module comes near the limit of memory maps.

  What stays is hidden from the garbage collector: its walk over all programs of earlier modules stops every thread for
  so long that a watchdog of a second took it for silence.
  """
  gc.collect()
  gc.freeze()
  yield
  memory_maps.release(request.module.__name__)
