"""Where etcd is and how to speak to it, as one checked value; grpc is not needed to make one."""

from __future__ import annotations

import ipaddress
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuroute.errors import ConfigError
from gpuroute.forms import Secret
from gpuroute.registry.file import lasting
from gpuroute.registry.trtllm import PREFIX as TRTLLM_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

ACCEPTS = (
    "etcd://host:2379,host2:2379/prefix, or etcds:// with TLS; etcd+trtllm:// and etcds+trtllm:// for trtllm-serve's"
)
DEFAULT_PREFIX = "/gpuroute"
TRTLLM = "+trtllm"
_SCHEMES = re.compile(r"etcd(s?)(\+trtllm)?")
_MEMBER = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdConfig:
    """Members as `host:port`, and the rest. Seconds throughout; `random` spreads clients over members and time.

    `timeout` bounds one unary call, `heartbeat` is how often a watch must show that it is alive (silence is detected
    after two of them), and the pings do the same for a connection. `dialect`: "" for our records, or `TRTLLM`.
    """

    members: tuple[str, ...]
    dialect: str = ""
    prefix: str = DEFAULT_PREFIX
    tls: bool = False
    user: str = ""
    password: Secret = Secret("")
    ca: str = ""
    cert: str = ""
    key: str = ""
    trust_env: bool = False
    timeout: float = 3.0
    heartbeat: float = 5.0
    ping_interval: float = 10.0  # etcd closes connections that ping more often than every 5 s
    ping_timeout: float = 3.0
    random: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if bool(self.user) != bool(self.password):
            raise ConfigError("etcd user and password go together: set both or neither")
        if bool(self.cert) != bool(self.key):
            raise ConfigError("etcd client certificate and key go together: set both or neither")
        if (self.ca or self.cert) and not self.tls:
            raise ConfigError("a certificate is set but the registry is etcd:// (no TLS): use etcds://")
        for path in filter(None, (self.ca, self.cert, self.key)):
            if not Path(path).is_file():
                raise ConfigError(f"{path!r}: expected the path of a readable PEM file")

    @property
    def source(self) -> str:
        """The URL that says the same, without credentials."""
        return f"etcd{'s' if self.tls else ''}{self.dialect}://{','.join(self.members)}{self.prefix}"

    @classmethod
    def from_url(cls, url: str, **options: Any) -> EtcdConfig:
        """The configuration of `etcd://h1:2379,h2:2379/prefix` or `etcds://...`; ConfigError if it is not one.

        Options are the other fields; None as if absent, and the password may be plain text.
        """
        before, _, rest = url.partition("://")  # not by urlsplit, which knows of one host in brackets only
        netloc, slash, path = rest.partition("/")
        if "@" in netloc:
            raise ConfigError("etcd URL with credentials: set GPUROUTE_ETCD_USER and GPUROUTE_ETCD_PASSWORD instead")
        members = tuple(_member(text.strip(), url) for text in netloc.split(","))
        scheme = _SCHEMES.fullmatch(before.lower())
        dialect = (scheme[2] or "") if scheme else ""
        prefix = f"{slash}{path}".rstrip("/") or (TRTLLM_PREFIX if dialect else DEFAULT_PREFIX)
        if scheme is None or "?" in rest or "#" in rest or not prefix.isprintable():
            raise ConfigError(f"registry {url!r}: expected {ACCEPTS}")
        given = {name: value for name, value in options.items() if value is not None}
        for name in ("ca", "cert", "key"):
            if given.get(name):  # read again at each connect, wherever the process is by then
                given[name] = str(lasting(given[name]))
        if isinstance(given.get("password"), str):
            given["password"] = Secret(given["password"])
        return cls(members=members, dialect=dialect, prefix=prefix, tls=bool(scheme[1]), **given)


def _member(text: str, url: str) -> str:
    match = _MEMBER.fullmatch(text)
    port = int((match[2] or ":2379")[1:]) if match else 0
    if match is None or not 0 < port < 65_536 or (match[1][0] == "[" and not _is_ipv6(match[1][1:-1])):
        raise ConfigError(f"registry {url!r}: bad member {text!r}; expected {ACCEPTS}")
    return f"{match[1]}:{port}"


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
