"""Where the repository and its tests are."""

from __future__ import annotations

import pathlib

TESTS = pathlib.Path(__file__).resolve().parent.parent
REPOSITORY = TESTS.parent
