"""The protobuf codec: round trips, the published examples, and every kind of damage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuroute.core.wire import Message, WireError, encode

NUMBERS = st.integers(1, 2**29 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
FIELDS = st.lists(st.tuples(NUMBERS, INT64 | st.binary(max_size=40) | st.text(max_size=20)), max_size=12)


def test_published_examples() -> None:
    # protobuf.dev, "Encoding": field 1 = 150; field 2 = "testing"; field 3 = the message of field 1 = 150.
    assert encode((1, 150)).hex() == "089601"
    assert encode((2, "testing")).hex() == "120774657374696e67"
    assert encode((3, encode((1, 150)))).hex() == "1a03089601"
    assert encode((1, -2)).hex() == "08feffffffffffffffff01"


@given(FIELDS)
def test_round_trip(fields) -> None:
    message = Message(encode(*fields))
    last = dict(fields)
    for number, value in last.items():
        if isinstance(value, int):
            if all(isinstance(other, int) for at, other in fields if at == number):
                assert message.integer(number) == value
        elif not any(isinstance(other, int) for at, other in fields if at == number):
            expected = [v.encode() if isinstance(v, str) else v for at, v in fields if at == number]
            assert message.all(number) == expected
            assert message.data(number) == expected[-1]


@given(FIELDS)
def test_nested_round_trip(fields) -> None:
    inner = encode(*fields)
    outer = Message(encode((7, inner), (7, inner)))
    assert [part._fields for part in outer.messages(7)] == [Message(inner)._fields] * 2
    assert outer.message(7)._fields == Message(inner)._fields


def test_absent_fields_read_as_defaults_and_none_is_left_out() -> None:
    message = Message(encode((1, None), (2, b""), (3, 0)))
    assert (message.integer(1), message.data(1), message.text(1), message.all(1)) == (0, b"", "", [])
    assert message.message(1).integer(5) == 0
    assert encode((1, None)) == b""
    assert encode((3, b"")) == b"\x1a\x00"  # an empty message that is present, such as a progress request


def test_unknown_fixed_width_fields_are_skipped() -> None:
    data = b"\x09" + b"\x01" * 8 + b"\x15" + b"\x02" * 4 + encode((3, 5))
    assert Message(data).integer(3) == 5


def test_a_field_of_another_kind_is_an_error() -> None:
    message = Message(encode((1, 5), (2, "x")))
    with pytest.raises(WireError):
        message.data(1)
    with pytest.raises(WireError):
        message.integer(2)


def test_text_that_is_not_utf8_is_escaped() -> None:
    assert Message(encode((1, b"a\xff"))).text(1) == "a\\xff"


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_wire_error(data: bytes) -> None:
    try:
        message = Message(data)
    except WireError:
        return
    for number in message._fields:
        message.text(number) if message._fields[number] and isinstance(message._fields[number][0], bytes) else None


@given(FIELDS.filter(bool), st.data())
def test_a_cut_message_never_reads_as_the_whole_one(fields, data) -> None:
    whole = encode(*fields)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        assert Message(cut)._fields != Message(whole)._fields
    except WireError:
        pass


@pytest.mark.parametrize("data", [b"\x08", b"\x08" + b"\xff" * 10, b"\x12\x05ab", b"\x0b", b"\x09\x01", b"\x07\x00"])
def test_damage_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        Message(data)
