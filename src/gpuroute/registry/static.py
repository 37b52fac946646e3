"""A fleet that does not change: written in code or in one line of text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gpuroute.core.endpoint import Endpoint
from gpuroute.core.fleet import Fleet, PoolSpec
from gpuroute.errors import ConfigError, InvalidRecord
from gpuroute.registry.schema import check_pool, default_id, endpoint_record, parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_POOL = "default"
ACCEPTS = "POOL=URL,URL;POOL2=URL, or URL,URL for the pool `default`"
_POOL_PREFIX = re.compile(r"\s*((?:(?!://)[^=,;@])*?)\s*=(.*)", re.DOTALL)


class StaticRegistry:
    """Implements `Registry` over endpoints, or their URLs, by pool; a list is the pool `default`.

    ConfigError for anything malformed.
    """

    def __init__(self, fleet: Iterable[Endpoint | str] | Mapping[str, Iterable[Endpoint | str]]) -> None:
        pools = fleet if isinstance(fleet, Mapping) else {DEFAULT_POOL: fleet}
        try:
            specs = {name: _spec(name, endpoints) for name, endpoints in pools.items()}
        except InvalidRecord as error:
            raise ConfigError(str(error)) from None
        self.fleet = Fleet(specs, source="static")

    @classmethod
    def from_text(cls, text: str) -> StaticRegistry:
        """The fleet of `llama=http://a:8000,http://b:8000;embed=http://c:8000`, or of a bare list of URLs."""
        pools: dict[str, list[str]] = {}
        for part in filter(None, map(str.strip, text.split(";"))):
            match = _POOL_PREFIX.fullmatch(part)
            name, urls = match.groups() if match else (DEFAULT_POOL, part)
            if name in pools:
                raise ConfigError(f"registry: pool {name} is given twice; expected {ACCEPTS}")
            pools[name] = [url for url in map(str.strip, urls.split(",")) if url]
            if any(map(_POOL_PREFIX.fullmatch, pools[name])):
                raise ConfigError(f"registry: {name}: a pool begins after `,`; expected {ACCEPTS}")
        if not pools:
            raise ConfigError(f"registry: no endpoint is given; expected {ACCEPTS}")
        return cls(pools)

    def subscribe(self, on_change: Callable[[Fleet], None]) -> StaticSubscription:
        """Deliver the fleet before returning; nothing else ever happens."""
        on_change(self.fleet)
        return StaticSubscription()


class StaticSubscription:
    """Nothing is running, so nothing can fail or grow old."""

    error: None = None

    def age(self, now: float) -> float:  # noqa: ARG002
        """Always 0.0."""
        return 0.0

    def close(self) -> None:
        """Do nothing."""


def _spec(name: str, endpoints: Iterable[Endpoint | str]) -> PoolSpec:
    check_pool(name, "registry")
    if isinstance(endpoints, (str, Mapping)) or not isinstance(endpoints, Iterable):
        raise InvalidRecord(f"registry: {name}: is {_kind(endpoints)}; accepted: a list of URLs or Endpoint objects")
    found: dict[str, Endpoint] = {}
    for number, item in enumerate(endpoints, 1):
        key = f"registry: {name}, item {number}"
        endpoint = _endpoint(item, key)
        if endpoint.id in found:
            raise InvalidRecord(f"{key}: repeats id {endpoint.id}")
        found[endpoint.id] = endpoint
    return PoolSpec(name, tuple(found.values()))


def _endpoint(item: object, key: str) -> Endpoint:
    if isinstance(item, Endpoint):
        parse_endpoint(endpoint_record(item), id=item.id, key=key)  # code may not say what a record may not
        return item
    if not isinstance(item, str):
        raise InvalidRecord(f"{key}: is {_kind(item)}; accepted: a URL or an Endpoint object")
    return parse_endpoint({"url": item}, id=default_id(item), key=key)


def _kind(value: object) -> str:
    return "one text" if isinstance(value, str) else f"of type {type(value).__name__}"
