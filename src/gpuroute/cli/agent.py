"""`gpuroute agent`: stands beside an engine, registers it when it really serves, and answers for it.

Prints one JSON line when it listens: {"agent": "udp://...", "status": "http://..."}. SIGTERM drains: no new calls, those
that run may end, the record is removed; exit code 0, or 1 if calls were still running when the time was over.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuroute.agent import gpus
from gpuroute.agent.health import HUNG_AFTER_S
from gpuroute.agent.register import Rules
from gpuroute.agent.service import Agent, Engine, Options
from gpuroute.agent.warmup import PASSES
from gpuroute.cli import duration
from gpuroute.config import Settings
from gpuroute.core.endpoint import Gpu
from gpuroute.engines.catalog import ENGINES, engine_of
from gpuroute.errors import ConfigError
from gpuroute.registry import etcd_options
from gpuroute.registry.schema import check_pool, default_id, parse_endpoint

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from gpuroute.agent.grpc_server import Listening
    from gpuroute.agent.register import Registered
    from gpuroute.core.endpoint import Endpoint

_TEXTS = ("model", "version", "zone", "region")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("agent", help="report for the engine on this machine")
    add = parser.add_argument
    add(
        "--url",
        action="append",
        metavar="URL",
        help="where the engine listens for us (default: http://127.0.0.1:8000); repeat for several engines",
    )
    add("--advertise", action="append", metavar="URL", help="where clients reach it (default: the same), in that order")
    add("--engine", default="auto", help="vllm, sglang, llamacpp, ... (default: found out)")
    add("--pool", default="default", help="pool to join (default: %(default)s)")
    add("--id", action="append", help="id within the pool (default: host:port of the URL), in that order")
    add("--registry", help="etcd://h1:2379/prefix to register in (default: GPUROUTE_REGISTRY; none: answer asks only)")
    add(
        "--ttl",
        type=duration,
        default="10s",
        metavar="TIME",
        help="how long the record outlives this process (default: %(default)s)",
    )
    add("--record", help="JSON file with further fields of the record, such as headers or labels")
    for name in _TEXTS:
        add(f"--{name}", help=f"the record's `{name}`")
    add("--gpu", metavar="KIND", help="GPU kind, e.g. H100 (default: asked of NVML, if it is installed)")
    add("--listen", default="127.0.0.1:9401", metavar="HOST:PORT", help="UDP address for asks (default: %(default)s)")
    add("--grpc-listen", metavar="HOST:PORT", help="also gRPC, which is then registered; TLS by GPUROUTE_AGENT_CERT")
    add("--agent-host", default="", metavar="HOST[:PORT]", help="where clients reach that address (default: the same)")
    add("--insecure", action="store_true", help="answer other hosts without a key (GPUROUTE_AGENT_KEY)")
    add("--max-rate", type=float, default=50_000, help="messages per second taken from one host (default: %(default)s)")
    add(
        "--status", default="127.0.0.1:9402", metavar="HOST:PORT", help="/healthz, /metrics, /load (default: %(default)s)"
    )
    add("--warmup", type=int, default=PASSES, metavar="N", help="requests before it is ready (default: %(default)s)")
    add("--warmup-command", default="", metavar="CMD", help="run this instead; ENGINE_URL is set, exit code 0 is warm")
    add("--drain", type=duration, default=60.0, metavar="TIME", help="longest wait for running calls (default: 60s)")
    add(
        "--hung-after",
        type=duration,
        default=HUNG_AFTER_S,
        metavar="TIME",
        help="work that stands still this long is hung (default: 10s)",
    )
    add("--kv-tokens", type=int, default=0, metavar="N", help="size of the KV cache, if the engine does not say")
    add("--dram-tokens", type=int, default=0, metavar="N", help="tokens of a second cache tier in main memory")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. ConfigError or InvalidRecord, at once, for what can never work."""
    settings = Settings.from_env(registry=args.registry)
    logging.basicConfig(level=(settings.log_level or "info").upper(), format="%(levelname)s %(name)s: %(message)s")
    engines = list(_engines(args))
    keys = [key.reveal().encode() for key in (settings.agent_key, settings.agent_key_next) if key]
    options = Options(
        engines=engines,
        engine=_engine(args.engine),
        model=args.model or "",
        keys=keys,
        insecure=args.insecure,
        listen=_address(args.listen, "--listen"),
        status=_address(args.status, "--status"),
        grpc=_listening(args, settings),
        agent_host=args.agent_host,
        rate=args.max_rate,
        rules=Rules(passes=args.warmup, command=args.warmup_command, drain_s=args.drain),
        hung_after=args.hung_after,
        kv_tokens=args.kv_tokens,
        dram_tokens=args.dram_tokens,
    )
    register = _registrar(settings, args)
    if register is None:
        logging.getLogger("gpuroute.agent").info("no etcd is named: asks are answered, nothing is registered")
    return 0 if asyncio.run(_serve(options, register)) else 1


async def _serve(options: Options, register: Callable[[Endpoint], Registered] | None) -> bool:
    try:
        return await Agent(options, register, _say).run()
    except OSError as error:
        raise ConfigError(f"agent cannot listen on {options.listen} or {options.status}: {error.strerror}") from None


def _engine(name: str) -> str:
    """A word that is not known would be taken for the generic engine, and its own counters never read."""
    if name != "auto" and engine_of(name).name == "openai" and name.strip().lower() != "openai":
        known = ", ".join(engine.name for engine in ENGINES)
        raise ConfigError(f"--engine={name!r}: expected auto or one of {known} (openai: any other with its interface)")
    return name


def _say(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


def _registrar(settings: Settings, args: argparse.Namespace) -> Callable[[Endpoint], Registered] | None:
    location = settings.registry or ""
    if not location.startswith(("etcd://", "etcds://")):
        if args.registry:
            raise ConfigError("agent registers in etcd: expected --registry to be etcd:// or etcds://")
        return None
    from gpuroute.registry.etcd_config import EtcdConfig
    from gpuroute.registry.lease import Registration

    config = EtcdConfig.from_url(location, **etcd_options(settings))
    report = partial(print, file=sys.stderr, flush=True)
    return lambda endpoint: Registration(config, args.pool, endpoint, ttl=args.ttl, report=report)


def _engines(args: argparse.Namespace) -> list[Engine]:
    urls = args.url or ["http://127.0.0.1:8000"]
    advertised, idents = args.advertise or urls, args.id or [default_id(url) for url in args.advertise or urls]
    if not len(urls) == len(advertised) == len(idents):
        raise ConfigError("agent: --advertise and --id are given as often as --url, or not at all")
    check_pool(args.pool, "--pool")
    record = _read(args.record) if args.record else {}
    record |= {name: value for name in _TEXTS if (value := getattr(args, name)) is not None}
    gpu = Gpu(args.gpu) if args.gpu else gpus.found()
    throttled = ",".join(gpus.throttled())
    made = []
    for url, public, ident in zip(urls, advertised, idents, strict=True):
        endpoint = parse_endpoint({**record, "url": public}, id=ident, key=f"{args.pool}/{ident}")
        if gpu is not None and not endpoint.gpu.kind:
            endpoint = replace(endpoint, gpu=gpu)
        if throttled:
            endpoint = replace(endpoint, labels={**endpoint.labels, "throttled": throttled})
        made.append(Engine(url=url, endpoint=endpoint))
    return made


def _listening(args: argparse.Namespace, settings: Settings) -> Listening | None:
    if not args.grpc_listen:
        return None
    from gpuroute.agent.grpc_server import Listening

    host, port = _address(args.grpc_listen, "--grpc-listen")
    ca, cert, key = settings.agent_ca or "", settings.agent_cert or "", settings.agent_cert_key or ""
    return Listening(host=host, port=port, cert=cert, key=key, ca=ca)


def _read(path: str) -> dict[str, Any]:
    try:
        record = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--record {path!r}: {getattr(error, 'strerror', None) or 'not JSON'}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"--record {path!r}: expected a JSON object")
    return record


def _address(text: str, option: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(f"{option}={text!r}: expected HOST:PORT")
    return host.strip("[]"), int(port)
