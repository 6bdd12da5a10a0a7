"""No test may hang: each has a time-out, also where Python's signals do not reach it."""

from __future__ import annotations

import os
import subprocess
import sys

from toys.paths import REPOSITORY

HANGS = """
import threading

def test_waits_for_a_lock():
  threading.Lock().acquire() and threading.Event().wait()

def test_comes_next():
  pass
"""


def test_every_test_has_a_timeout(pytestconfig):
  assert pytestconfig.pluginmanager.hasplugin("timeout")
  assert 0 < float(pytestconfig.getini("timeout")) <= 600
  assert pytestconfig.getini("timeout_method") == "signal"


def test_a_test_that_hangs_fails_and_the_others_go_on(tmp_path):
  (tmp_path / "test_hangs.py").write_text(HANGS)
  options = ["-c", str(REPOSITORY / "pytest.ini"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
  command = [sys.executable, "-m", "pytest", "-q", *options, "--timeout=0.2", str(tmp_path / "test_hangs.py")]
  environment = os.environ | {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
  command += ["-p", "pytest_timeout"]
  done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
  assert "1 failed, 1 passed" in done.stdout and "Timeout (>0.2s)" in done.stdout, done.stdout + done.stderr


def test_a_process_that_no_signal_reaches_is_ended_behind_the_longest_timeout_of_a_test(request):
  assert request.config.getini("faulthandler_exit_on_timeout")
  longest = [mark.args[0] for item in request.session.items for mark in item.iter_markers("timeout")]
  assert max(longest, default=0) < float(request.config.getini("faulthandler_timeout")) <= 3600
