"""The 10 checks on a published study: how many of its rows that are artefacts they flag, and how many honest ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from pdinfer.bench import check
from tests.unit.bench.study import WRONG, rows


def checks() -> Iterator[dict[str, Any]]:
    """What is flagged, by check and by what the study's reader judged of the row."""
    found = rows()
    summaries = [summary for _, summary in found]
    flagged = [(row["class"] in WRONG, check(summary, beside=summaries)) for row, summary in found]
    yield {
        "wrong_rows": sum(is_wrong for is_wrong, _ in flagged),
        "wrong_rows_flagged": sum(is_wrong and bool(findings) for is_wrong, findings in flagged),
        "other_rows": sum(not is_wrong for is_wrong, _ in flagged),
        "other_rows_flagged": sum(not is_wrong and bool(findings) for is_wrong, findings in flagged),
        "by_check": dict(Counter(finding.check for _, findings in flagged for finding in findings)),
    }
