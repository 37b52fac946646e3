"""`gpuroute register`: one endpoint in the registry for as long as this command runs.

For engines without an agent: it states that the endpoint is there, not that it is well. Progress goes to stderr, one
line for each change of fortune; SIGTERM and SIGINT remove the endpoint and end with exit code 0.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from gpuroute.cli import duration
from gpuroute.cli.values import over, read_record
from gpuroute.config import Settings
from gpuroute.errors import ConfigError
from gpuroute.registry import etcd_options
from gpuroute.registry.schema import default_id, parse_endpoint
from gpuroute.registry.unread import unwritten

if TYPE_CHECKING:
    import argparse

    from gpuroute.core.endpoint import Endpoint

# Options that are fields of the record as they are; the others need a word of their own in `_record`.
_TEXTS = ("protocol", "engine", "model", "version", "authority", "zone", "region", "state", "agent")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("register", help="keep an endpoint in the registry until SIGTERM")
    parser.add_argument("url", help="where the engine listens, e.g. http://10.0.0.7:8000")
    parser.add_argument("--registry", help="etcd://h1:2379,h2:2379/prefix or etcds://... (default: GPUROUTE_REGISTRY)")
    parser.add_argument("--pool", default="default", help="pool to join (default: %(default)s)")
    parser.add_argument("--id", help="id within the pool (default: host:port of the URL)")
    parser.add_argument(
        "--ttl",
        type=duration,
        default="10s",
        metavar="TIME",
        help="how long the record outlives this process (default: %(default)s)",
    )
    parser.add_argument("--record", help="JSON file with further fields, such as headers or tls; options win")
    parser.add_argument("--weight", type=float, help="share of calls relative to the others, 0 drains")
    parser.add_argument("--gpu", metavar="KIND", help="GPU kind, e.g. H100")
    parser.add_argument("--gpu-count", type=int, metavar="N", help="GPUs behind the endpoint")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of one GPU")
    parser.add_argument("--max-in-flight", type=int, metavar="N", help="most calls at a time, of each client")
    parser.add_argument("--adapter", action="append", metavar="NAME", help="LoRA adapter served (repeatable)")
    parser.add_argument("--label", action="append", metavar="NAME=VALUE", help="label (repeatable)")
    for name in _TEXTS:
        parser.add_argument(f"--{name}", help=argparse_help(name))


def argparse_help(name: str) -> str:
    """The help of an option that is a field of the record."""
    return {"state": "ready, warming, draining or cold", "protocol": "http or grpc"}.get(name, f"the record's `{name}`")


def run(args: argparse.Namespace) -> int:
    """Register until a signal arrives. ConfigError or InvalidRecord, at once, for what can never work."""
    from gpuroute.registry.etcd_config import EtcdConfig
    from gpuroute.registry.lease import Registration

    settings = Settings.from_env(registry=args.registry)
    if not (settings.registry or "").startswith(("etcd://", "etcds://")):
        raise ConfigError("register writes to etcd: expected --registry (or GPUROUTE_REGISTRY) to be etcd:// or etcds://")
    endpoint = _endpoint(args)
    config = EtcdConfig.from_url(settings.registry or "", **etcd_options(settings))
    # Blocked and waited for, not handled: a handler's signal is lost when it arrives just before the wait begins.
    ends = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        registration = Registration(config, args.pool, endpoint, ttl=args.ttl, report=_say)
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # who calls `main` may have children, which would inherit it
        raise
    signal.sigwait(ends)
    registration.close()
    return 0


def _endpoint(args: argparse.Namespace) -> Endpoint:
    record = read_record(args.record) if args.record else {}
    ident = args.id or (default_id(args.url) if (given := record.pop("id", None)) is None else _ident(given))
    endpoint = parse_endpoint(_record(args, record), id=ident, key=f"{args.pool}/{ident}")
    for text in unwritten(record):
        _say(f"--record {args.record!r}: {text}")
    return endpoint


def _ident(given: object) -> str:
    return str(given) if type(given) in {str, int} else ""


def _record(args: argparse.Namespace, record: dict[str, Any]) -> dict[str, Any]:
    gpu = {"kind": args.gpu, "count": args.gpu_count, "memory_gib": args.gpu_memory}
    given = {name: getattr(args, name) for name in ("url", "weight", *_TEXTS)}
    given |= {"adapters": args.adapter, "started_at": record.get("started_at", round(time.time(), 3))}
    given |= {"gpu": over(record.get("gpu"), _given(gpu))}
    given |= {"labels": over(record.get("labels"), _labels(args.label or []))}
    given |= {"capacity": over(record.get("capacity"), _given({"max_in_flight": args.max_in_flight}))}
    return {**record, **_given(given)}


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _labels(texts: list[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise ConfigError(f"--label {text!r}: expected NAME=VALUE")
    return dict(text.split("=", 1) for text in texts)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
