"""The class that vLLM makes: our hooks on top of the base class of the vLLM that is installed. This is the only file
that imports vLLM."""

from __future__ import annotations

import functools
import importlib
import logging

from pdinfer.errors import ConfigError

TESTED = "0.32"
"""The release of vLLM that tests/vllm runs with."""
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"

_log = logging.getLogger("vllm.pdinfer")


@functools.cache
def connector_class() -> type:
    """Return PDInferConnector. Raises ConfigError when vLLM, or xxhash, which vLLM does not bring, is not installed."""
    try:
        importlib.import_module("xxhash")
    except ImportError:
        raise ConfigError("PDInferConnector needs xxhash, which vLLM does not bring: pip install xxhash") from None
    try:
        version = importlib.import_module("vllm").__version__
        base = importlib.import_module(BASE).KVConnectorBase_V1
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"PDInferConnector needs vLLM with its connectors of version 1: {error}") from None
    return connector_on(base, str(version))


def connector_on(base: type, version: str) -> type:
    """Return PDInferConnector on a base class of vLLM, of some version. Another one than the tested is warned about. An
    abstract method that we do not know gets a body that does nothing, since it could not be made otherwise."""
    from pdinfer.adapters.vllm.connector import Hooks

    if not f"{version}.".startswith(f"{TESTED}."):
        _log.warning("PDInferConnector was tested with vLLM %s, and this is vLLM %s", TESTED, version)
    unknown = sorted(name for name in getattr(base, "__abstractmethods__", ()) if not hasattr(Hooks, name))
    if unknown:
        _log.warning("vLLM %s asks for %s, which PDInferConnector leaves empty", version, ", ".join(unknown))
    names = {"__doc__": Hooks.__doc__, "__module__": "pdinfer.adapters.vllm", "vllm_version": version}
    return type("PDInferConnector", (Hooks, base), {**names, **dict.fromkeys(unknown, _nothing)})


def _nothing(*_: object, **__: object) -> None:
    """Do nothing."""
