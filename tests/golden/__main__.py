"""Run `python -m tests.golden`: see `files`."""

from __future__ import annotations

import sys

from tests.golden.files import write_missing

sys.exit("\n".join(write_missing()))
