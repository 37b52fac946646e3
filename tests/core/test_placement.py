"""Where prefixes were placed: remembered from the first call on, within a bound, whatever comes."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import TYPE_CHECKING

from stage import OK, Stage, places

from gpuroute.core.candidates import Ask
from gpuroute.core.placement import OWNERS, Placements

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_pool_remembers_placements_from_its_first_call_on() -> None:
    """An empty memory is false in a condition: `placements or Placements()` once gave the picker one of its own."""
    stage = Stage(8, policy="prefix")
    assert stage.pool.snapshot.kit.placements is stage.pool.placements
    first = stage.drive(lambda _: OK, ask=Ask(ladder=(7, 70, 700)))
    assert stage.pool.placements.deepest((7, 70, 999)) == places(first)[0]


def test_a_conversation_goes_back_to_where_a_spill_put_it() -> None:
    stage = Stage(8, policy="prefix")
    home = places(stage.drive(lambda _: OK, ask=Ask(ladder=(1, 2, 3))))[0]
    crowd = [stage.start(ask=Ask(ladder=(1, 2, 3))) for _ in range(3)]
    elsewhere = next(attempt.state.id for attempt in crowd if attempt.state.id != home)
    for attempt in crowd:
        attempt.finish(OK[0], stage.clock())
    assert places(stage.drive(lambda _: OK, ask=Ask(ladder=(1, 2, 3, 4))))[0] == elsewhere


def test_the_deepest_known_prefix_decides() -> None:
    memory = Placements()
    memory.remember((1, 2, 3), "deep")
    memory.remember((1,), "shallow")
    assert memory.deepest((1, 2, 3, 4)) == "deep"
    assert memory.deepest((1, 20)) == "shallow"
    assert memory.deepest((9,)) is None
    memory.forget(3)
    memory.forget(2)
    assert memory.deepest((1, 2, 3)) == "shallow"


def test_what_is_used_outlives_what_is_not() -> None:
    memory = Placements(capacity=100)
    for key in range(1_000):
        memory.remember((key,), "somewhere")
        memory.remember((-1,), "home")
    assert memory.deepest((-1,)) == "home"
    assert memory.deepest((0,)) is None


def test_a7_two_hundred_thousand_prompts_level_off_under_the_cap() -> None:
    memory, sizes = Placements(capacity=5_000), []
    for prompt in range(200_000):
        ladder = (3 * prompt, 3 * prompt + 1, 3 * prompt + 2)
        memory.remember(ladder, "gpu-1")
        if prompt % 10_000 == 0:
            sizes.append(sys.getsizeof(memory._young) + sys.getsizeof(memory._old))
    assert len(memory) <= 2 * memory.capacity + 3
    assert max(sizes[len(sizes) // 2 :]) <= max(sizes[: len(sizes) // 2])


def test_a7_endpoints_that_come_and_go_leave_a_bounded_trace(eventually: Callable[..., None]) -> None:
    stage = Stage(2, policy="prefix")
    gone: list[weakref.ref[object]] = []
    for generation in range(1_500):
        stage.update({"gpu-0": 1.0, f"pod-{generation}": 1.0})
        stage.drive(lambda _: OK, ask=Ask(ladder=(generation,)))
        gone.append(weakref.ref(stage.state(f"pod-{generation}")))
    stage.update({"gpu-0": 1.0})

    def kept() -> int:
        gc.collect()
        return sum(ref() is not None for ref in gone)

    # MAX_DEPARTED are kept for flaps. Who else of this process holds one for a moment lets go of it.
    eventually(lambda: kept() <= 1_000, "what left earlier is forgotten")
    assert len(stage.pool.snapshot.states) == 1
    assert not stage.pool.shared.limited


def test_a7_sessions_keep_no_state_at_all() -> None:
    stage = Stage(4, policy="session")
    for session in range(2_000):
        stage.drive(lambda _: OK, ask=Ask(key=session << 50))
    assert len(stage.pool.placements) == 0
    assert stage.residue() == {}


def test_the_latest_few_that_were_given_a_prefix_are_known() -> None:
    memory = Placements()
    for number in range(2 * OWNERS):
        memory.remember((1, 10 + number), f"gpu-{number}")
    memory.remember((1,), "gpu-9")
    assert list(memory.depths((1, 10))) == ["gpu-0", "gpu-9", *[f"gpu-{n}" for n in range(15, 7, -1) if n != 9]]
    assert memory.depths((1,)) == dict.fromkeys([f"gpu-{n}" for n in (9, 15, 14, 13, 12, 11, 10, 8)], 0)
    assert memory.deepest((1, 999)) == memory.owner(1) == "gpu-9"
    assert memory.depths((999,)) == {}
