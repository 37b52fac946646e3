"""Bug-log R7: a table of waits, and no exception whatever the text."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuroute.core.retry_after import parse_pushback_ms, parse_retry_after, parse_retry_after_ms, retry_after

NOW = 784111777.0  # Sun, 06 Nov 1994 08:49:37 GMT


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2", 2),
        ("1.5", 1.5),
        (" 2 ", 2),
        ("0", 0),
        ("-5", 0),
        ("+3", 3),
        ("1e30", 1e30),
        ("NaN", None),
        ("inf", None),
        ("1e999", None),
        ("9" * 400, None),
        ("", None),
        (None, None),
        ("soon", None),
        ("1_000", None),
        ("٣", None),
        ("2, 5", 5),
        ("2, soon", None),
        ("Sun, 06 Nov 1994 08:49:40 GMT", 3),
        ("Sun, 06 Nov 1994 08:49:40", 3),
        ("Sunday, 06-Nov-94 08:49:40 GMT", 3),
        ("Sun Nov  6 08:49:40 1994", 3),
        ("1994-11-06T08:49:40Z", 3),
        ("Sun, 06 Nov 1994 09:49:40 +0100", 3),
        ("Sun, 06 Nov 1994 07:49:40 -0100", 3),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0),
        ("Sat, 05 Nov 1994 08:49:37 GMT", 0),
        ("Sun, 06 Nov 1994 08:49:40 GMT, Sun, 06 Nov 1994 08:49:41 GMT", 3),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 253402300799 - NOW),
        ("Sun, 31 Feb 1994 08:49:37 GMT", None),
        ("Sun, 06 Nov 0000 08:49:37 GMT", None),
        ("Sun, 06 Xyz 1994 08:49:37 GMT", None),
        ("Sun, 06 Nov 1994 25:61:61 GMT", None),
    ],
)
def test_r7_every_form(text: str | None, seconds: float | None) -> None:
    assert parse_retry_after(text, NOW) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"), [("1500", 1.5), ("-5", 0), ("0.5", 0.0005), ("x", None), (None, None), ("nan", None)]
)
def test_r7_milliseconds(text: str | None, seconds: float | None) -> None:
    assert parse_retry_after_ms(text) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"), [("250", 0.25), (b"0", 0), ("-1", -1), ("x", -1), ("", -1), ("9" * 30, -1), (None, None)]
)
def test_r7_grpc_pushback_that_is_negative_or_unreadable_forbids_a_retry(
    text: str | bytes | None, seconds: float | None
) -> None:
    assert parse_pushback_ms(text) == seconds


def test_r7_the_finer_header_wins() -> None:
    assert retry_after({"retry-after": "2", "retry-after-ms": "1500"}, NOW) == 1.5
    assert retry_after({"retry-after": "2", "retry-after-ms": "?"}, NOW) == 2
    assert retry_after({}, NOW) is None


@given(st.text() | st.from_regex(r"[A-Z][a-z]{2}, \d{1,3} [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d [+-]\d{4}"))
def test_r7_nothing_raises(text: str) -> None:
    for seconds in (parse_retry_after(text, NOW), parse_retry_after_ms(text)):
        assert seconds is None or seconds >= 0
    parse_pushback_ms(text)


@given(st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 31), timezones=st.just(UTC)))
def test_r7_dates_agree_with_the_standard_library(moment: datetime) -> None:
    second = moment.replace(microsecond=0)
    assert parse_retry_after(f"{second:%a, %d %b %Y %H:%M:%S GMT}", 0.0) == second.timestamp()
