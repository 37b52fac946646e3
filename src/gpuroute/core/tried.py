"""Where a call has been: exact exclusion of tried endpoints, and of what fails together with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuroute.core.state import EndpointState


class Tried:
    """A container of endpoint states: the tried ones, those that share a node, rack or zone with a failed one, and, for
    a repeated attempt, those whose own failures are not yet forgotten: the next one had better not fail too.
    """

    __slots__ = ("domains", "states")

    def __init__(self) -> None:
        self.states: set[EndpointState] = set()
        self.domains: set[tuple[str, str]] = set()

    def failed(self, state: EndpointState) -> None:
        """It failed there, so prefer what does not share its fate."""
        self.domains.update(state.domains)

    def copy(self) -> Tried:
        """Another one with the same members."""
        other = Tried()
        other.states |= self.states
        other.domains |= self.domains
        return other

    def __contains__(self, state: object) -> bool:
        if state in self.states or (self.states and state.troubled):  # type: ignore[attr-defined]
            return True
        return bool(self.domains) and not self.domains.isdisjoint(state.domains)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.states)
