"""When a server says "come back later": every form of that hint seen in the wild, as seconds.

A hint comes from outside and is often malformed, so nothing here raises: what cannot be read is None, and the caller
falls back to its own backoff. Values are not capped, only made non-negative; the caller clips them to its own limit
and to the time left (RFC 9110 section 10.2.3; gRFC A6 for the pushback).
"""

from __future__ import annotations

import re
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_NUMBER = re.compile(r"\s*[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?\s*")
_CLOCK = r"(?P<clock>\d\d?:\d\d:\d\d)"
_ZONE = r"(?:\s+(?P<zone>[+-]\d{4}))?"
_DATES = (
    re.compile(r"(?P<day>\d\d?)[ -](?P<month>[A-Za-z]{3})[a-z]*[ -](?P<year>\d{4}|\d\d)\s+" + _CLOCK + _ZONE),
    re.compile(r"(?P<month>[A-Z][a-z]{2})\s+(?P<day>\d\d?)\s+" + _CLOCK + r"\s+(?P<year>\d{4})" + _ZONE),  # asctime
    re.compile(r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)[T ]" + _CLOCK),  # not HTTP, but sent
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_EPOCH_DAY = 719_468  # days from 1 March of the year 0 to 1 January 1970
_MAX_LENGTH = 256


def retry_after(headers: Mapping[str, str], now_epoch: float) -> float | None:
    """Seconds asked for by a response's headers (any Mapping without regard to case, or in lower case)."""
    for name in ("retry-after-ms", "x-ms-retry-after-ms"):
        seconds = parse_retry_after_ms(headers.get(name))
        if seconds is not None:
            return seconds
    return parse_retry_after(headers.get("retry-after"), now_epoch)


def parse_retry_after(text: str | None, now_epoch: float) -> float | None:
    """Seconds in a `Retry-After` value: a number, or a date in any form of HTTP, in UTC unless it says otherwise.

    A date in the past or a negative number is 0. Of several numbers (a header sent twice) the largest counts.
    """
    if not text or len(text) > _MAX_LENGTH:
        return None
    numbers = [_number(part) for part in text.split(",")]
    known = [n for n in numbers if n is not None]
    if known and len(known) == len(numbers):
        return max(0.0, *known)
    epoch = _epoch(text)
    return None if epoch is None else max(0.0, epoch - now_epoch)


def parse_retry_after_ms(text: str | None) -> float | None:
    """Seconds in a header that counts milliseconds (`retry-after-ms`)."""
    milliseconds = None if text is None else _number(text)
    return None if milliseconds is None else max(0.0, milliseconds / 1000)


def parse_pushback_ms(text: str | bytes | None) -> float | None:
    """Seconds in a `grpc-retry-pushback-ms` trailer; None without one.

    Negative: the server asks not to retry at all, which is also the meaning of a value that cannot be read.
    """
    if text is None:
        return None
    text = text.decode("latin-1") if isinstance(text, bytes) else text
    return int(text) / 1000 if re.fullmatch(r"[0-9]{1,18}", text) else -1.0


def _number(text: str) -> float | None:
    if not _NUMBER.fullmatch(text, 0, _MAX_LENGTH):
        return None
    value = float(text)
    return value if isfinite(value) else None


def _epoch(text: str) -> float | None:
    found = next((match for pattern in _DATES if (match := pattern.search(text))), None)
    if found is None:
        return None
    part = found.groupdict()
    name, year = part["month"].lower(), part["year"]
    century = 0 if len(year) == 4 else 2000 if year < "70" else 1900
    month = int(name) if name.isdigit() else _MONTHS.index(name) + 1 if name in _MONTHS else 0
    days = _days(century + int(year), month, int(part["day"]))
    hour, minute, second = map(int, part["clock"].split(":"))
    if days is None or hour > 23 or minute > 59 or second > 60:
        return None
    return days * 86_400.0 + hour * 3600 + minute * 60 + second - _offset(part.get("zone"))


def _days(year: int, month: int, day: int) -> int | None:
    """Days since the epoch, in the Gregorian calendar counted from March so that a leap day ends the year."""
    if not (year and 1 <= month <= 12 and 1 <= day <= _MONTH_DAYS[month - 1]):
        return None
    year -= month < 3
    in_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return 365 * year + year // 4 - year // 100 + year // 400 + in_year - _EPOCH_DAY


def _offset(zone: str | None) -> float:
    if not zone:
        return 0.0
    ahead = int(zone[1:3]) * 3600.0 + int(zone[3:5]) * 60.0
    return -ahead if zone[0] == "-" else ahead
