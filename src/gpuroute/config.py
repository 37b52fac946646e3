"""Settings: `GPUROUTE_*` variables and keyword arguments become one frozen, checked object.

The fields of `Settings` are the only table of settings: a row holds its default, the form it accepts and its
documentation. Its variable is `GPUROUTE_` plus the field's name in capitals. `docs/configuration.md` is
generated from the rows (`python -m gpuroute.config`). To add a setting, add a row.

Rules: a bad value or a contradiction raises `ConfigError` that names the variable, the value (unless secret)
and what is accepted; nothing falls back silently. An empty variable counts as unset. The environment is read
when a `Settings` is made, never at import. An argument goes through the same parser as the variable.
"""

from __future__ import annotations

import difflib
import logging
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gpuroute.core.policies import POLICIES
from gpuroute.errors import ConfigError
from gpuroute.forms import (
    BOOLEAN,
    COUNT,
    DURATION,
    DURATION_OR_ZERO,
    FILE,
    PATH,
    PERCENT,
    RATE,
    REGISTRY,
    SECRET,
    SUBSET,
    URL,
    URLS,
    WORD,
    Form,
    Secret,
    choice,
    read_secret,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from dataclasses import Field

__all__ = ["Secret", "Settings"]

T = TypeVar("T")

PREFIX = "GPUROUTE_"
ARGUMENT, ENVIRONMENT, DEFAULT = "argument", "environment", "default"


def _row(default: T, form: Form[Any], doc: str) -> T:
    row: T = field(default=default, metadata={"form": form, "doc": doc})
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set, immutable and checked. Durations in seconds, shares in 0..1; None: not set.

    Raises `ConfigError` on a bad value or a contradiction. Any thread; never shows a secret.
    """

    registry: str | None = _row(None, REGISTRY, "Where the fleet is described.")
    registry_snapshot: str | None = _row(
        None,
        PATH,
        "File (mode 0600) that keeps the last good fleet, to start from when the registry is down.",
    )
    etcd_user: str | None = _row(None, WORD, "User name for etcd.")
    etcd_password: Secret | None = _row(None, SECRET, "Password for etcd.")
    etcd_ca: str | None = _row(None, FILE, "PEM file of the authorities that etcd's certificate is checked against.")
    etcd_cert: str | None = _row(None, FILE, "PEM file of the client certificate for etcd (mTLS).")
    etcd_key: str | None = _row(None, FILE, "PEM file of the key of that certificate.")
    policy: str = _row("auto", choice(*POLICIES), "How an endpoint is picked.")
    subset: str | int = _row(
        "off",
        SUBSET,
        "Use only a part of each pool: so many endpoints, or as many as the number of clients calls for. Needs etcd.",
    )
    timeout: float | None = _row(None, DURATION, "Deadline of a call over all attempts and waits.")
    attempts: int = _row(3, COUNT, "Most attempts of one call, the first included.")
    connect_timeout: float = _row(1.0, DURATION, "Limit of one connect while the pool has other endpoints to try.")
    retry_budget: float = _row(0.2, PERCENT, "Retries and hedges allowed, as a share of calls.")
    retry_floor: float = _row(10.0, RATE, "Retries that are always allowed, so that a quiet client can retry too.")
    max_in_flight: int | None = _row(None, COUNT, "Most calls of this process at one endpoint at a time.")
    zone: str | None = _row(None, WORD, "Zone that this process runs in: calls stay in it as far as its capacity goes.")
    region: str | None = _row(None, WORD, "Region that this process runs in: calls that leave the zone stay in it.")
    zone_price: float = _row(
        0.0,
        DURATION_OR_ZERO,
        "Seconds that a call to another zone is taken to cost beside the way, by auto and predictive.",
    )
    region_price: float = _row(0.0, DURATION_OR_ZERO, "The same for another region, in addition.")
    trust_env: bool = _row(
        False,
        BOOLEAN,
        "Let gRPC connections, to etcd and to gRPC endpoints, go through the proxy of the environment (http_proxy, "
        "no_proxy, ...). HTTP endpoints and agents are connected to directly, whatever it says.",
    )
    cookies: bool = _row(False, BOOLEAN, "Let `Set-Cookie` of endpoints through to the client.")
    log_level: str | None = _row(
        None, choice("debug", "info", "warning", "error", "critical"), "Level of the logger `gpuroute`."
    )
    disabled: bool = _row(False, BOOLEAN, "Kill switch: every call goes to the fallback URL, nothing is routed.")
    fallback_url: str | None = _row(None, URL, "Where calls go that are not routed.")
    rollout: float = _row(1.0, PERCENT, "Stable share of calls that is routed; the rest goes to the fallback URL.")
    ready_timeout: float = _row(5.0, DURATION, "How long a first call waits for the first view of the fleet.")
    passthrough: bool = _row(False, BOOLEAN, "Send a call whose host is no pool to that host, instead of refusing it.")
    empty_grace: float = _row(
        10.0,
        DURATION_OR_ZERO,
        "How long the last endpoints stay in use after the registry says that none are left.",
    )
    salt: Secret | None = _row(None, SECRET, "Seed of prefix hashes, common to clients that share homes.")
    tenant: str | None = _row(None, WORD, "Whose prompts these are: hashes that agents see differ by tenant.")
    breaker_failures: int = _row(5, COUNT, "Consecutive failures that open an endpoint's breaker.")
    breaker_open: float = _row(5.0, DURATION, "How long an open breaker waits before it lets one probe through.")
    panic: str = _row(
        "fail_open",
        choice("fail_open", "fail_fast"),
        "What happens when nearly every endpoint of a pool is ejected.",
    )
    panic_share: float = _row(
        0.0, PERCENT, "Share of endpoints in service at or below which a pool is in panic; 0%: when none is left."
    )
    eject_interval: float = _row(
        10.0, DURATION_OR_ZERO, "How often endpoints are compared with their peers, to eject the outliers; 0s: never."
    )
    eject_share: float = _row(0.34, PERCENT, "Most capacity of a pool that may be ejected at a time.")
    watchdog: bool = _row(True, BOOLEAN, "Give up attempts that are silent for longer than is normal for the endpoint.")
    hedge: bool = _row(False, BOOLEAN, "Send a second attempt when the first byte is late; at most 5% of calls.")
    reroute: bool = _row(False, BOOLEAN, "Move a call that still waits in a queue elsewhere; at most 10% of calls.")
    continuation: bool = _row(
        False, BOOLEAN, "Continue an interrupted stream of generated text on another endpoint, if the engine can."
    )
    deadline_header: str | None = _row(None, WORD, "Request header that carries the milliseconds left of the deadline.")
    health_checks: bool = _row(False, BOOLEAN, "Ask endpoints for their health from this process, too.")
    health_interval: float = _row(5.0, DURATION, "How often one endpoint is asked for its health, jittered.")
    asks: str = _row(
        "auto",
        choice("auto", "on", "agents", "engines", "off"),
        "Ask the agents of a few endpoints before a call: when that pays (and engines whose agent is not believed), "
        "always, agents only, also engines without an agent, never.",
    )
    ask_timeout: float = _row(0.003, DURATION, "Longest wait for the answers to one call's asks.")
    ask_hashes: bool = _row(
        False,
        BOOLEAN,
        "Send salted hashes of the prompt's prefix with asks, so that agents say how much of it is cached.",
    )
    digest: str | None = _row(
        None, URLS, "Where processes that cannot reach agents read what all of them say; several are each other's spare."
    )
    agent_key: Secret | None = _row(None, SECRET, "Key common to clients and agents, which authenticates asks.")
    agent_ca: str | None = _row(None, FILE, "PEM file of the authorities of agents (of an agent: of its clients).")
    agent_cert: str | None = _row(None, FILE, "PEM file of the certificate to show to agents (of an agent: its own).")
    agent_cert_key: str | None = _row(None, FILE, "PEM file of the key of that certificate.")
    agent_key_next: Secret | None = _row(None, SECRET, "Second key that agents accept, while a key is changed.")
    sources: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = []
        for row in rows():
            value, problem = _checked(row, getattr(self, row.name), self.named(row.name))
            object.__setattr__(self, row.name, value)
            problems += [problem] if problem else []
        _raise_if(problems or list(_contradictions(self)))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> Settings:
        """Settings of the environment (default `os.environ`), overridden by every argument that is not None.

        Raises one `ConfigError` for everything wrong; logs a warning for each unknown `GPUROUTE_*` name.
        """
        environ = os.environ if environ is None else environ
        values, problems = _read(environ)
        problems += [_unknown_argument(name) for name in overrides if name not in _names()]
        sources = dict.fromkeys(values, ENVIRONMENT)
        given = {name: value for name, value in overrides.items() if value is not None}
        for text in unknown_variables(environ):
            logging.getLogger("gpuroute").warning(text)
        # Crash reporters print the locals of a raising frame: nothing unwrapped may be among them.
        del environ, overrides
        _raise_if(problems)
        return cls(**{**values, **given}, sources=(*sources.items(), *dict.fromkeys(given, ARGUMENT).items()))

    def source(self, name: str) -> str:
        """Where the value of a field comes from: "argument", "environment" or "default"."""
        unstated = DEFAULT if getattr(self, name) == _row_of(name).default else ARGUMENT
        return dict(self.sources).get(name, unstated)

    def effective(self) -> list[dict[str, str | None]]:
        """Every setting with its value (secrets as ***) and source, JSON-able."""
        return [
            {"variable": variable(row.name), "value": _shown(row, self), "source": self.source(row.name)}
            for row in rows()
        ]

    def named(self, name: str) -> str:
        """How to speak of a setting to who made it: the variable if it came from there, else the argument."""
        return variable(name) if self.source(name) == ENVIRONMENT else name


def rows() -> Iterator[Field[Any]]:
    """The fields of `Settings` that are settings, in order; `metadata` has `form` and `doc`."""
    return (row for row in fields(Settings) if row.metadata)


def variable(name: str) -> str:
    """Name of the environment variable of a field."""
    return PREFIX + name.upper()


def is_secret(row: Field[Any]) -> bool:
    """True if the value of this row must never be shown."""
    return row.metadata["form"] is SECRET


def _names() -> dict[str, Field[Any]]:
    return {row.name: row for row in rows()}


def _row_of(name: str) -> Field[Any]:
    return _names()[name]


# -------------------------------------------------------------------------------------------- reading


def _read(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    values: dict[str, Any] = {}
    problems: list[str] = []
    for row in rows():
        text, problem = _text_of(row, environ)
        if not problem and (isinstance(text, Secret) or text.strip()):
            values[row.name], problem = _checked(row, text, variable(row.name))
        problems += [problem] if problem else []
    return values, problems


def _text_of(row: Field[Any], environ: Mapping[str, str]) -> tuple[str | Secret, str]:
    """The text of one variable, or the secret in its `_FILE`; and what is wrong with it."""
    name = variable(row.name)
    text, path = environ.get(name, ""), environ.get(name + "_FILE", "") if is_secret(row) else ""
    if not path.strip():
        return text, ""
    if text.strip():
        return "", f"{name} and {name}_FILE are both set: keep one"
    try:
        secret = Secret(read_secret(Path(path)), Path(path).absolute())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        return "", f"{name}_FILE={path!r} cannot be read: {reason}"
    return secret, "" if secret else f"{name}_FILE={path!r} is empty"


def _checked(row: Field[Any], value: Any, name: str) -> tuple[Any, str]:
    """The parsed value and "", or None and the complaint. Text and typed values go through one parser."""
    form: Form[Any] = row.metadata["form"]
    if (value is None and row.default is None) or (isinstance(value, Secret) and form is SECRET):
        return value, ""
    text = ""
    try:
        text = value if isinstance(value, str) else _written(form, value)
        return form.parse(text), ""
    except (ValueError, TypeError, AttributeError, OSError, OverflowError):
        return None, _complaint(name, "***" if is_secret(row) else text or repr(value), form.accepts)


def _written(form: Form[Any], value: Any) -> str:
    if isinstance(value, (bytes, bytearray)):  # `str` of it would be a text too: b'eu-1', with its quotes
        raise TypeError("bytes")
    return form.show(value)


def _complaint(name: str, text: str, accepts: str) -> str:
    shown = "(value not shown)" if "@" in text else repr(text)
    return f"{name}={shown}: expected {accepts}"


def _shown(row: Field[Any], settings: Settings) -> str | None:
    value = getattr(settings, row.name)
    if value is None or is_secret(row):
        return None if value is None else "***"
    return cast(str, row.metadata["form"].show(value))


def _contradictions(settings: Settings) -> Iterator[str]:
    named = settings.named
    for one, other in (("etcd_cert", "etcd_key"), ("etcd_user", "etcd_password"), ("agent_cert", "agent_cert_key")):
        if bool(getattr(settings, one)) != bool(getattr(settings, other)):
            present, absent = (one, other) if getattr(settings, one) else (other, one)
            yield f"{named(present)} is set without {variable(absent)}: set both or neither"
    if (settings.etcd_ca or settings.etcd_cert) and (settings.registry or "").startswith("etcd://"):
        yield f"{named('registry')} is etcd:// (no TLS) but a certificate is set: use etcds://"
    yield from _misplaced(settings)
    if settings.disabled and not settings.fallback_url:
        yield f"{named('disabled')} is set without {variable('fallback_url')}: calls would have nowhere to go"
    if settings.rollout < 1 and not settings.fallback_url:
        yield f"{named('rollout')} is below 100% without {variable('fallback_url')} for the rest of the calls"
    if settings.timeout and settings.source("connect_timeout") != DEFAULT and settings.connect_timeout > settings.timeout:
        yield f"{named('connect_timeout')} is longer than {named('timeout')}: it could never be reached"
    for name in ("hedge", "reroute", "continuation"):
        if getattr(settings, name) and settings.attempts == 1:
            yield f"{named(name)} is set but {named('attempts')} is 1: there is no second attempt"


def _misplaced(settings: Settings) -> Iterator[str]:
    named = settings.named
    if settings.subset != "off" and settings.registry and not settings.registry.startswith(("etcd://", "etcds://")):
        yield f"{named('subset')} is set but {named('registry')} is not etcd: ordinals come from leases there"
    for price, place in (("zone_price", "zone"), ("region_price", "region")):
        if getattr(settings, price) and not getattr(settings, place):
            yield f"{named(price)} is set without {variable(place)}: nothing would be another {place}"


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each `GPUROUTE_*` name that means nothing, with the nearest name that does."""
    known = {variable(row.name) for row in rows()}
    known |= {variable(row.name) + "_FILE" for row in rows() if is_secret(row)}
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    return [f"unknown variable {name}{_did_you_mean(name, known)}" for name in unknown]


def _unknown_argument(name: str) -> str:
    return f"unknown setting {name!r}{_did_you_mean(name, set(_names()))}"


def _did_you_mean(name: str, known: set[str]) -> str:
    # Without the common prefix, which would make every two names look alike.
    suffixes = {other.removeprefix(PREFIX): other for other in known}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), suffixes, n=1)
    return f" (did you mean {suffixes[near[0]]}?)" if near else ""


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise ConfigError("; ".join(problems))


# ---------------------------------------------------------------------------------------------- docs


def markdown() -> str:
    """The table of `docs/configuration.md`."""
    head = ["| Variable | Argument | Accepts | Default | Meaning |", "|---|---|---|---|---|"]
    return "\n".join(head + [_markdown_row(row) for row in rows()]) + "\n"


def _markdown_row(row: Field[Any]) -> str:
    form = row.metadata["form"]
    name = f"`{variable(row.name)}`" + (f", `{variable(row.name)}_FILE`" if is_secret(row) else "")
    default = "" if row.default is None else f"`{form.show(row.default)}`"
    secret = " Secret: never shown." if is_secret(row) else ""
    return f"| {name} | `{row.name}` | {form.accepts} | {default} | {row.metadata['doc']}{secret} |"


if __name__ == "__main__":
    print(markdown(), end="")
