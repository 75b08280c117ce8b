"""Serves the requests of one `Pairing.generate`, as many at a time as the queue has room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from pdinfer.errors import Overloaded, PDInferError, RequestError
from pdinfer.pairing.intake import Stepping
from pdinfer.pairing.request import failed
from pdinfer.process.locks import HeldBack
from pdinfer.process.modes import check_tensors_are_real
from pdinfer.process.untraced import untraced
from pdinfer.types import Request, TokenEvent


@untraced
def generated(
    source: Iterator[Request],
    submit: Callable[[Request], str],
    stepping: Stepping,
    random_bytes: Callable[[int], bytes],
) -> Iterator[TokenEvent]:
    """Submit what comes from `source`, step, and yield the events, see `Pairing.generate`."""
    check_tensors_are_real()
    mine: set[str] = set()
    more = True
    pulled: list[Request] = []
    try:
        while more or mine:
            while more and stepping.intake.has_room:
                pulled = pulled or list(islice(source, 1))
                if not pulled:
                    more = False
                    break
                try:
                    with HeldBack():  # or else a signal may come between the two
                        mine.add(submit(pulled[0]))
                except Overloaded:
                    break  # another thread, or `source` itself, has filled the queue meanwhile
                except RequestError as error:
                    request_id = pulled[0].request_id
                    yield failed(request_id if isinstance(request_id, str) else random_bytes(8).hex(), error)
                pulled = []
            yield from stepping.advance_for(mine)
            mine, has_come = stepping.live(mine)  # another step may have had events, while we yielded
            if (more or mine) and not has_come:
                stepping.sleep(1.0)
    except (PDInferError, GeneratorExit):
        raise
    except BaseException:
        stepping.let_go()
        raise
    finally:
        if mine:
            stepping.forget(mine)
