"""The process that `GpuServer.spawn` starts: `python -m gpuroute.testing '{"gpu": "H100"}'`.

Options are those of `ServerOptions`, as one JSON object. A second argument is the process to die with, told by that
process: it may be dead before we can ask for our parent.
Prints one JSON line when it listens, then one for each order read from standard input, whose end ends the process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from typing import Any

from .host import Host
from .options import ServerOptions

_PARENT_CHECK_S = 0.5


async def serve(options: ServerOptions, parent: int) -> None:
    """Run until SIGTERM has drained it or the parent is gone."""
    loop = asyncio.get_running_loop()
    try:
        host = Host(options, die=_die)
        await host.listen()
    except OSError as error:  # the port is taken, a certificate cannot be read
        _say({"error": str(error)})
        os._exit(1)
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, _drain, host, stop)
    _say({"url": host.url, "port": host.port, "pid": os.getpid()})
    orders = asyncio.create_task(_obey(host))
    watch = asyncio.create_task(_watch_parent(parent))
    await stop.wait()
    while host.app.live:  # noqa: ASYNC110  (the end of a process need not be prompt)
        await asyncio.sleep(0.01)
    host.close()
    orders.cancel()
    watch.cancel()


async def _obey(host: Host) -> None:
    """Orders from the parent, one line each."""
    reader = asyncio.StreamReader(limit=1 << 26)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            _say({"result": await host.order(json.loads(line))})
        except (TypeError, ValueError) as error:
            _say({"error": str(error)})
    os._exit(0)


async def _watch_parent(parent: int) -> None:
    """A forked sibling may hold our pipe open after the parent died; its id changes all the same."""
    while os.getppid() == parent:  # noqa: ASYNC110  (nobody signals this)
        await asyncio.sleep(_PARENT_CHECK_S)
    os._exit(0)


def _drain(host: Host, stop: asyncio.Event) -> None:
    host.app.draining = True
    stop.set()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _say(message: dict[str, Any]) -> None:
    """Standard output may be a full pipe only if nobody reads answers, so a plain write does."""
    os.write(1, json.dumps(message).encode() + b"\n")


def main() -> None:
    """Entry point."""
    text = "A stand-in GPU server. Ends with its standard input, or with its parent."
    parser = argparse.ArgumentParser(prog="python -m gpuroute.testing", description=text)
    parser.add_argument("options", type=_options, help='ServerOptions as JSON, such as \'{"gpu": "H100", "port": 8000}\'')
    parser.add_argument("parent", type=int, nargs="?", default=os.getppid(), help="process to end with")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end is ours
    asyncio.run(serve(args.options, args.parent))


def _options(text: str) -> ServerOptions:
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError("not a JSON object")
        return ServerOptions.of(given)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    main()
