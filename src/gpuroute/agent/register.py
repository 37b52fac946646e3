"""The life of one engine as the registry sees it: warming, ready, warming again after a restart, draining, gone.

`ready` is written only after the engine says so *and* has answered its warm-up. A registration keeps itself alive under a
lease and comes back by itself when etcd does; without a registry the agent answers asks and registers nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from gpuroute.agent.warmup import PASSES, warm_up
from gpuroute.core.endpoint import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.agent.watch import Watch
    from gpuroute.core.endpoint import Endpoint, Gpu

log = logging.getLogger("gpuroute.agent")

POLL_S = 0.2
RETRY_S = 1.0
LEAVE_S = 1.0
"""Routers need a moment to learn of `draining`; calls that they have sent by then are waited for."""


class Registered(Protocol):
    """A record in a registry (`gpuroute.registry.lease.Registration`)."""

    def update(self, endpoint: Endpoint) -> None:
        """Change the record."""

    def close(self) -> None:
        """Remove it. Blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """`passes`, or `command`: the warm-up. `drain_s`: seconds that running requests get to end."""

    passes: int = PASSES
    command: str = ""
    drain_s: float = 60.0


class Life:
    """Takes one engine through its states. Loop thread."""

    def __init__(
        self, watch: Watch, endpoint: Endpoint, register: Callable[[Endpoint], Registered] | None, rules: Rules
    ) -> None:
        self.watch = watch
        self.endpoint = endpoint
        self.endpoint = replace(endpoint, state=State.WARMING, started_at=self._started_at())
        self._rules = rules
        self._record = register(self.endpoint) if register is not None else None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._warm()
            self._now(State.READY)
            restarts = self.watch.health.restarts
            while not self.watch.health.gone and self.watch.health.restarts == restarts:
                self._now(State.DRAINING if self.watch.leaving else State.READY)
                await asyncio.sleep(POLL_S)
            self.watch.warm = False
            self._now(State.WARMING)

    async def _warm(self) -> None:
        while True:
            if not self.watch.health.gone and await self.watch.is_ready():
                problem = await warm_up(self.watch, self._rules.passes, self._rules.command, self.endpoint.headers)
                if not problem:
                    break
                log.warning("%s: not warm yet: %s", self.endpoint.id, problem)
            await asyncio.sleep(RETRY_S if self.watch.looks else POLL_S)
        self.watch.warm = True
        self.watch.settle(time.monotonic())

    def _now(self, state: State) -> None:
        if state is not self.endpoint.state and (state is State.DRAINING or not self.watch.draining):
            log.info("%s: %s", self.endpoint.id, state)
            self._write(replace(self.endpoint, state=state, started_at=self._started_at()))

    def label(self, name: str, text: str) -> None:
        """Set a label of the record, or remove it (""). What has not changed is not written."""
        labels = {known: value for known, value in self.endpoint.labels.items() if known != name}
        labels |= {name: text} if text else {}
        if labels != dict(self.endpoint.labels):
            log.info("%s: label %s is now %r", self.endpoint.id, name, text)
            self._write(replace(self.endpoint, labels=labels))

    def equip(self, gpu: Gpu | None) -> None:
        """The GPUs of this machine are known by now. What the record says of them itself stays."""
        if gpu is not None and not self.endpoint.gpu.kind:
            self._write(replace(self.endpoint, gpu=gpu))
            self.watch.desk.equipped(gpu.kind)

    def _started_at(self) -> float:
        """Since when this engine runs, as far as is known: so who missed its `warming` learns of its cold caches too."""
        return float(self.watch.desk.epoch or self.endpoint.started_at)

    def _write(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        if self._record is not None:
            self._record.update(endpoint)

    async def drain(self) -> bool:
        """Take no more calls, and wait until those that run have ended; False if they had not in time. An engine that
        does not say what runs is given all of that time."""
        self.watch.draining = True
        now = time.monotonic()
        self.watch.settle(now)
        self._now(State.DRAINING)
        looks, leave_at, late_at = self.watch.looks, now + LEAVE_S, now + self._rules.drain_s
        while not (self.watch.idle and self.watch.looks >= looks + 2 and time.monotonic() >= leave_at):
            if time.monotonic() >= late_at:
                if self.watch.counts:
                    return False
                log.warning("%s: it does not count what runs: it had %g s to end", self.endpoint.id, self._rules.drain_s)
                return True
            await asyncio.sleep(POLL_S)
        return True

    async def leave(self) -> None:
        """Remove the record."""
        record, self._record = self._record, None
        if record is not None:
            await asyncio.to_thread(record.close)
