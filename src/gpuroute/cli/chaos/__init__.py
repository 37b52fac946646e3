"""`gpuroute chaos`: breaks a fleet on purpose and counts what callers notice.

Stand-in GPU servers and an etcd of three members on this machine, callers through httpx2 and the OpenAI SDK, and a seeded
script of everything that happens to a fleet: kill -9, SIGSTOP, slow, 500, 429, resets, cut streams, hung engines, black
holes, etcd without leader or quorum, compaction, flapping leases, joins, drains, and at the end five seconds in which
nobody is there. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
from typing import TYPE_CHECKING

from gpuroute.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from .verdict import Verdict

KEYS = (
    "calls", "caller_failures", "interrupted", "doubled_after_first_byte", "lost_events", "duplicated_events",
    "residual_in_flight", "beyond_deadline", "retries", "hedges", "recovery_s",
)  # fmt: skip
SOAK_PROMPTS = 500
"""Different prompts of a soak: what a router remembers of prompts is bounded (100,000 places), but not full so soon."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    text = "break a fleet on purpose and count what callers notice"
    parser = subparsers.add_parser("chaos", help=text, description=text)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long faults happen (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="of the script and of the callers (default: %(default)s)")
    parser.add_argument("--servers", type=int, default=16, metavar="N", help="stand-in GPUs (default: %(default)s)")
    parser.add_argument("--callers", type=int, default=64, metavar="N", help="calls at a time (default: %(default)s)")
    parser.add_argument("--think", type=float, default=1.0, metavar="S", help="mean pause of a caller between calls")
    parser.add_argument("--policy", default="auto", help="policy of the router (default: %(default)s)")
    parser.add_argument("--continuation", action="store_true", help="continue cut streams on another endpoint")
    parser.add_argument("--hedge", action="store_true", help="overtake late first bytes")
    parser.add_argument("--no-etcd", action="store_true", help="a file as registry, even if there is an etcd program")
    parser.add_argument(
        "--soak", action="store_true", help="judge this process's memory and open files too (bar: 2 %%; 10 minutes tell)"
    )
    parser.add_argument("--only", action="append", metavar="FAULT", help="only these faults (repeatable)")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object, the rest on stderr")


def run(args: argparse.Namespace) -> int:
    """Run it. ConfigError for arguments that make no fleet."""
    from .script import FAULTS

    unknown = set(args.only or ()) - set(FAULTS)
    if args.minutes <= 0 or args.servers < 4 or args.callers < 1 or unknown:
        known = ", ".join(FAULTS)
        raise ConfigError(f"chaos: expected --minutes above 0, 4 servers or more, a caller, and faults of: {known}")
    logging.getLogger("gpuroute").setLevel(logging.CRITICAL)  # it would tell every fault, and they are ours
    out = sys.stderr if args.json else sys.stdout
    verdict = asyncio.run(_run(args, lambda text: print(text, file=out, flush=True)))
    for line in verdict.lines():
        print(line, file=out)
    if args.json:
        counts = verdict.counts()
        print(json.dumps({key: counts[key] for key in KEYS} | (verdict.kept() if args.soak else {})))
    return 1 if verdict.missed() else 0


async def _run(args: argparse.Namespace, say: object) -> Verdict:
    from contextlib import AsyncExitStack

    from .callers import Crowd
    from .fleet import ChaosFleet
    from .script import Script
    from .sends import Followed
    from .verdict import STEADY, Verdict

    assert callable(say)
    async with AsyncExitStack() as stack:
        fleet = ChaosFleet(args.servers, etcd=not args.no_etcd, say=say)
        stack.push_async_callback(fleet.close)
        await fleet.start()
        settings = fleet.settings(args.policy, continuation=args.continuation, hedge=args.hedge)
        router = stack.enter_context(Followed(settings=settings, random=random.Random(args.seed).random))
        prompts = SOAK_PROMPTS if args.soak else 0
        chance = random.Random(args.seed)
        crowd = Crowd(router, fleet.pool, args.callers, chance, think_s=args.think, prompts=prompts)
        stack.callback(crowd.close)
        script = Script(fleet, router, random.Random(args.seed), args.minutes * 60, args.only, say)
        await crowd.start(stack)
        await script.play()
        if script.outage is not None:
            await crowd.more(2 * STEADY, within_s=20.0)
        await crowd.stop()
        await fleet.harvest_all()
        return Verdict(crowd, script, fleet, router, continuation=args.continuation, soak=args.soak)
