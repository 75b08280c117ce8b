"""Whether a library for Hopper cards can be used."""

from __future__ import annotations

import functools
import importlib

from pdinfer.kernels.spec import DeviceSpec


def why_not(device: DeviceSpec, library: str, functions: tuple[tuple[str, ...], ...]) -> str | None:
    """Return why a library cannot be used on a device, or None where it can. It has to have these functions, each under
    one of the names that its builds have for it."""
    if not device.is_hopper:
        return f"is used on Hopper cards, not on {device}"
    return _why_absent(library, functions)


@functools.cache
def _why_absent(library: str, functions: tuple[tuple[str, ...], ...]) -> str | None:
    try:
        module = importlib.import_module(library)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        return f"cannot be imported ({reason})"
    for names in functions:
        if not any(hasattr(module, name) for name in names):
            return f"this {library} has no {names[0]}"
    return None
