"""The options of `gpuroute agent`, and how their values are checked: a bad one is answered with what is accepted."""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gpuroute.agent.health import HUNG_AFTER_S
from gpuroute.agent.warmup import PASSES
from gpuroute.cli.values import count, typed
from gpuroute.errors import ConfigError
from gpuroute.forms import DURATION, DURATION_OR_ZERO, URL, Form

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

TEXTS = ("model", "version", "zone", "region")
"""Fields of the record that have an option of their own."""


def _ttl(text: str) -> float:
    from gpuroute.registry.lease import MAX_TTL_S

    seconds = DURATION.parse(text)
    if not 1 <= seconds <= MAX_TTL_S:
        raise ValueError(text)
    return seconds


NONE_OR_MORE, ONE_OR_MORE = count(0), count(1)
TTL = Form("a duration from 1s to 24h", _ttl)


def declare(parser: argparse.ArgumentParser) -> None:
    """Add all options."""
    _engine(parser.add_argument_group("engine").add_argument)
    _record(parser.add_argument_group("record in the registry").add_argument)
    _listening(parser.add_argument_group("where it listens").add_argument)
    _judging(parser.add_argument_group("how it judges").add_argument)


def _engine(add: Callable[..., Any]) -> None:
    add(
        "--url",
        action="append",
        metavar="URL",
        help="where the engine listens for us (default: http://127.0.0.1:8000); repeat for several engines",
    )
    add("--engine", default="auto", help="vllm, sglang, llamacpp, ... (default: found out)")
    add(
        "--kv-tokens",
        type=typed(NONE_OR_MORE),
        default=0,
        metavar="N",
        help="size of the KV cache, if the engine does not say",
    )
    add(
        "--dram-tokens",
        type=typed(NONE_OR_MORE),
        default=0,
        metavar="N",
        help="tokens of a second cache tier in main memory",
    )

    add(
        "--kv-events",
        action="append",
        metavar="ADDRESS",
        help="ZeroMQ address at which the engine publishes KV cache events, in the order of --url (tcp://127.0.0.1:5557, "
        "ipc:///run/kv.sock; listen=tcp://... if the engine connects to us); needs the extra kv-events",
    )
    add(
        "--kv-events-replay",
        action="append",
        metavar="ADDRESS",
        help="where missed events can be had again, in that order",
    )
    add("--kv-events-topic", default="", metavar="TOPIC", help="follow only events of this topic (default: all)")


def _record(add: Callable[..., Any]) -> None:
    add("--advertise", action="append", metavar="URL", help="where clients reach it (default: --url), in that order")
    add("--pool", default="default", help="pool to join (default: %(default)s)")
    add("--id", action="append", help="id within the pool (default: host:port of the URL), in that order")
    add("--registry", help="etcd://h1:2379/prefix to register in (default: GPUROUTE_REGISTRY; none: answer asks only)")
    add(
        "--ttl",
        type=typed(TTL),
        default="10s",
        metavar="TIME",
        help="how long the record outlives this process (default: %(default)s)",
    )
    add("--record", help="JSON file with further fields of the record, such as headers or labels")
    for name in TEXTS:
        add(f"--{name}", help=f"the record's `{name}`")
    add("--gpu", metavar="KIND", help="GPU kind, e.g. H100 (default: asked of NVML, if it is installed)")


def _listening(add: Callable[..., Any]) -> None:
    add("--listen", default="127.0.0.1:9401", metavar="HOST:PORT", help="UDP address for asks (default: %(default)s)")
    add("--grpc-listen", metavar="HOST:PORT", help="also gRPC, which is then registered; TLS by GPUROUTE_AGENT_CERT")
    add(
        "--digest",
        metavar="HOST:PORT",
        help="collect what all agents of the registry say, and serve it over HTTP to clients that cannot reach them; "
        "without --url nothing else is done",
    )
    add("--agent-host", default="", metavar="HOST[:PORT]", help="where clients reach that address (default: the same)")
    add("--insecure", action="store_true", help="answer other hosts without a key (GPUROUTE_AGENT_KEY)")
    add(
        "--max-rate",
        type=typed(ONE_OR_MORE),
        default=50_000,
        metavar="N",
        help="messages per second taken from one host (default: %(default)s)",
    )
    add(
        "--status", default="127.0.0.1:9402", metavar="HOST:PORT", help="/healthz, /metrics, /load (default: %(default)s)"
    )


def _judging(add: Callable[..., Any]) -> None:
    add(
        "--warmup",
        type=typed(NONE_OR_MORE),
        default=PASSES,
        metavar="N",
        help="requests before it is ready (default: %(default)s)",
    )
    add("--warmup-command", default="", metavar="CMD", help="run this instead; ENGINE_URL is set, exit code 0 is warm")
    add(
        "--drain",
        type=typed(DURATION_OR_ZERO),
        default=60.0,
        metavar="TIME",
        help="longest wait for running calls (default: 60s)",
    )
    add(
        "--hung-after",
        type=typed(DURATION),
        default=HUNG_AFTER_S,
        metavar="TIME",
        help="work that stands still this long is hung (default: 10s)",
    )


def address(text: str, option: str) -> tuple[str, int]:
    """HOST:PORT. Raises ConfigError that names the option."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"[^\s:\[\]]+|\[[0-9a-fA-F:.]+\]", host) or not _is_port(port):
        raise ConfigError(f"{option}={text!r}: expected HOST:PORT, with a port from 0 (any) to 65535")
    return host.strip("[]"), int(port)


def zeromq(text: str, option: str) -> str:
    """A ZeroMQ address. Raises ConfigError that names the option."""
    if not re.fullmatch(r"(listen=)?(tcp://[^\s/*]+:[0-9]+|ipc://\S+)", text) or (
        "tcp://" in text and not _is_port(text.rpartition(":")[2])
    ):
        raise ConfigError(
            f"{option}={text!r}: expected tcp://HOST:PORT or ipc:///PATH, if need be with listen= before it"
        )
    return text


def reachable(text: str) -> str:
    """The value of --agent-host: a name or an address, with a port or without one; IPv6 comes back in brackets."""
    with suppress(ValueError):
        return f"[{text}]" if ipaddress.ip_address(text).version == 6 else text
    try:
        parts = urlsplit(f"//{text}")
        fine = not text or bool(parts.netloc == text and parts.hostname and parts.port != 0)
    except ValueError:
        fine = False
    if not fine or text.endswith(":") or "@" in text:
        raise ConfigError(f"--agent-host={text!r}: expected HOST or HOST:PORT, with a port from 1 to 65535")
    return text


def url(text: str) -> str:
    """The value of --url. Raises ConfigError."""
    try:
        port = urlsplit(URL.parse(text)).port
    except ValueError:
        port = 0
    if port == 0:
        shown = "(value not shown)" if "@" in text else repr(text)
        raise ConfigError(f"--url={shown}: expected {URL.accepts}")
    return text


def _is_port(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,5}", text)) and int(text) <= 65_535
