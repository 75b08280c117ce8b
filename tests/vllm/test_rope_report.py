"""What tests/vllm/rope_report.md says of vLLM is so, and its script is short enough to be read."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.vllm.engines import ENVIRONMENT, ROOT

SCRIPT = ROOT / "tests" / "vllm" / "rope_report.py"
PAGE = SCRIPT.with_suffix(".md")


def test_the_report_says_what_its_script_prints() -> None:
    assert len(SCRIPT.read_text("utf-8").splitlines()) <= 20
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert code == SCRIPT.read_text("utf-8")
    run = subprocess.run(
        [sys.executable, str(SCRIPT)], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=True
    )
    wrong = [int(count) for count in re.findall(r"of (\d+) of 32 tokens", run.stdout)]
    assert len(wrong) == 4
    assert wrong[0] == wrong[2] == 32
    assert wrong[1] > 16 > wrong[3] == 0
