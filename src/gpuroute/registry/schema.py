"""What a registry record may say: JSON to `Endpoint` and `PoolConfig`, and back.

The tables `_ENDPOINT` and `_CONFIG` are the schema; `docs/registry.md` explains the fields. A record is taken whole or
refused whole, with an `InvalidRecord` that names the key, the field and what is accepted, and never shows a value that
may hold a secret. Fields that are not in a table are ignored, so that newer writers can talk to older readers
(`unread` says which).

Pure; any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from gpuroute.core.endpoint import MAX_ENGINE, Capacity, Endpoint, Gpu, State, Tls, engine_of_agent
from gpuroute.core.fleet import PoolConfig
from gpuroute.core.policies import POLICIES
from gpuroute.errors import InvalidRecord
from gpuroute.forms import parse_duration, parse_subset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

MAX_BYTES = 65_536
MAX_TEXT = 2_048
MAX_WEIGHT = 1e6
MAX_SHOWN = 400  # of a key: a pool and an id that are valid, and a prefix
ID_ACCEPTS = "1 to 253 of A-Z a-z 0-9 . _ : @ + ~ [ ] -"

_POOL = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_ID = re.compile(r"[A-Za-z0-9._:@+~\[\]-]{1,253}")
_HOST_AND_PORT = re.compile(r"(?:[^:@\[\]]*|\[[^@\[\]]*\])(?::[0-9]*)?")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FRAMING = frozenset({"connection", "content-length", "host", "te", "transfer-encoding", "upgrade"})


class _Row(NamedTuple):
    """How one field is read: `read` raises ValueError with a reason that never quotes the value."""

    read: Callable[[Any], Any]
    accepts: str


# ------------------------------------------------------------------------------------------- values


def _need(condition: object, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _typed(value: Any, *types: type) -> None:
    """The exact type: True is no number here."""
    if type(value) not in types:
        raise ValueError(f"is {_kind(value)}")


def _text(value: Any) -> str:
    _typed(value, str)
    _need(len(value) <= MAX_TEXT, "is too long")
    _need(value.isprintable(), "has control characters")
    return str(value)


def _number(value: Any) -> float:
    _typed(value, int, float)
    _need(0 <= value <= 1e15, "is negative, not finite or beyond 1e15")
    return float(value)


def _weight(value: Any) -> float:
    number = _number(value)
    _need(number <= MAX_WEIGHT, "is too large")
    return number


def _whole(least: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        _typed(value, int)
        _need(least <= value <= 1e15, "is out of range")
        return int(value)

    return read


def _boolean(value: Any) -> bool:
    _typed(value, bool)
    return bool(value)


def _seconds(value: Any) -> float:
    seconds = _price(value)
    _need(seconds > 0, "is not above 0")
    return seconds


def _price(value: Any) -> float:
    return _formed(parse_duration, value) if isinstance(value, str) else _number(value)


def _formed(parse: Callable[[str], T], text: str) -> T:
    """What a parser makes of a text; its own complaint would quote it."""
    try:
        return parse(text)
    except ValueError:
        raise ValueError("is a text of another form") from None


def _policy(value: Any) -> str:
    _need(_text(value) in POLICIES, "is none that this release knows")
    return str(value)


def _subset(value: Any) -> str | int:
    return _formed(parse_subset, value) if isinstance(value, str) else _whole(1)(value)


def _word(*words: str) -> _Row:
    def read(value: Any) -> str:
        _need(value in words, "is none of them")
        return str(value)

    return _Row(read, "one of " + ", ".join(words))


def _texts(value: Any) -> tuple[str, ...]:
    _typed(value, list)
    return tuple(_text(item) for item in value)


def _mapping(value: Any) -> Mapping[str, str]:
    _typed(value, dict)
    return {_text(name): _text(item) for name, item in value.items()}


def _headers(value: Any) -> Mapping[str, str]:
    headers = _mapping(value)
    for name, item in headers.items():
        _need(_HEADER.fullmatch(name) and item.isascii(), "has a name or value that HTTP does not allow")
        _need(name.lower() not in _FRAMING, "sets what is the client's business (for Host use authority)")
    return headers


def _url(*schemes: str, port: bool = False) -> _Row:
    def read(value: Any) -> str:
        text = _text(value)
        _need(text.isascii() and " " not in text, "has characters that belong in no URL")
        parts = _formed(urlsplit, text)
        _need(parts.scheme in schemes, "has another scheme")
        _need("@" not in parts.netloc, "holds credentials (use headers)")
        _need(parts.hostname, "has no host")
        _need(not parts.query and not parts.fragment, "has a query or fragment")
        _need(_port(parts.netloc) or not port, "has no port")
        return text

    shown = ", ".join(f"{scheme}://" for scheme in schemes) + (" with host:port" if port else " with host[:port][/path]")
    return _Row(read, f"{shown}, port 1 to 65535, no credentials, query or fragment")


def _port(netloc: str) -> int | None:
    try:
        port = urlsplit(f"//{netloc}").port
    except ValueError:
        raise ValueError("has a bad port") from None
    _need(port != 0, "has port 0")
    return port


_AGENT = _url("udp", "grpc", "grpcs", port=True)


def _agent(value: Any) -> str:
    text = str(_AGENT.read(value))
    engine = urlsplit(text).path.strip("/")
    _need(not engine.isdecimal() or engine_of_agent(engine) == int(engine[:9]), "names an engine that cannot be")
    return text


def _nested(cls: type[Any], **rows: _Row) -> _Row:
    def read(value: Any) -> Any:
        _typed(value, dict)
        return cls(**dict(_values(rows, value, "")))

    return _Row(read, "an object of " + ", ".join(f"{name} ({row.accepts})" for name, row in rows.items()))


_TEXT = _Row(_text, f"text of at most {MAX_TEXT} printable characters")
_AMOUNT = _Row(_number, "a number of at least 0")
_COUNT = _Row(_whole(1), "a whole number of at least 1")
_LIMIT = _Row(_whole(0), "a whole number of at least 0 (0: none stated)")

_ENDPOINT: dict[str, _Row] = {
    "url": _url("http", "https", "grpc", "grpcs"),
    "protocol": _word("http", "grpc"),
    "engine": _TEXT,
    "model": _TEXT,
    "version": _TEXT,
    "adapters": _Row(_texts, "a list of texts"),
    "weight": _Row(_weight, "a number from 0 (drained) to 1e6"),
    "gpu": _nested(Gpu, kind=_TEXT, count=_COUNT, memory_gib=_AMOUNT),
    "capacity": _nested(Capacity, max_in_flight=_LIMIT, kv_tokens=_LIMIT),
    "tls": _nested(Tls, server_name=_TEXT, ca=_TEXT, cert=_TEXT, key=_TEXT),
    "headers": _Row(_headers, "an object of HTTP header names and values"),
    "authority": _TEXT,
    "zone": _TEXT,
    "region": _TEXT,
    "state": _word(*State),
    "started_at": _Row(_number, "a time in epoch seconds"),
    "cold_start_s": _AMOUNT,
    "price": _AMOUNT,
    "agent": _Row(_agent, f"{_AGENT.accepts}; a path says which of its engines, 0 to {MAX_ENGINE}"),
    "labels": _Row(_mapping, "an object of texts"),
}
FLAGS = frozenset({"hedge", "reroute", "continuation", "watchdog", "ask_hashes"})  # options that are on or off
_CONFIG: dict[str, _Row] = {
    "policy": _Row(_policy, ", ".join(POLICIES)),
    "timeout": _Row(_seconds, 'seconds above 0, or a duration such as "250ms", "2s", "1m"'),
    "attempts": _COUNT,
    "max_in_flight": _COUNT,
    "subset": _Row(_subset, '"auto", "off" or a whole number of at least 1'),
    "zone_price": _Row(_price, 'seconds, or a duration such as "250ms"'),
    "region_price": _Row(_price, 'seconds, or a duration such as "250ms"'),
    "disabled": _Row(_boolean, "true or false"),
    "fallback_url": _url("http", "https"),
    "salt": _TEXT,
}
ENDPOINT_FIELDS = ("id", *_ENDPOINT)
CONFIG_FIELDS = (*_CONFIG, *sorted(FLAGS))


def _values(rows: Mapping[str, _Row], record: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    """The known fields of a record, read; null counts as absent."""
    for name, row in rows.items():
        if record.get(name) is not None:
            try:
                yield name, row.read(record[name])
            except (ValueError, TypeError) as error:
                if not key:  # inside an object, whose own row reports it
                    raise ValueError(f"has a {name} that {error}") from None
                raise InvalidRecord(f"{key}: {name} {error}; accepted: {row.accepts}") from None


def _object(record: object, key: str) -> Mapping[str, Any]:
    if not isinstance(record, Mapping):
        raise InvalidRecord(f"{key}: is {_kind(record)}; accepted: a JSON object")
    return record


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


# ---------------------------------------------------------------------------------- records and back


def parse_endpoint(record: object, *, id: str, key: str) -> Endpoint:  # noqa: A002  (the field's name)
    """The endpoint that a record describes. Raises InvalidRecord; `key` is how messages name the record."""
    if not valid_id(id):
        raise InvalidRecord(f"{key}: bad id; accepted: {ID_ACCEPTS}")
    values = dict(_values(_ENDPOINT, _object(record, key), key))
    if "url" not in values:
        raise InvalidRecord(f"{key}: url is missing; accepted: {_ENDPOINT['url'].accepts}")
    scheme = urlsplit(values["url"]).scheme
    default = "grpc" if scheme.startswith("grpc") else "http"
    protocol = values.setdefault("protocol", default)
    if default == "grpc" and protocol != "grpc":
        raise InvalidRecord(f"{key}: protocol contradicts the scheme of url; accepted: grpc")
    if scheme in {"http", "grpc"} and values.get("tls", Tls()) != Tls():
        raise InvalidRecord(f"{key}: tls is given but url is not TLS; accepted with tls: https:// or grpcs://")
    values["state"] = State(values.get("state", State.READY))
    return Endpoint(id=id, **values)


def parse_config(record: object, *, key: str) -> PoolConfig:
    """The pool settings that a record states; other fields become its `options`. Raises InvalidRecord."""
    record = _object(record, key)
    options = {name: value for name, value in record.items() if name not in _CONFIG}
    for name in FLAGS & options.keys():
        if isinstance(options[name], str | int | float) and not isinstance(options[name], bool):
            raise InvalidRecord(f"{key}: {name} is {_kind(options[name])}; accepted: true or false")
    return PoolConfig(**dict(_values(_CONFIG, record, key)), options=options)


def endpoint_record(endpoint: Endpoint, *, secrets: bool = True) -> dict[str, Any]:
    """The JSON record of an endpoint, without its id; fields at their default are left out.

    With `secrets=False`, for people's eyes: header values are masked and the path of the TLS key is left out.
    """
    record = _changed(endpoint)
    del record["id"]
    if endpoint.protocol == "grpc" and endpoint.url.startswith("grpc"):
        del record["protocol"]
    if not secrets and "headers" in record:
        record["headers"] = dict.fromkeys(record["headers"], "***")
    if not secrets:
        record.get("tls", {}).pop("key", None)
    return record


def config_record(config: PoolConfig, *, secrets: bool = True) -> dict[str, Any]:
    """The JSON record of a pool's settings; with `secrets=False` the salt is masked."""
    record = _changed(config)
    if not secrets and config.salt:
        record["salt"] = "***"
    return {**record.pop("options", {}), **record}


def _changed(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their default, as JSON values."""
    pairs = ((row, getattr(value, row.name)) for row in fields(value))
    return {row.name: _plain(item) for row, item in pairs if item != _default(row)}


def _default(row: Field[Any]) -> Any:
    return row.default if row.default_factory is MISSING else row.default_factory()


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return _changed(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, State) else value


# ------------------------------------------------------------------------------------ keys and bytes


def check_pool(name: str, key: str) -> str:
    """The name if it is a valid pool name (it serves as a URL host); else InvalidRecord."""
    if not _POOL.fullmatch(name):
        raise InvalidRecord(f"{key}: bad pool name {name[:80]!r}; accepted: [a-z0-9][a-z0-9._-]{{0,62}}")
    return name


def shown(key: str) -> str:
    """A key as messages show it: anybody's bytes, but on one line and without an end that never comes."""
    text = key if key.isprintable() else repr(key)[1:-1]
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def valid_id(ident: str) -> bool:
    """True if this can be an endpoint's id."""
    return bool(_ID.fullmatch(ident))


def default_id(url: str) -> str:
    """The id of an endpoint that was given by its URL alone: `host:port`, and the path if there is one.

    Userinfo, query and fragment are left out: such a URL is refused, but in a message that shows the id.
    """
    plain = re.split("[?#]", url.partition("://")[2] or url, maxsplit=1)[0]
    if not _HOST_AND_PORT.fullmatch(plain.partition("/")[0]):  # perhaps a password, and perhaps one with a slash
        plain = plain.rpartition("@")[2]
    return plain.rstrip("/").replace("/", "_")


def decode(data: bytes, key: str) -> object:
    """The JSON value of a record's bytes. Raises InvalidRecord."""
    if len(data) > MAX_BYTES:
        raise InvalidRecord(f"{key}: has {len(data)} bytes; accepted: at most {MAX_BYTES}")
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError:
        raise InvalidRecord(f"{key}: is not UTF-8; accepted: a JSON object") from None
    except (ValueError, RecursionError):
        raise InvalidRecord(f"{key}: is {'empty' if not data else 'not JSON'}; accepted: a JSON object") from None
