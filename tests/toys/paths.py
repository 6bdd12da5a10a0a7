"""Where the repository and its tests are, and what tells of a place on a machine."""

from __future__ import annotations

import pathlib
import re

TESTS = pathlib.Path(__file__).resolve().parent.parent
REPOSITORY = TESTS.parent
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<+])/\w")  # of a file, not of an address, a fraction, a closing tag or base64
