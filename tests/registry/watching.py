"""What the registry tests share: a subscriber that can be waited on, writing records, and a proxy that goes dark."""

from __future__ import annotations

import contextlib
import json
import re
import selectors
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import pytest
from stopwatch import Stopwatch

from gpuroute.core.wire import encode
from gpuroute.errors import RegistryUnavailable
from gpuroute.registry import first_fleet, snapshot
from gpuroute.registry.etcd_client import EtcdClient
from gpuroute.registry.etcd_config import EtcdConfig
from gpuroute.registry.view import View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gpuroute.core.fleet import Fleet, Registry, Subscription

PATIENCE_S = 60.0
"""How long what must happen may take: the machine may be ten times as busy as it has processors."""


def eventually(condition: Callable[[], Any], what: str = "condition", timeout: float = PATIENCE_S) -> Any:
    """Wait for a true value of `condition` and return it; AssertionError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {timeout} s"
        time.sleep(0.01)


def soon(bound: float, act: Callable[[], Any]) -> Any:
    """What `act` returns once it took less than that many seconds: who was held up once is not each time."""
    for _ in range(6):
        with Stopwatch() as watch:
            found = act()
        if watch.seconds < bound:
            return found
    raise AssertionError(f"it took {watch.seconds:.2f} s, may take {bound}")


def refusal(registry: Registry, pattern: str) -> str:
    """Why there is no view, once that is the reason looked for: a busy machine may need some time to find it."""
    for timeout in (0.5, 2.0, 8.0, 20.0):
        with pytest.raises(RegistryUnavailable) as caught:
            first_fleet(registry, timeout)
        if re.search(pattern, str(caught.value)):
            break
    assert re.search(pattern, str(caught.value))
    return str(caught.value)


def own_threads() -> set[threading.Thread]:
    """The library's own threads in this process, not those of gRPC or of the test."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("gpuroute-")}


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process of this Python that does not outlive the test; its stderr is a pipe."""
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Watcher:
    """A subscription and every fleet it delivered, each with its moment."""

    subscription: Subscription | None = None

    def __init__(self, registry: Registry) -> None:
        self.fleets: list[Fleet] = []
        self.moments: list[float] = []
        self.troubles: list[str] = []  # of each stale fleet: what it may recover from before a test has looked
        self._news = threading.Condition()
        self.subscription = registry.subscribe(self._on_change)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.subscription.close()

    def _on_change(self, fleet: Fleet) -> None:
        with self._news:
            self.fleets.append(fleet)
            self.moments.append(time.monotonic())
            if fleet.stale and self.subscription is not None:
                self.troubles.append(self.subscription.error or "")
            self._news.notify_all()

    @property
    def last(self) -> Fleet | None:
        return self.fleets[-1] if self.fleets else None

    def ids(self, pool: str = "llama") -> list[str]:
        """The endpoints of a pool in the last fleet."""
        return ids(self.last, pool)

    def until(self, condition: Callable[[Fleet], Any], timeout: float = PATIENCE_S) -> Fleet:
        """The first fleet, the last one or a later, that fulfils the condition."""
        with self._news:
            met = self._news.wait_for(lambda: self.last is not None and condition(self.last), timeout)
        assert met, f"not within {timeout} s; error {self.subscription.error!r}; last fleet {self.last}"
        assert self.last is not None
        return self.last

    def until_ids(self, *expected: str, pool: str = "llama", timeout: float = PATIENCE_S) -> Fleet:
        return self.until(lambda fleet: ids(fleet, pool) == sorted(expected), timeout)

    def until_live(self, timeout: float = PATIENCE_S) -> Fleet:
        return self.until(lambda fleet: not fleet.stale, timeout)

    def until_stale(self, timeout: float = PATIENCE_S) -> Fleet:
        return self.until(lambda fleet: fleet.stale, timeout)


def ids(fleet: Fleet | None, pool: str = "llama") -> list[str]:
    """The endpoints of one pool."""
    spec = fleet.pools.get(pool) if fleet is not None else None
    return [endpoint.id for endpoint in spec.endpoints] if spec is not None else []


def quick(url: str, **options: Any) -> EtcdConfig:
    """A configuration with short times, no jitter, and the first member first."""
    quick_options = {"heartbeat": 0.3, "timeout": 1.0, "random": lambda: 0.0}
    return EtcdConfig.from_url(url, **{**quick_options, **options})


def patient(url: str, **options: Any) -> EtcdConfig:
    """No heartbeat ends a watch because the machine is busy, and none comes to help: what is due has to be asked for."""
    return quick(url, **{"heartbeat": 30.0, "timeout": 30.0, **options})


class Writer:
    """Puts endpoints into etcd the way an operator's script would, with no lease, and patiently."""

    def __init__(self, config: EtcdConfig, timeout: float = 15.0) -> None:
        self.client = EtcdClient(replace(config, timeout=timeout))
        self.prefix = config.prefix

    def key(self, ident: str, pool: str = "llama") -> str:
        return f"{self.prefix}/pools/{pool}/endpoints/{ident}"

    def put(self, ident: str, pool: str = "llama", **fields: Any) -> None:
        record = {"url": f"http://{ident}:8000", **fields}
        self.put_raw(self.key(ident, pool), json.dumps(record).encode())

    def put_raw(self, key: str, value: bytes) -> None:
        self._again(lambda: self.client.put(key, value))

    def fill(self, idents: Iterable[str], pool: str = "llama") -> None:
        for ident in idents:
            self.put(ident, pool)

    def delete(self, *idents: str, pool: str = "llama") -> None:
        for ident in idents:
            request = encode((1, self.key(ident, pool)))
            self._again(lambda request=request: self.client._unary("KV/DeleteRange", request))

    def _again(self, write: Callable[[], None]) -> None:
        """etcd may have just come back, or lost its leader."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return write()
            except Exception:
                if time.monotonic() > deadline:
                    raise
                self.client.rotate()
                time.sleep(0.05)


class Proxy:
    """A TCP proxy to one address that can stop forwarding without closing anything: a black hole."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        self._closed = False
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed = True
        self._open.set()
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def hold(self) -> None:
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    def cut(self) -> None:
        """End what is connected; new connections are taken."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.accepted += 1
                try:
                    far = socket.create_connection(self._target)
                except OSError:  # nobody is there
                    near.close()
                    continue
                self._sockets += [near, far]
                threading.Thread(target=self._relay, args=(near, far), daemon=True).start()

    def _relay(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), selectors.DefaultSelector() as ready:
            ready.register(near, selectors.EVENT_READ, far)
            ready.register(far, selectors.EVENT_READ, near)
            while not self._closed:
                for key, _ in ready.select(0.2):
                    self._open.wait()
                    data = key.fileobj.recv(65536)
                    if not data:
                        near.close()
                        far.close()
                        return
                    key.data.sendall(data)


def save_snapshot(path, config, *idents: str, as_of: float | None = None) -> None:
    records = {f"llama/endpoints/{ident}": {"url": f"http://{ident}:8000"} for ident in idents}
    view = View(grace=0.0)
    view.replace(records, 0.0)
    as_of = time.time() - 600 if as_of is None else as_of
    snapshot.save(path, view.pools(0.0), source=config.source, as_of=as_of)
