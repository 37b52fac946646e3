"""Where the fleet is read from: `open_registry` makes the registry that a location names.

Every registry has one method, `subscribe(on_change)`, delivers whole fleets, and starts nothing before it is called.
This module imports none of them until it is asked to open one: only etcd needs grpc.
"""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, TypedDict, Unpack
from urllib.parse import unquote

from gpuroute.errors import ConfigError, RegistryUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuroute.config import Secret, Settings
    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.fleet import Fleet, Registry

__all__ = ["EtcdOptions", "etcd_options", "first_fleet", "open_registry", "static_registry"]

ACCEPTS = (
    "etcd://h1:2379,h2:2379/prefix, etcds://... (TLS), etcd+trtllm://..., file:///fleet.toml, a path that ends in .json "
    "or .toml, POOL=URL,URL;POOL2=URL, or URL,URL for the pool `default`"
)
DEFAULT_GRACE_S = 10.0
_ETCD = ("etcd://", "etcds://", "etcd+", "etcds+")
_ENDPOINT_SCHEMES = frozenset({"http", "https", "grpc", "grpcs"})


class EtcdOptions(TypedDict, total=False):
    """What reaching etcd may need besides its URL; None as if absent. `ca`, `cert` and `key` are PEM files."""

    user: str | None
    password: Secret | str | None
    ca: str | None
    cert: str | None
    key: str | None
    trust_env: bool


def open_registry(
    location: str,
    *,
    snapshot_path: str | None = None,
    empty_grace: float = DEFAULT_GRACE_S,
    **etcd: Unpack[EtcdOptions],
) -> Registry:
    """The registry at `location` (see ACCEPTS); ConfigError if it is malformed. Connects to nothing yet.

    `empty_grace` is how long, in seconds, endpoints stay in view after they vanished implausibly (all of a pool, or
    most). The other keywords matter for etcd alone; `snapshot_path` keeps the last good fleet on disk.
    """
    location = location.strip()
    if location.startswith(_ETCD):
        from gpuroute.registry.etcd import EtcdReader, EtcdRegistry
        from gpuroute.registry.etcd_config import EtcdConfig

        config = EtcdConfig.from_url(location, **etcd)
        kind = EtcdReader if config.dialect else EtcdRegistry
        return kind(config, snapshot_path=snapshot_path, grace=empty_grace)
    if location.startswith("file:") or _is_path(location):
        from gpuroute.registry.file import FILE_GRACE_S, FileRegistry

        return FileRegistry(_path(location), grace=min(FILE_GRACE_S, empty_grace))
    from gpuroute.registry.static import StaticRegistry

    _check_static(location)
    return StaticRegistry.from_text(location)


def static_registry(endpoints: Iterable[Endpoint | str] | Mapping[str, Iterable[Endpoint | str]]) -> Registry:
    """The registry of a fleet given in code: endpoints or URLs by pool, or a list of them for the pool `default`."""
    from gpuroute.registry.static import StaticRegistry

    return StaticRegistry(endpoints)


def etcd_options(settings: Settings) -> EtcdOptions:
    """The part of the settings that is about reaching etcd."""
    return {
        "user": settings.etcd_user,
        "password": settings.etcd_password,
        "ca": settings.etcd_ca,
        "cert": settings.etcd_cert,
        "key": settings.etcd_key,
        "trust_env": settings.trust_env,
    }


def first_fleet(registry: Registry, timeout: float) -> Fleet:
    """The first view that the registry delivers within `timeout` seconds; RegistryUnavailable says why there is none."""
    arrived: queue.SimpleQueue[Fleet] = queue.SimpleQueue()
    subscription = registry.subscribe(arrived.put)
    try:
        return arrived.get(timeout=timeout)
    except queue.Empty:
        reason = subscription.error or "it has not answered"
        raise RegistryUnavailable(f"no view of the fleet after {timeout:g} s: {reason}") from None
    finally:
        subscription.close()


def _is_path(location: str) -> bool:
    return location.endswith((".json", ".toml")) and "://" not in location and "," not in location


def _path(location: str) -> str:
    if not location.startswith("file:"):
        return location
    rest = location.removeprefix("file:")
    path = rest.removeprefix("//localhost") if rest.startswith("//localhost/") else rest.removeprefix("//")
    if not path.startswith("/") or "?" in path or "#" in path:
        raise ConfigError(f"registry {location!r}: expected file:///absolute/path.json or .toml")
    return unquote(path)


def _check_static(text: str) -> None:
    """Refuse what is neither a list of URLs nor a location known here, in words that help."""
    scheme = text.partition("://")[0]
    if "://" not in text and "=" not in text:
        raise ConfigError(f"registry {text!r}: expected {ACCEPTS}")
    if scheme.isalnum() and scheme.lower() not in _ENDPOINT_SCHEMES:
        raise ConfigError(f"registry: unknown scheme {scheme!r}; expected {ACCEPTS}")
