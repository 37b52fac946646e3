"""`gpuroute demo`: the product in a minute. A small fleet of stand-in GPU servers, real traffic, and bad luck.

Six processes answer the calls of a recorded trace, sent through the `openai` SDK. One is killed, one slowed, one
drained, one joins; first under the default policy, then under round robin. Exit code 1 if the caller saw any failure.
"""

from __future__ import annotations

import asyncio
import json
import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gpuroute.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from gpuroute.router import Router

    from .books import Book
    from .figures import Figures
    from .replay import Row
    from .screen import Screen

POLICIES = ("auto", "round_robin")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    text = "watch a small fleet lose, slow down, drain and gain endpoints under real traffic"
    parser = subparsers.add_parser("demo", help=text, description=text)
    parser.add_argument("--registry", help="register the servers in etcd://... or etcds://... (default: in a file)")
    parser.add_argument("--calls", type=int, default=400, metavar="N", help="rows of the trace to replay (1 to 400)")
    parser.add_argument("--json", action="store_true", help="print the figures alone, as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the demo. ConfigError if the `demo` extra is not installed."""
    missing = [name for name in ("openai", "rich") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the demo needs {' and '.join(missing)}: pip install 'gpuroute[demo]'")
    from .books import open_book
    from .figures import as_json, closing_lines
    from .fleet import TIME_SCALE
    from .replay import TRACE, load_rows
    from .screen import Screen

    if not 1 <= args.calls <= 400:
        raise ConfigError(f"--calls {args.calls}: expected 1 to 400")
    screen = Screen(quiet=args.json)
    logging.getLogger("gpuroute").setLevel(logging.CRITICAL)  # what it would say is on the screen already
    book = open_book(args.registry)
    try:
        rows = load_rows(TIME_SCALE)[: args.calls]
        screen.say(
            f"{len(rows)} calls from the {TRACE}.\nGPUs are simulated; time runs {1 / TIME_SCALE:.1f} times faster."
        )
        outcomes = [asyncio.run(_judge(policy, rows, book, screen)) for policy in POLICIES]
    finally:
        book.close()
    figures = [outcome[0] for outcome in outcomes]
    screen.say("\n".join(["", *closing_lines(figures), "", "One decision of the default policy:", outcomes[0][1]]))
    if args.json:
        print(json.dumps(as_json(figures)))
    return 1 if any(one.failed for one in figures) else 0


async def _judge(policy: str, rows: list[Row], book: Book, screen: Screen) -> tuple[Figures, str]:
    """One fresh fleet and router under one policy: its figures, and a decision explained."""
    import openai

    import gpuroute

    from .figures import measure
    from .fleet import DemoFleet
    from .replay import Replay

    screen.say(f"\n{policy}")
    with DemoFleet(book, screen.event) as fleet, gpuroute.Router(settings=book.settings(policy)) as router:
        async with openai.AsyncOpenAI(base_url=f"http://{book.pool}/v1", api_key="-") as client:
            gpuroute.wrap(client, router)
            replay = Replay(client, rows)
            watching = asyncio.create_task(screen.watch(policy, replay, router, fleet))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(replay.run())
                tasks.create_task(fleet.play(rows[-1].at))
                explaining = tasks.create_task(_explain(router, book.pool, rows))
            watching.cancel()
            await asyncio.wait([watching])
        retried = router.snapshot().pools[book.pool].signals["retries"]
    return measure(policy, replay, retried), explaining.result()


async def _explain(router: Router, pool: str, rows: list[Row]) -> str:
    """What the router thinks of a call late in the replay, when the fleet has been through everything."""
    from gpuroute.core.prefix import ladder
    from gpuroute.engines.prompts import read_prompt

    row = rows[len(rows) * 3 // 4]
    await asyncio.sleep(row.at)
    body = {"model": "demo", "messages": [{"role": "user", "content": row.prompt}]}
    prompt = read_prompt("/v1/chat/completions", json.dumps(body).encode())
    assert prompt is not None
    return str(router.explain(pool, ladder=ladder(prompt), tokens=prompt.tokens))
