"""Writing to etcd: a key that is there while this process is.

The key lives under a lease that one daemon thread keeps alive. A lease that ended while etcd was away (or while this
process slept) is gone for good, and so are its keys: a fresh one is granted and the key written again, never put with
the dead lease. A key that somebody removed comes back; one that another process took over is left alone.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuroute.core.endpoint import State
from gpuroute.errors import ConfigError
from gpuroute.registry.etcd_client import EtcdClient, EtcdError, retrying
from gpuroute.registry.publish import log
from gpuroute.registry.schema import check_pool, endpoint_record, parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.core.endpoint import Endpoint
    from gpuroute.registry.etcd_config import EtcdConfig

DEFAULT_TTL_S = 10.0
MAX_TTL_S = 86_400


def _silent(text: str) -> None:
    """Reports to nobody."""


class LeasedKey:
    """Keeps `key` at `value` until `close`. Any thread; etcd's troubles are in `error`, never raised.

    `report` gets one line for people at each change of fortune, from the thread that keeps the lease.
    """

    def __init__(
        self,
        config: EtcdConfig,
        key: str,
        value: bytes,
        *,
        ttl: float = DEFAULT_TTL_S,
        report: Callable[[str], None] = _silent,
    ) -> None:
        if not 1 <= ttl <= MAX_TTL_S:
            raise ConfigError(f"ttl={ttl:g}: expected 1 to {MAX_TTL_S} seconds")
        self.key = key
        self.error: str | None = None
        self._client = EtcdClient(config)
        self._timeout = config.timeout
        self._value = value
        self._last: bytes | None = None
        self._written: bytes | None = None
        self._owned = True
        self._ttl = ttl
        self._lease = 0
        self._look_at = 0.0
        self._tell = report
        self._ready = threading.Event()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpuroute-lease", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the key was written for the first time; False after `timeout` seconds."""
        return self._ready.wait(timeout)

    def update(self, value: bytes) -> None:
        """Change the value, soon; returns at once."""
        self._value = value
        self._wake.set()

    def close(self, last: bytes | None = None) -> None:
        """Write `last`, if given, and revoke the lease, so that the key goes at once. Idempotent.

        Blocks for two calls to etcd at most; if they fail the key goes when its lease ends.
        """
        self._last = last
        self._stop.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * self._timeout + 1)

    def _run(self) -> None:
        keeping = retrying(self._stop, self._lost)
        while not self._stop.is_set():
            try:
                keeping(self._keep)
            except EtcdError as error:
                self._lost(error)
            except Exception:
                log.exception("keeping %s failed; it goes on", self.key)
            self._wake.wait(self._ttl / 3)
            self._wake.clear()
        self._leave()

    def _keep(self) -> None:
        """One round: the lease lives, and the key is there with the value wanted."""
        if not self._lease or not self._client.keep_alive(self._lease):
            self._lease = self._client.grant(self._ttl)
            self._look_at = 0.0
        value = self._value
        if not self._ready.is_set():
            self._put(value)  # also over the key of a predecessor that is about to end
        elif value != self._written or time.monotonic() >= self._look_at:
            self._check(value)
        self._note(None if self._owned else f"{self.key} belongs to another process now")

    def _check(self, value: bytes) -> None:
        self._look_at = time.monotonic() + self._ttl
        found = self._client.read(self.key)
        if found is None:
            self._put(value)
            return
        self._owned = found.lease == self._lease
        if self._owned and value != self._written and self._client.put_own(self.key, value, self._lease):
            self._written = value

    def _put(self, value: bytes) -> None:
        self._client.put(self.key, value, self._lease)
        self._written, self._owned = value, True
        self._look_at = time.monotonic() + self._ttl
        self._ready.set()
        self._report(f"registered {self.key} at {self._client.member}, ttl {self._ttl:g} s")

    def _lost(self, error: EtcdError) -> None:
        self._client.rotate()
        self._note(str(error))

    def _note(self, trouble: str | None) -> None:
        before, self.error = self.error, trouble
        if trouble and not before:
            self._report(trouble)
        elif before and not trouble:
            self._report(f"{self.key} is kept again")

    def _report(self, text: str) -> None:
        try:
            self._tell(text)
        except Exception:
            log.exception("a report on %s failed", self.key)

    def _leave(self) -> None:
        try:
            owned = self._owned
            if self._lease and self._last is not None:
                owned = self._client.put_own(self.key, self._last, self._lease)
            if self._lease:
                self._client.revoke(self._lease)
                self._report(f"removed {self.key}" if owned else f"{self.key} is left to the process that has it now")
        except EtcdError as error:
            self._report(f"{self.key} was not removed ({error}); it goes when its lease ends, within {self._ttl:g} s")
        finally:
            self._client.close()


class Registration:
    """One endpoint in the registry for as long as this object is open. Any thread; never blocks but in `close`.

    Raises InvalidRecord at once for an endpoint or pool that readers would refuse.
    """

    def __init__(
        self,
        config: EtcdConfig,
        pool: str,
        endpoint: Endpoint,
        *,
        ttl: float = DEFAULT_TTL_S,
        report: Callable[[str], None] = _silent,
    ) -> None:
        key = f"{config.prefix}/pools/{check_pool(pool, pool)}/endpoints/{endpoint.id}"
        self.endpoint = endpoint
        self._key = LeasedKey(config, key, _value(endpoint), ttl=ttl, report=report)

    @property
    def error(self) -> str | None:
        """What keeps the record from being kept, or None."""
        return self._key.error

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the endpoint is in the registry; False after `timeout` seconds."""
        return self._key.wait(timeout)

    def update(self, endpoint: Endpoint) -> None:
        """Change the record, such as its state; the id must stay."""
        if endpoint.id != self.endpoint.id:
            raise ValueError(f"id {endpoint.id!r} is not that of this registration, {self.endpoint.id!r}")
        self._key.update(_value(endpoint))
        self.endpoint = endpoint

    def close(self) -> None:
        """Remove the endpoint. It is marked draining first: routers take that as leave, not as a registry fault."""
        self._key.close(_value(replace(self.endpoint, state=State.DRAINING)))


def _value(endpoint: Endpoint) -> bytes:
    record = endpoint_record(endpoint)
    parse_endpoint(record, id=endpoint.id, key=endpoint.id)
    return json.dumps(record).encode()
