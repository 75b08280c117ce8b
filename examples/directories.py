"""Media for `pdinfer.remote.directory.Directory` beside those that it has: etcd, and the store of a Ray cluster.

    directory = Directory(Etcd("http://etcd.default.svc:2379"), key=key)
    directory = Directory(RayCluster(), key=key)                            # after ray.init()

A medium keeps a few kilobytes under each name. What is in them, and who is believed, is not its business.
"""

import json
from base64 import b64decode, b64encode
from typing import Any
from urllib.request import Request, urlopen

TIMEOUT_S = 5.0


class Etcd:
    """Keys below a prefix of an etcd 3.4 or later, by its JSON gateway. Each is bound to a lease, so that etcd drops
    what is not refreshed."""

    def __init__(self, url: str, prefix: str = "/pdinfer/engines/") -> None:
        self._url, self._prefix = url.rstrip("/"), prefix

    def read(self) -> dict[str, bytes | None]:
        end = self._prefix[:-1] + chr(ord(self._prefix[-1]) + 1)  # etcd takes a range for a prefix
        found = self._call("kv/range", key=_coded(self._prefix), range_end=_coded(end), limit=1024)
        pairs = [(b64decode(kv["key"]), kv.get("value", "")) for kv in found.get("kvs", ())]  # empty is left out
        return {_name(key).removeprefix(self._prefix): b64decode(value) for key, value in pairs}

    def write(self, name: str, data: bytes, *, ttl_s: float) -> None:
        lease = self._call("lease/grant", TTL=max(1, round(ttl_s)))["ID"]
        self._call("kv/put", key=_coded(self._prefix + name), value=b64encode(data).decode(), lease=lease)

    def remove(self, name: str) -> None:
        self._call("kv/deleterange", key=_coded(self._prefix + name))

    def _call(self, path: str, **body: object) -> dict[str, Any]:
        url, headers = f"{self._url}/v3/{path}", {"Content-Type": "application/json"}
        request = Request(url, json.dumps(body).encode(), headers)  # noqa: S310 - the host chose the address
        with urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            found: dict[str, Any] = json.load(answer)
            return found


def _name(key: bytes) -> str:
    return key.decode(errors="replace")  # anybody may have written it


def _coded(text: str) -> str:
    return b64encode(text.encode()).decode()


class RayCluster:
    """Keys in the store (GCS) of the Ray cluster that this process has joined, by functions that Ray calls internal.
    Nothing expires there, so what has lapsed stays until somebody removes it."""

    def __init__(self, namespace: str = "pdinfer") -> None:
        from ray.experimental import internal_kv

        self._space = namespace.encode()
        self._list, self._get = internal_kv._internal_kv_list, internal_kv._internal_kv_get  # noqa: SLF001
        self._put, self._del = internal_kv._internal_kv_put, internal_kv._internal_kv_del  # noqa: SLF001

    def read(self) -> dict[str, bytes | None]:
        keys = self._list(b"", namespace=self._space)
        return {_name(key): self._get(key, namespace=self._space) or b"" for key in keys}

    def write(self, name: str, data: bytes, *, ttl_s: float) -> None:
        self._put(name.encode(), data, overwrite=True, namespace=self._space)

    def remove(self, name: str) -> None:
        self._del(name.encode(), namespace=self._space)
