"""The protobuf wire format, as much of it as we need, so that no protobuf package is needed at run time.

Generated code is bound to a range of protobuf versions, and two users of one message name in one process clash in
protobuf's global pool; an embedded library can afford neither. A message is written as (field number, value) pairs and
read as a `Message`, or field by field without copies; which number means what stands where it is used.

Pure functions; any thread. Malformed input raises `WireError`, never anything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

    Value = int | bytes | str | None
    Buffer = bytes | memoryview

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_64_BITS = (1 << 64) - 1


class WireError(ValueError):
    """The bytes are not a well-formed message."""


def encode(*fields: tuple[int, Value]) -> bytes:
    """A message of these fields, in this order; None is left out. Integers are int64 (or bool, or an enum)."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            out += _varint(number << 3 | _VARINT) + _varint(value & _64_BITS)
        elif value is not None:
            data = value.encode() if isinstance(value, str) else value
            out += _varint(number << 3 | _BYTES) + _varint(len(data)) + data
    return bytes(out)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Message:
    """The fields of one encoded message; a field that is absent reads as its default, as proto3 has it.

    Over a memoryview nothing is copied: nested messages and byte strings are then views too.
    """

    __slots__ = ("_fields",)

    def __init__(self, data: Buffer) -> None:
        self._fields: dict[int, list[int | Buffer]] = {}
        for number, value in _decode(data):
            self._fields.setdefault(number, []).append(value)

    def integer(self, number: int) -> int:
        """An int64, bool or enum field; the last one wins."""
        value = self._fields.get(number, (0,))[-1]
        if not isinstance(value, int):
            raise WireError(f"field {number} is not an integer")
        return value - (1 << 64) if value >> 63 else value

    def data(self, number: int) -> bytes:
        """A bytes field; the last one wins."""
        return self.all(number)[-1] if number in self._fields else b""

    def text(self, number: int) -> str:
        """A string field; what is not UTF-8 is shown as escapes, since it is read by people only."""
        return bytes(self.data(number)).decode("utf-8", "backslashreplace")

    def message(self, number: int) -> Message:
        """A nested message, empty if absent."""
        return Message(self.data(number))

    def all(self, number: int) -> list[bytes]:
        """Every occurrence of a repeated bytes or message field."""
        values = [value for value in self._fields.get(number, ()) if not isinstance(value, int)]
        if len(values) != len(self._fields.get(number, ())):
            raise WireError(f"field {number} is not a string, bytes or message")
        return cast("list[bytes]", values)

    def messages(self, number: int) -> list[Message]:
        """Every occurrence of a repeated message field."""
        return [Message(data) for data in self.all(number)]


def _decode(data: Buffer) -> Iterator[tuple[int, int | Buffer]]:
    """Fields in order; fixed-width ones, which nobody here reads, come as unsigned integers."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(data, at)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise WireError(f"wire type {kind} at byte {at}")
        if at + size > end:
            raise WireError(f"field {number} ends {at + size - end} bytes after the message")
        chunk = data[at : at + size]
        yield number, chunk if kind == _BYTES else int.from_bytes(chunk, "little")
        at += size


def _read_varint(data: Buffer, at: int) -> tuple[int, int]:
    value = 0
    for offset, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * offset
        if byte < 0x80:
            return value & _64_BITS, at + offset + 1
    raise WireError("a varint is cut off or too long")
