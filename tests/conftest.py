"""Eight simulated CPU devices, one compilation cache, a quiet hypothesis profile, annotations that are checked."""

from __future__ import annotations

import gc
import os
import pathlib
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:
  os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
# One directory per user and machine: processes that tests start share what their parent compiled.
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(tempfile.gettempdir()) / f"sao_jax_tests_{os.getuid()}")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from toys import annotation_checks  # noqa: E402

hypothesis.settings.register_profile(
  "sao",
  deadline=None,  # the first example compiles
  max_examples=30,
  derandomize=True,
  suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("sao")

annotation_checks.install()


@pytest.fixture(scope="module", autouse=True)
def released_programs():
  """Gives back what a module has compiled: thousands of programs would exhaust the memory maps that Linux allows one
  process (65,530), which ends in a segmentation fault of the compiler."""
  yield
  jax.clear_caches()
  gc.collect()
