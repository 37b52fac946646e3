"""How settings are written as text: one `Form` per kind of value, and `Secret`.

Strict on purpose: what is not exactly in the accepted form is a ValueError, because a value that is read as
something else is worse than a refusal.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Secret:
    """A text that shows itself only through `reveal()`: not in repr, str, format, asdict, JSON or pickle.

    `path`: the file that it was read from, if it was, where a later one may be.
    """

    __slots__ = ("_path", "_text")

    def __init__(self, text: str, path: Path | None = None) -> None:
        self._text = text
        self._path = path

    def reveal(self) -> str:
        """The secret itself, as it was given."""
        return self._text

    def latest(self) -> str:
        """The secret as its file has it now; as it was given if there is no file, or none that can be used now."""
        # To open a pipe again, as of `<(command)` in a shell, may take for ever.
        if self._path is None or not self._path.is_file():
            return self._text
        try:
            return read_secret(self._path) or self._text
        except (OSError, UnicodeDecodeError):
            return self._text

    def __repr__(self) -> str:
        return "Secret(***)"

    def __str__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __bool__(self) -> bool:
        return bool(self._text)

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a Secret cannot be pickled; let each process read its own environment")


@dataclass(frozen=True, slots=True)
class Form(Generic[T]):
    """How one kind of value is written: `parse` raises ValueError, `show` writes what `parse` accepts."""

    accepts: str
    parse: Callable[[str], T]
    show: Callable[[T], str] = str


_BOOLEANS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
LONGEST_S = 366 * 86_400.0
"""Sockets and locks refuse to wait for some centuries, each in its own way and only when a call comes."""
_NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"


def parse_boolean(text: str) -> bool:
    """Exactly true/false/1/0/yes/no/on/off, in any case; everything else is a ValueError."""
    try:
        return _BOOLEANS[text.strip().lower()]
    except KeyError:
        raise ValueError(text) from None


def parse_duration(text: str) -> float:
    """Seconds of `250ms`, `2s`, `1m`, `1h`, up to a year; a bare number is seconds, as in the Python API."""
    match = re.fullmatch(_NUMBER + r"(us|ms|s|m|h|)", text.strip().lower())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else math.inf
    if seconds > LONGEST_S:
        raise ValueError(text)
    return seconds


def _number_before(text: str, unit: str) -> float:
    match = re.fullmatch(_NUMBER + unit, text.strip().lower())
    if not match or not math.isfinite(float(match[1])):
        raise ValueError(text)
    return float(match[1])


def _parse_percent(text: str) -> float:
    share = _number_before(text, "%") / 100
    if share > 1:
        raise ValueError(text)
    return share


def _parse_choice(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in choices:
            raise ValueError(text)
        return word

    return parse


def _parse_count(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text.strip()) or int(text) < 1:
        raise ValueError(text)
    return int(text)


def _parse_positive(text: str) -> float:
    seconds = parse_duration(text)
    if seconds <= 0:
        raise ValueError(text)
    return seconds


def _parse_word(text: str) -> str:
    word = text.strip()
    if not word or len(word.split()) != 1 or not word.isprintable():
        raise ValueError(text)
    return word


def _parse_file(text: str) -> str:
    if not Path(text).is_file():
        raise ValueError(text)
    return text


def _parse_registry(text: str) -> str:
    # Credentials in a URL end up in logs, process lists and error messages.
    if "@" in text and not text.strip().startswith(("file:", "/", "./")):
        raise ValueError(text)
    return text.strip()


def _parse_url(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/@]+(/[^\s@]*)?", text.strip()):
        raise ValueError(text)
    from urllib.parse import urlsplit  # not at the start: few have one

    parts = urlsplit(text.strip())
    if not parts.hostname or parts.port == 0:  # `port` itself raises for one that is no number
        raise ValueError(text)
    return text.strip()


def _parse_urls(text: str) -> str:
    return ",".join(_parse_url(part) for part in text.split(","))


def _plain(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def parse_subset(text: str) -> str | int:
    """`auto`, `off`, or a whole number of at least 1."""
    word = text.strip().lower()
    return word if word in {"auto", "off"} else _parse_count(text)


def choice(*words: str) -> Form[str]:
    """One of some words, in any case."""
    return Form("one of " + ", ".join(words), _parse_choice(words))


BOOLEAN = Form("true/false, 1/0, yes/no or on/off", parse_boolean, lambda value: str(value).lower())
COUNT = Form("a whole number of at least 1", _parse_count)
SUBSET = Form("auto, off or a whole number of at least 1", parse_subset)
DURATION = Form(
    "a duration above 0 such as 250ms, 2s or 1m, up to a year", _parse_positive, lambda value: f"{_plain(value)}s"
)
DURATION_OR_ZERO = Form("a duration such as 0s, 250ms, 2s or 1m, up to a year", parse_duration, DURATION.show)
PERCENT = Form("a percentage from 0% to 100%", _parse_percent, lambda value: f"{_plain(value * 100)}%")
RATE = Form("a rate per second such as 10/s", lambda text: _number_before(text, "/s"), lambda v: f"{_plain(v)}/s")
WORD = Form("one word", _parse_word)
FILE = Form("the path of a readable file", _parse_file)
PATH = Form("a path", _parse_word)
URL = Form("an http:// or https:// URL without credentials", _parse_url)
URLS = Form("http:// or https:// URLs without credentials, separated by commas", _parse_urls)
REGISTRY = Form(
    "etcd://h1:2379,h2:2379/prefix, etcds://... (TLS), etcd+trtllm://... (records of trtllm-serve), file:///fleet.toml "
    "or POOL=URL,URL;POOL2=URL, without credentials (for etcd: GPUROUTE_ETCD_USER and GPUROUTE_ETCD_PASSWORD)",
    _parse_registry,
)
SECRET = Form("any text", Secret, lambda secret: secret.reveal())


def read_secret(path: Path) -> str:
    """The text of a file that holds a secret, "" if there is none. Raises OSError, UnicodeDecodeError."""
    text = path.read_text(encoding="utf-8").rstrip("\r\n")
    return text if text.strip() else ""


def read_pem(path: str | None) -> bytes | None:
    """The bytes of a PEM file; None without a path. OSError, or ValueError for what is no PEM.

    A file that is just being replaced may be empty: of half a pair grpcio dies, and the process with it, and of an empty
    CA it makes the roots that come with it.
    """
    if not path:
        return None
    data = Path(path).read_bytes()
    if b"-----BEGIN " not in data:
        raise ValueError(f"{path}: is {'no PEM file' if data else 'empty'}")
    return data


def stamps(*files: str | None) -> tuple[int, ...]:
    """When these files changed, in nanoseconds; no path is no file. Raises OSError if one is not here."""
    return tuple(Path(file).stat().st_mtime_ns for file in files if file)
