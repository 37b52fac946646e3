"""The records that `trtllm-serve` itself puts into etcd, read as if they were ours.

With a metadata server configured it writes `{"model", "version", "timestamp", "server_role", "url"}` under `trtllm/<id>`,
without a lease: a record's presence proves nothing, and one left by a crash stays for ever. Models become pools. Pure.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from urllib.parse import urlsplit

from gpuroute.errors import InvalidRecord

PREFIX = "/trtllm"
DEFAULT_POOL = "default"
MAX_POOL = 63
ACCEPTS = "the JSON object that trtllm-serve writes, with a url such as http://host:8000"


def place_of(ident: str, record: dict[str, object]) -> str:
    """Our key of a record: the pool is named as the model, in what a pool name may have of it."""
    model = re.sub(r"[^a-z0-9._-]+", "-", str(record.get("model", "")).lower()).strip("._-")
    return f"{model[:MAX_POOL] or DEFAULT_POOL}/endpoints/{ident}"


def read_record(key: str, value: bytes) -> dict[str, object]:
    """The fields of our schema that a record states, the role as a label. Raises InvalidRecord, which names the key.

    A server bound to every interface registers `0.0.0.0`, by which nobody can reach it. Its `timestamp` has no zone: it
    is taken as local.
    """
    try:
        record = json.loads(value)
    except (ValueError, RecursionError):
        raise InvalidRecord(f"{key}: is not JSON; accepted: {ACCEPTS}") from None
    if not isinstance(record, dict) or not isinstance(record.get("url"), str):
        raise InvalidRecord(f"{key}: has no url; accepted: {ACCEPTS}")
    fields = {"url": _url(key, record["url"]), "engine": "tensorrt_llm", "started_at": _epoch(record.get("timestamp"))}
    fields |= {name: record[name] for name in ("model", "version") if isinstance(record.get(name), str)}
    role = record.get("server_role")
    return fields | ({"labels": {"role": role.lower()}} if isinstance(role, str) else {})


def _url(key: str, text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.scheme not in {"http", "https"}:
        raise InvalidRecord(f"{key}: url is no address; accepted: http://host:port")
    if host in {"0.0.0.0", "::"}:
        raise InvalidRecord(f"{key}: url says {host}; accepted: an address of the server's own, given to it with --host")
    return url.rstrip("/")


def _epoch(value: object) -> float:
    try:
        return max(0.0, datetime.fromisoformat(value if isinstance(value, str) else "").timestamp())
    except (ValueError, OverflowError, OSError):
        return 0.0
