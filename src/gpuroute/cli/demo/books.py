"""Where the demo writes its fleet: a file of its own, or etcd. The router reads it back as it reads any registry."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpuroute.config import Settings
from gpuroute.errors import ConfigError, RegistryUnavailable
from gpuroute.registry.schema import endpoint_record

if TYPE_CHECKING:
    from gpuroute.core.endpoint import Endpoint
    from gpuroute.registry.lease import Registration

_ETCD_WAIT_S = 5.0


class Book(Protocol):
    """A registry that is written to, from any thread. Methods block for a moment; call them off the loop."""

    pool: str

    def settings(self, policy: str) -> Settings:
        """The settings of a router that reads this book."""

    def put(self, endpoint: Endpoint) -> None:
        """Add an endpoint or change its record."""

    def remove(self, ident: str) -> None:
        """Remove an endpoint."""

    def close(self) -> None:
        """Remove what is left."""


def open_book(location: str | None) -> Book:
    """The book at `location`, which must be etcd; None = a temporary file. Raises ConfigError."""
    if location is None:
        return FileBook()
    if not location.startswith(("etcd://", "etcds://")):
        raise ConfigError(
            f"--registry {location!r}: the demo writes to etcd://... or etcds://..., or without it to a file"
        )
    return EtcdBook(location)


class FileBook:
    """`fleet.json` in a temporary directory, replaced atomically."""

    pool = "demo"

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="gpuroute-demo-")
        self._path = Path(self._directory.name) / "fleet.json"
        self._records: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()  # two events at once would rename each other's fresh file away

    def settings(self, policy: str) -> Settings:
        """Defaults but for the policy: the environment of whoever runs the demo must not change what it shows."""
        return Settings.from_env({}, registry=self._path.as_uri(), policy=policy)

    def put(self, endpoint: Endpoint) -> None:
        with self._lock:
            self._records[endpoint.id] = {"id": endpoint.id, **endpoint_record(endpoint)}
            self._write()

    def remove(self, ident: str) -> None:
        with self._lock:
            self._records.pop(ident, None)
            self._write()

    def close(self) -> None:
        self._directory.cleanup()

    def _write(self) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps({"pools": {self.pool: {"endpoints": [*self._records.values()]}}}, indent=1))
        fresh.replace(self._path)


class EtcdBook:
    """Records under leases, in a pool of this process's own, so that no one else's is touched."""

    def __init__(self, location: str) -> None:
        from gpuroute.registry import etcd_options
        from gpuroute.registry.etcd_config import EtcdConfig

        self.pool = f"demo-{os.getpid()}"
        self._location = location
        self._config = EtcdConfig.from_url(location, **etcd_options(self.settings("auto")))
        self._open: dict[str, Registration] = {}

    def settings(self, policy: str) -> Settings:
        """The environment counts: it may hold the credentials for etcd."""
        return Settings.from_env(registry=self._location, policy=policy)

    def put(self, endpoint: Endpoint) -> None:
        from gpuroute.registry.lease import Registration

        if endpoint.id in self._open:
            self._open[endpoint.id].update(endpoint)
            return
        self._open[endpoint.id] = registration = Registration(self._config, self.pool, endpoint)
        if not registration.wait(_ETCD_WAIT_S):
            raise RegistryUnavailable(f"{self._location} took no record within {_ETCD_WAIT_S:g} s: {registration.error}")

    def remove(self, ident: str) -> None:
        registration = self._open.pop(ident, None)
        if registration is not None:
            registration.close()

    def close(self) -> None:
        for ident in list(self._open):
            self.remove(ident)
