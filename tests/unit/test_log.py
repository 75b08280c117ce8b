"""Lines say where they come from, and what a host's handler raises is printed as `logging` prints it."""

from __future__ import annotations

import logging

import pytest

from pdinfer.log import log


def test_a_line_is_that_of_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pdinfer"):
        log.info("%d of %d", 1, 2)
        try:
            raise ValueError("a cause")
        except ValueError:
            log.exception("failed", stack_info=True)
    first, second = caplog.records
    assert (first.name, first.getMessage()) == ("pdinfer", "1 of 2")
    assert {(record.filename, record.funcName) for record in caplog.records} == {
        ("test_log.py", "test_a_line_is_that_of_its_caller")
    }
    assert second.exc_info is not None
    assert second.stack_info is not None


@pytest.mark.parametrize("raises", [True, False])
def test_what_a_filter_raises_is_printed_where_logging_prints_it(
    raises: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: logging.LogRecord) -> bool:
        raise KeyError("request_id")

    monkeypatch.setattr(logging, "raiseExceptions", raises)
    logging.getLogger("pdinfer").addFilter(refuse)
    try:
        log.warning("a line")
    finally:
        logging.getLogger("pdinfer").removeFilter(refuse)
    assert ("KeyError: 'request_id'" in capsys.readouterr().err) == raises
