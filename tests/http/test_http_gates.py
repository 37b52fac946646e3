"""Who waits for a connection gets the next one that is free, and waits no longer than it said."""

from __future__ import annotations

import asyncio
from typing import Any

import httpcore
import pytest

from gpuroute.transports.gates import AsyncGate


def test_who_waits_longest_is_next_and_late_comers_stand_in_line() -> None:
    async def scenario() -> list[str]:
        gate, order = AsyncGate(httpcore, 1), []

        async def hold(name: str) -> None:
            await gate.enter(name, 30)
            order.append(name)
            gate.leave(name)

        await gate.enter("first", 30)
        waiting = [asyncio.create_task(hold(name)) for name in ("second", "third")]
        await asyncio.sleep(0)
        gate.leave("first")
        await hold("last")
        await asyncio.gather(*waiting)
        assert gate.holders == set()
        return order

    assert asyncio.run(scenario()) == ["second", "third", "last"]


def test_a_wait_ends_in_time_though_places_come_and_go() -> None:
    async def scenario() -> None:
        gate = AsyncGate(httpcore, 1)
        await gate.enter("first", None)

        async def crowd() -> None:
            holder: Any = "first"
            while True:  # the place is never free when others look
                gate.leave(holder)
                await gate.enter(holder, None)
                await asyncio.sleep(0)

        others = asyncio.create_task(crowd())
        async with asyncio.timeout(30):
            await gate.enter("patient", None)
        others.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("together", [False, True])
def test_who_gives_up_hands_its_place_on(together: bool) -> None:
    async def scenario() -> None:
        gate = AsyncGate(httpcore, 1)
        await gate.enter("first", None)
        quitter, next_one = (asyncio.create_task(gate.enter(name, None)) for name in ("quitter", "next"))
        await asyncio.sleep(0)
        if together:
            gate.leave("first")
            assert gate.holders == {"quitter"}
            quitter.cancel()
        else:
            quitter.cancel()
            gate.leave("first")
        with pytest.raises(asyncio.CancelledError):
            await quitter
        await asyncio.wait_for(next_one, 30)
        assert gate.holders == {"next"}
        with pytest.raises(httpcore.PoolTimeout):
            await gate.enter("late", 0.01)
        gate.leave("late")
        gate.leave("next")
        gate.leave("next")
        assert gate.holders == set()
        await gate.enter("after", 0)

    asyncio.run(scenario())
