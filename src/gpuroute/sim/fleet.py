"""The simulated fleet: what `--fleet 40xH100,10xL40S` means, the servers, and what happens to them
(`--event`).

A server answers like a real one: refused when it is dead, silent when it hangs, an error or an overload
answer when told so, else tokens at the pace of its engine. `report` is what an engine or an agent beside it
would say of itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

from gpuroute.core.endpoint import Endpoint
from gpuroute.core.endpoint import Gpu as GpuLabel

from .batcher import Batcher, BatcherSpec
from .gpu import Gpu
from .spec import GpuSpec, gpu_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL: Final = "llama"
EVENT_KINDS: Final = (
    *("die", "restart", "hang", "recover", "throttle", "join", "drain", "errors", "overload", "outage"),
)
_PART = re.compile(
    r"(?P<count>\d+)x(?P<kind>[A-Za-z0-9_-]+)(?:@(?P<speed>[0-9]*\.?[0-9]+))?"
    r"(?:\*(?P<weight>[0-9]*\.?[0-9]+))?"
)
MOST_SERVERS: Final = 100_000
_VALUES: Final = {  # what VALUE is, and its bounds
    "throttle": ("the loss of speed, from 0 to below 1", 0.0, 1 - 1e-9),
    "errors": ("the share of calls, from 0 to 1", 0.0, 1.0),
    "overload": ("the calls above which it answers 503, a whole number", 0.0, 1e9),
    "outage": ("seconds above 0", 1e-9, 1e9),
}


class Load(NamedTuple):
    """What a server says of itself at `at`: counts, prompt tokens still to prefill, share of the KV
    pool in use.
    """

    at: float
    running: int
    waiting: int
    queued_tokens: int
    kv: float
    decoding: int = 0


@dataclass(frozen=True, slots=True)
class Engine:
    """Settings of all engines of a simulated fleet. `h`, `a`, `k` scale those constants of the step model."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    dram_tokens: int = 0
    h: float = 1.0
    a: float = 1.0
    k: float = 1.0

    def build(self, kind: str) -> Gpu | Batcher:
        """An engine on a GPU of that kind; `batcher` is the plain-inference server."""
        if kind == "batcher":
            return Batcher(BatcherSpec())
        return Gpu(self.spec(kind), self.max_num_seqs, self.max_num_batched_tokens, self.dram_tokens)

    def spec(self, kind: str) -> GpuSpec:
        """The step model of that kind with the scaled constants."""
        spec = gpu_spec(kind)
        if (self.h, self.a, self.k) == (1.0, 1.0, 1.0):
            return spec
        return replace(spec, h=spec.h * self.h, a=spec.a * self.a, k=spec.k * self.k)


class Server:
    """One engine of the fleet and its troubles. `errors`: share of calls answered 500; `limit`: jobs
    before 503.
    """

    __slots__ = (
        "alive",
        "errors",
        "gpu",
        "index",
        "joined",
        "kind",
        "limit",
        "live",
        "picked",
        "picked_tokens",
        "scheduled",
        "speed",
        "taken",
        "weight",
    )

    def __init__(self, index: int, kind: str, gpu: Gpu | Batcher, speed: float = 1.0, weight: float = 1.0) -> None:
        self.index = index
        self.kind = kind
        self.gpu = gpu
        self.speed = speed
        self.weight = weight
        self.alive = True
        self.joined = True
        self.errors = 0.0
        self.limit = 0
        self.live = 0  # jobs submitted and not ended
        self.picked = 0  # attempts sent here in the measured window
        self.picked_tokens = 0  # and their prompt tokens
        self.scheduled = -1.0
        self.taken = 0  # prompt tokens on their way here: sent, not arrived
        gpu.slowdown = 1.0 / speed

    def report(self, now: float) -> Load:
        """The truth about its load now."""
        gpu = self.gpu
        decoding = gpu.decoding if isinstance(gpu, Gpu) else 0
        return Load(now, gpu.running, gpu.waiting, gpu.queued_tokens, gpu.kv_usage, decoding)

    def endpoint(self, state: str = "ready", agent: str = "") -> Endpoint:
        """Its registry record."""
        return Endpoint(
            id=f"gpu-{self.index}",
            url=f"http://gpu-{self.index}.sim:8000",
            engine="triton" if self.kind == "batcher" else "vllm",
            model=MODEL,
            gpu=GpuLabel(kind=self.kind),
            weight=self.weight,
            state=state,  # type: ignore[arg-type]
            agent=agent,
        )


def parse_fleet(text: str, engine: Engine) -> list[Server]:
    """Servers of a fleet such as `40xH100*2,10xL40S@0.5` (`@0.5`: at half speed, `*2`: with that weight in the registry).
    ValueError says what is wrong.
    """
    servers: list[Server] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"fleet {part!r}: expected COUNTxKIND, e.g. 40xH100, 2xA100@0.5 or 2xA100*1.7")
        speed = float(match["speed"] or 1)
        if not 0 < speed <= 1:
            raise ValueError(f"fleet {part!r}: the speed after @ must be above 0 and at most 1")
        weight = float(match["weight"] or 1)
        if not 0 < weight <= 1e6:
            raise ValueError(f"fleet {part!r}: the weight after * must be above 0 and at most 1e6")
        if len(servers) + int(match["count"]) > MOST_SERVERS:
            raise ValueError(f"fleet {text!r}: at most {MOST_SERVERS} servers")
        for _ in range(int(match["count"])):
            servers.append(Server(len(servers), match["kind"], engine.build(match["kind"]), speed, weight))
    if not servers:
        raise ValueError(f"fleet {text!r} has no servers")
    return servers


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """Something that happens at `at` (seconds from the start) to some servers; `value` depends on the
    kind.
    """

    at: float
    kind: str
    servers: str = ""
    value: float = 0.0

    def targets(self, count: int, seed: int) -> Sequence[int]:
        """Indices meant by `3`, `3-5` or `10%` (a random choice). ValueError if the fleet has no such servers."""
        text = self.servers
        if text.endswith("%"):
            size = max(1, round(count * float(text[:-1]) / 100))
            return sorted(Random(f"{seed}/{self.at}/{self.kind}").sample(range(count), size))
        low, _, high = text.partition("-")
        meant = range(int(low), int(high or low) + 1)
        if not meant or meant[-1] >= count:
            raise ValueError(f"event {self.kind} of servers {text}: the fleet has 0 to {count - 1}")
        return meant


def parse_event(text: str) -> FleetEvent:
    """`AT:KIND:SERVERS[:VALUE]`, e.g. `300:throttle:5%:0.2`, `300:die:3`, `300:outage::60`.

    `throttle` VALUE is the loss of speed, `errors` the share of calls, `overload` the jobs a server
    holds before it answers 503, `outage` seconds without registry news; `join` servers are absent until
    then.
    """
    parts = text.split(":")
    if len(parts) not in {2, 3, 4} or parts[1] not in EVENT_KINDS:
        raise ValueError(f"event {text!r}: expected AT:KIND:SERVERS[:VALUE], KIND one of {', '.join(EVENT_KINDS)}")
    at, kind, servers, value = (*parts, "", "")[:4]
    if kind == "outage" and servers:
        raise ValueError(f"event {text!r}: an outage is the registry's: expected AT:outage::SECONDS")
    if kind != "outage" and not re.fullmatch(r"[0-9]{1,6}(-[0-9]{1,6})?|(100|[0-9]?[0-9](\.[0-9]+)?)%", servers):
        raise ValueError(f"event {text!r}: servers must look like 3, 3-5 or 10%")
    return FleetEvent(
        _number(text, "AT", at, "seconds from the start", 0.0, 1e9), kind, servers, _value(text, kind, value)
    )


def _value(text: str, kind: str, value: str) -> float:
    if kind not in _VALUES:
        if value:
            raise ValueError(f"event {text!r}: {kind} takes no VALUE")
        return 0.0
    return _number(text, "VALUE", value or ("" if kind == "outage" else "0"), *_VALUES[kind])


def _number(text: str, name: str, value: str, meaning: str, least: float, most: float) -> float:
    try:
        found = float(value)
    except ValueError:
        found = -1.0
    if not least <= found <= most:  # NaN is not
        raise ValueError(f"event {text!r}: {name} must be {meaning}")
    return found
