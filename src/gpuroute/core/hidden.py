"""Header values that only the transport sees: credentials of endpoints must not come out with a `repr` or a dump."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class HiddenHeaders(Mapping[str, str]):
    """An immutable mapping that shows names but no values, in no form; pickled only if it is empty."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Mapping[str, str]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> str:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, HiddenHeaders):
            return self._entries == other._entries
        return self._entries == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"HiddenHeaders({', '.join(self._entries)})"

    def __copy__(self) -> HiddenHeaders:
        return self

    def __deepcopy__(self, memo: object) -> HiddenHeaders:
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        if self._entries:
            raise TypeError("an Endpoint with headers cannot be pickled: they are secret")
        return HiddenHeaders, ({},)
