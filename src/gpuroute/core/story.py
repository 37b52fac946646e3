"""What errors tell: where a call has been, and why nobody could take it. No credential is ever in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuroute.errors import NoEndpointAvailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.call import Call
    from gpuroute.core.pool import Pool


def tell(history: Sequence[Attempt]) -> str:
    """The attempts of a call in one line; "" if there was none."""
    if not history:
        return ""
    parts = (f"{a.state.id} {a.reason or (a.outcome.label if a.outcome else 'live')}" for a in history)
    return f"{len(history)} attempt{'s' * (len(history) != 1)}: {', '.join(parts)}"


def with_story(call: Call, text: str) -> str:
    """A reason, and the attempts that came before."""
    story = tell(call.history)
    return f"{text} ({story})" if story else text


def nobody(call: Call, now: float) -> NoEndpointAvailable:
    """The error of a call that nobody may take now."""
    pool = call.pool
    pool.shared.signals.no_endpoint += 1
    retry_after = pool.retry_after(now)
    return NoEndpointAvailable(with_story(call, why_nobody(pool, retry_after)), retry_after=retry_after)


def why_nobody(pool: Pool, retry_after: float | None) -> str:
    """Which kind of nothing a pool has to offer, and when the earliest endpoint returns."""
    size, routable = len(pool.snapshot.states), len(pool.snapshot.routable)
    if not size:
        why = "the registry lists no endpoint for it, or none in the protocol of this client"
    elif not routable:
        why = f"none of its {size} endpoints is in service (drained, warming or weight 0)"
    else:
        why = f"none of its {routable} endpoints may take a call now"
    soon = "" if retry_after is None else f"; the earliest returns in {retry_after:.2f} s"
    return f"pool {pool.name!r}: {why}{soon}"
