"""Where one request has to stop: its tokens pass `Request.stop` one by one."""

from __future__ import annotations

from pdinfer.bounds import cause
from pdinfer.errors import RequestError
from pdinfer.log import log
from pdinfer.stop import StopSequences
from pdinfer.types import Request


class Stopping:
    """Follows the output of one request, from the tokens that it came with to the one that ends it. What a matcher
    raises becomes a RequestError, so that it costs no other request."""

    def __init__(self, request: Request) -> None:
        """Raise RequestError when the matcher fails, or when the output that came with the request ends it already."""
        stop = StopSequences(request.stop) if isinstance(request.stop, tuple) else request.stop
        self._num_tokens = 0
        self._min_tokens = request.sampling.min_new_tokens
        try:
            self._stops = stop.begin(request.prompt)
        except Exception as error:
            raise _failed(error) from error
        for index, token in enumerate(request.output):
            if self.ends_with(token):
                raise RequestError(f"output[{index}] already ends the request by its stop; nothing is left to generate")

    def ends_with(self, token: int) -> bool:
        """Return whether the next token is the last one. Raise RequestError when the matcher fails."""
        self._num_tokens += 1
        try:
            stops = bool(self._stops(token))
        except Exception as error:
            raise _failed(error) from error
        return stops and self._num_tokens >= self._min_tokens


def _failed(error: Exception) -> RequestError:
    if isinstance(error, MemoryError):
        raise error
    log.debug("the matcher of a stop failed", exc_info=error)
    return RequestError(f"the matcher of its stop failed: {cause(error)}")
