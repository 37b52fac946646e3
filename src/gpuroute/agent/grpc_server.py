"""The same answers over gRPC: for meshes, and for policies that want identity by certificate instead of a shared key."""

from __future__ import annotations

import ipaddress
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from gpuroute.agent.server import netloc
from gpuroute.core.asking import GRPC_METHOD
from gpuroute.errors import ConfigError
from gpuroute.forms import read_pem, stamps

if TYPE_CHECKING:
    from gpuroute.agent.answers import Answers

OPTIONS = (("grpc.max_receive_message_length", 1024), ("grpc.so_reuseport", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where, and with which PEM files. `ca` given: only clients with a certificate of it are served."""

    host: str
    port: int
    cert: str = ""
    key: str = ""
    ca: str = ""

    @property
    def scheme(self) -> str:
        """The scheme of the agent's address."""
        return "grpcs" if self.cert else "grpc"

    def check(self, *, authenticated: bool, insecure: bool) -> None:
        """Raise ConfigError for an address that others can reach when nobody is authenticated."""
        mutual = bool(self.cert and self.ca)
        if not (authenticated or mutual or insecure or _is_loopback(self.host)):
            raise ConfigError(
                f"agent on {self.host}: asks from other hosts need a key (GPUROUTE_AGENT_KEY), client certificates "
                "(GPUROUTE_AGENT_CA), or the word --insecure"
            )


async def serve(listening: Listening, answers: Answers) -> tuple[grpc.aio.Server, int]:
    """A running server and its port. Raises OSError if the port is taken or a file cannot be read."""
    server = grpc.aio.server(handlers=[_Handler(answers)], options=OPTIONS)
    address = netloc(listening.host, listening.port)
    try:
        if listening.cert:
            port = server.add_secure_port(address, _credentials(listening))
        else:
            port = server.add_insecure_port(address)
    except ValueError as error:
        raise ConfigError(f"agent over gRPC: {error}") from None
    except RuntimeError:
        raise OSError(98, f"{address} cannot be listened on") from None
    await server.start()
    return server, port


def _credentials(listening: Listening) -> grpc.ServerCredentials:
    """Of the files as they are: certificates are replaced while an agent runs, by meshes every few hours."""
    seen = stamps(listening.key, listening.cert, listening.ca)

    def renewed() -> Any:
        nonlocal seen
        with suppress(OSError, ValueError):  # between two files: the next handshake looks again
            now = stamps(listening.key, listening.cert, listening.ca)
            if now != seen:
                seen, read = now, _read(listening)
                return read
        return None

    return grpc.dynamic_ssl_server_credentials(_read(listening), renewed, bool(listening.ca))


def _read(listening: Listening) -> grpc.ServerCertificateConfiguration:
    key, cert, ca = map(read_pem, (listening.key, listening.cert, listening.ca))
    return grpc.ssl_server_certificate_configuration([(key or b"", cert or b"")], ca)


class _Handler(grpc.GenericRpcHandler):
    """One method, bytes in and bytes out."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._method: Any = grpc.unary_unary_rpc_method_handler(self._say)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._method if handler_call_details.method == GRPC_METHOD else None

    async def _say(self, data: bytes, context: Any) -> bytes:
        source = context.peer().rpartition(":")[0]
        return self._answers.answer(data, source, time.monotonic(), int(time.time() * 1000))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
