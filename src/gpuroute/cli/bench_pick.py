"""`gpuroute bench pick`: pick + acquire + finish in the core alone, without a socket.

On a shared machine a block of one thing after a block of another compares two moments, not two things. So sizes and the
reference take turns in short rounds, in random order, and medians of CPU time are reported. `two_random_ns` (two calls
of `random.random()` in the same loop) says how fast the machine was; judge the ratio.
"""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from typing import TYPE_CHECKING

from gpuroute.core.candidates import Ask
from gpuroute.core.endpoint import Endpoint
from gpuroute.core.fleet import PoolSpec
from gpuroute.core.outcome import Outcome
from gpuroute.core.policies import POLICIES
from gpuroute.core.pool import Pool, PoolRules

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

SIZES = (10, 100, 1_000, 10_000)
ROUNDS = 60
PER_ROUND = 250
PATIENCE_S = 5.0
PROMPTS = 4_096  # far more sessions and prefixes than a round touches, so their endpoints are not in cache


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = kinds.add_parser("pick", help="pick + acquire + finish, by policy and fleet size")
    parser.add_argument("--policy", action="append", choices=sorted(POLICIES), help="only this one (may be repeated)")
    parser.add_argument("--json", action="store_true", help="print JSON alone")


def run(args: argparse.Namespace) -> int:
    """Time the policies and print them."""
    references: list[float] = []
    policies = {policy: time_policy(policy, references) for policy in args.policy or POLICIES}
    reference = statistics.median(references)
    if args.json:
        print(json.dumps({"two_random_ns": round(reference, 1), "policies": policies}))
        return 0
    print(f"pick + acquire + finish, ns (two random.random() calls: {reference:.0f} ns)")
    print(f"{'policy':<16}" + "".join(f"{size:>10,}" for size in SIZES) + "   worst, in pairs of random()")
    for policy, row in policies.items():
        print(f"{policy:<16}" + "".join(f"{row[str(size)]:>10,.0f}" for size in SIZES), end="")
        print(f"{max(row.values()) / reference:>10.0f}x")
    return 0


def time_policy(policy: str, references: list[float]) -> dict[str, float]:
    """Median ns of one pick + acquire + finish per fleet size; adds the reference's rounds to `references`."""
    pools = {str(size): make_pool(policy, size) for size in SIZES}
    rounds: dict[str, list[float]] = {name: [] for name in pools}
    names = [*pools, ""]
    enough = time.monotonic() + PATIENCE_S
    for done in range(ROUNDS):
        if done >= 5 and time.monotonic() > enough:  # a slow policy shows that in a few rounds too
            break
        random.shuffle(names)
        for name in names:
            timed = time_picks(pools[name]) if name else time_two_random(random.random)
            (rounds[name] if name else references).append(timed)
    return {name: round(statistics.median(times), 1) for name, times in rounds.items()}


def make_pool(policy: str, size: int) -> Pool:
    """A pool as a router makes it."""
    endpoints = tuple(Endpoint(f"gpu-{n}", f"http://gpu-{n}:8000") for n in range(size))
    rules = PoolRules(policy=policy)
    return Pool(PoolSpec("bench", endpoints), rules, random=random.random, make_lock=threading.Lock)


def time_picks(pool: Pool) -> float:
    """Mean ns of one pick + acquire + finish in one short round; the asks are fresh, as a call's own is."""
    acquire, success, now = pool.acquire, Outcome.SUCCESS, 1.0
    asks = [make_ask(pool, random.randrange(PROMPTS)) for _ in range(PER_ROUND)]
    started = time.thread_time_ns()
    for ask in asks:
        attempt = acquire(ask, now)
        assert attempt is not None
        attempt.finish(success, now)
    return (time.thread_time_ns() - started) / PER_ROUND


def make_ask(pool: Pool, prompt: int) -> Ask:
    """What a call over this pool knows: a session key, the prefix ladder of a prompt, or nothing."""
    mixed = prompt * 0x9E3779B97F4A7C15 & (2**64 - 1)
    if pool.wants_ladder:
        return Ask(None, (mixed, mixed ^ 0x5555, mixed ^ 0xAAAA), 1_000)
    return Ask(mixed if pool.rules.policy == "session" else None)


def time_two_random(draw_one: Callable[[], float]) -> float:
    """Mean ns of two `random.random()` calls in the same kind of round."""
    some = [None] * PER_ROUND
    started = time.thread_time_ns()
    for _ in some:
        draw_one()
        draw_one()
    return (time.thread_time_ns() - started) / PER_ROUND
