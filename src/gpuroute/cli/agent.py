"""`gpuroute agent`: stands beside an engine, registers it when it really serves, and answers for it.

Prints one JSON line when it listens: {"agent": "udp://...", "status": "http://..."}, and "digest" if it collects the
whole fleet's; with --digest alone it does only that. SIGTERM drains: no new calls, those
that run may end, the record is removed; exit code 0, or 1 if calls were still running when the time was over.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import secrets
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gpuroute.agent import gpus
from gpuroute.agent.kv_feed import Source
from gpuroute.agent.register import Rules
from gpuroute.agent.server import netloc
from gpuroute.agent.service import Agent, Engine, Options
from gpuroute.cli.agent_options import TEXTS, address, declare, reachable, zeromq
from gpuroute.cli.agent_options import url as checked_url
from gpuroute.cli.values import over, read_record
from gpuroute.config import Settings
from gpuroute.engines.catalog import ENGINES, engine_of
from gpuroute.errors import ConfigError
from gpuroute.registry import etcd_options, open_registry
from gpuroute.registry.schema import check_pool, default_id, parse_endpoint
from gpuroute.registry.unread import unwritten

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Callable, Sequence

    from gpuroute.agent.digest_server import DigestServer
    from gpuroute.agent.grpc_server import Listening
    from gpuroute.agent.register import Registered
    from gpuroute.core.endpoint import Endpoint


class _Digest(NamedTuple):
    """A digest that is not served yet, and where it will be."""

    server: DigestServer
    listen: tuple[str, int]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    declare(subparsers.add_parser("agent", help="report for the engine on this machine"))


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. ConfigError or InvalidRecord, at once, for what can never work."""
    settings = Settings.from_env(registry=args.registry)
    logging.basicConfig(level=(settings.log_level or "info").upper(), format="%(levelname)s %(name)s: %(message)s")
    keys = [key.reveal().encode() for key in (settings.agent_key, settings.agent_key_next) if key]
    digest = _digest(args, settings, keys) if args.digest else None
    if digest is not None and not args.url:
        return asyncio.run(_collect(digest))
    seen = gpus.Eyes(gpus.LIMIT_S)
    eyes = seen if seen.wait() else None
    engines = list(_engines(args, eyes))
    options = Options(
        engines=engines,
        engine=_engine(args.engine),
        model=args.model or "",
        keys=keys,
        insecure=args.insecure,
        listen=address(args.listen, "--listen"),
        status=address(args.status, "--status"),
        grpc=_listening(args, settings),
        agent_host=reachable(args.agent_host),
        rate=args.max_rate,
        rules=Rules(passes=args.warmup, command=args.warmup_command, drain_s=args.drain),
        hung_after=args.hung_after,
        kv_tokens=args.kv_tokens,
        dram_tokens=args.dram_tokens,
        eyes=eyes,
    )
    register = _registrar(settings, args)
    if register is None:
        logging.getLogger("gpuroute.agent").info("no etcd is named: asks are answered, nothing is registered")
    gc.freeze()  # what is loaded by now stays: to look through it again would hold up answers for 3 ms
    return 0 if asyncio.run(_serve(options, register, digest)) else 1


async def _serve(
    options: Options, register: Callable[[Endpoint], Registered] | None, digest: _Digest | None = None
) -> bool:
    async with _served(digest) as more:
        try:
            return await Agent(options, register, lambda line: _say({**line, **more})).run()
        except OSError as error:
            places = {"--listen": options.listen, "--status": options.status}
            places |= {"--grpc-listen": (options.grpc.host, options.grpc.port)} if options.grpc else {}
            where = " or ".join(f"{option}={netloc(host, port)}" for option, (host, port) in places.items())
            raise ConfigError(f"agent cannot listen on {where}: {error.strerror}") from None


async def _collect(digest: _Digest) -> int:
    """Collect and serve the digest alone, until a signal."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with _served(digest) as line:
        _say(line)
        await stop.wait()
    return 0


@asynccontextmanager
async def _served(digest: _Digest | None) -> AsyncIterator[dict[str, object]]:
    """Serve a digest meanwhile; what to say of it."""
    if digest is None:
        yield {}
        return
    try:
        url = await digest.server.start(*digest.listen)
    except OSError as error:
        raise ConfigError(f"--digest cannot be served on {netloc(*digest.listen)}: {error.strerror or error}") from None
    try:
        yield {"digest": url}
    finally:
        await digest.server.close()


def _digest(args: argparse.Namespace, settings: Settings, keys: Sequence[bytes]) -> _Digest:
    """The collector of the fleet in the registry. Raises ConfigError without one."""
    from gpuroute.agent.collect import Collector
    from gpuroute.agent.digest import Digest
    from gpuroute.agent.digest_server import DigestServer

    listen = address(args.digest, "--digest")
    if not settings.registry:
        raise ConfigError("--digest collects from the agents of a registry: expected --registry or GPUROUTE_REGISTRY")
    registry = open_registry(settings.registry, **etcd_options(settings))
    files = settings.agent_ca, settings.agent_cert, settings.agent_cert_key
    collector = Collector(Digest(secrets.token_hex(4)), keys[0] if keys else b"", files)
    pair = (settings.agent_cert or "", settings.agent_cert_key or "") if settings.agent_cert else None
    return _Digest(DigestServer(collector, registry, keys, insecure=args.insecure, pair=pair), listen)


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


def _engines(args: argparse.Namespace, eyes: gpus.Eyes | None = None) -> list[Engine]:
    urls = [checked_url(url) for url in args.url or ["http://127.0.0.1:8000"]]
    advertised, idents = args.advertise or urls, args.id or [default_id(url) for url in args.advertise or urls]
    if not len(urls) == len(advertised) == len(idents):
        raise ConfigError("agent: --advertise and --id are given as often as --url, or not at all")
    if len(set(idents)) < len(idents):
        raise ConfigError("agent: two engines of one id: give each an --id of its own, in the order of --url")
    check_pool(args.pool, "--pool")
    record = read_record(args.record) if args.record else {}
    for text in unwritten(record):
        logging.getLogger("gpuroute.agent").warning("--record %r: %s", args.record, text)
    record |= {name: value for name in TEXTS if (value := getattr(args, name)) is not None}
    record |= {"engine": engine_of(args.engine).name} if args.engine != "auto" else {}
    record |= {"gpu": over(record.get("gpu"), {"kind": args.gpu})} if args.gpu else {}
    gpu, throttled = (eyes.gpu, ",".join(eyes.reasons)) if eyes is not None else (None, "")
    made = []
    for url, public, ident, events in zip(urls, advertised, idents, _events(args, len(urls)), strict=True):
        endpoint = parse_endpoint({**record, "url": public}, id=ident, key=f"{args.pool}/{ident}")
        if gpu is not None and not endpoint.gpu.kind:
            endpoint = replace(endpoint, gpu=gpu)
        if throttled:
            endpoint = replace(endpoint, labels={**endpoint.labels, "throttled": throttled})
        made.append(Engine(url=url, endpoint=endpoint, events=events))
    return made


def _events(args: argparse.Namespace, count: int) -> list[Source | None]:
    """Where the engines publish the events of their KV caches."""
    events = [zeromq(text, "--kv-events") for text in args.kv_events or []]
    replays = [zeromq(text, "--kv-events-replay") for text in args.kv_events_replay or []]
    if len(events) not in {0, count} or len(replays) not in {0, len(events)}:
        raise ConfigError(
            "agent: --kv-events is given as often as --url, and --kv-events-replay as often as that, or not"
        )
    if not events:
        return [None] * count
    pairs = zip(events, replays or [""] * count, strict=True)
    return [Source(events=where, replay=replay, topic=args.kv_events_topic) for where, replay in pairs]


def _listening(args: argparse.Namespace, settings: Settings) -> Listening | None:
    if not args.grpc_listen:
        return None
    from gpuroute.agent.grpc_server import Listening

    host, port = address(args.grpc_listen, "--grpc-listen")
    ca, cert, key = settings.agent_ca or "", settings.agent_cert or "", settings.agent_cert_key or ""
    return Listening(host=host, port=port, cert=cert, key=key, ca=ca)
