"""`gpuroute chaos` itself, in small: its keys, its verdict, and that a run leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from fault_world import ask

from gpuroute.cli import chaos
from gpuroute.cli.chaos.callers import Crowd, Seen
from gpuroute.cli.chaos.etcd import Cluster
from gpuroute.cli.chaos.fleet import ChaosFleet
from gpuroute.cli.chaos.footprint import Footprints, Sample
from gpuroute.cli.chaos.notes import Notes, Records
from gpuroute.cli.chaos.script import Happened
from gpuroute.cli.chaos.sends import CALLS, Followed, Send, sends
from gpuroute.cli.chaos.verdict import Verdict
from gpuroute.core.outcome import Outcome
from gpuroute.core.signals import Signals
from gpuroute.errors import RegistryUnavailable
from gpuroute.testing import answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.core.endpoint import Endpoint
    from gpuroute.testing import GpuServer


def run(*arguments: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "gpuroute", "chaos", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.timeout(360)
def test_a_small_run_with_continuation() -> None:
    faults = [f"--only={kind}" for kind in ("cut", "kill", "hang", "busy", "error")]
    arguments = ("--minutes=0.2", "--servers=5", "--callers=8", "--think=0.2", "--no-etcd", "--continuation")
    for _ in range(3):
        counts, told = run(*arguments, *faults)
        if "this run tells little" not in told:  # as a run says that missed a bar while it stood still itself
            break
    assert tuple(counts) == chaos.KEYS
    assert counts["calls"] > 20, told
    assert counts["caller_failures"] <= 1, told
    zeroes = ("interrupted", "doubled_after_first_byte", "lost_events", "duplicated_events", "residual_in_flight")
    assert [counts[name] for name in zeroes] == [0] * 5, told
    assert "registry: a file" in told
    assert "the script itself failed" not in told


def test_a_small_crowd_is_waited_for_until_an_outage_can_be_judged() -> None:
    """Twenty calls in a row must end well; eight callers make fewer in the second that a short run has for it."""
    crowd = Crowd(Any, "p", 1, random.Random(1), think_s=1.0)  # type: ignore[arg-type]

    async def scenario() -> int:
        waiting = asyncio.create_task(crowd.more(3, within_s=60.0))
        ended = 0
        while not waiting.done():
            crowd.notes.add(seen())
            ended += 1
            await asyncio.sleep(0.05)
        return ended

    assert asyncio.run(scenario()) >= 3
    asyncio.run(crowd.more(3, within_s=0.1))  # and not for ever
    crowd.close()


def noted(*notes: Any) -> Notes[Any]:
    kept: Notes[Any] = Notes()
    for note in notes:
        kept.add(note)
    return kept


def test_an_election_is_no_error_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that knows of no leader leaves the field out; the fault was lost, and the run went on without it."""
    cluster = object.__new__(Cluster)
    cluster._clients = ["127.0.0.1:1", "127.0.0.1:2"]
    rows = [
        {"Endpoint": f"http://{at}", "Status": {"header": {"member_id": n}}} for n, at in enumerate(cluster._clients, 1)
    ]
    monkeypatch.setattr(cluster, "_ctl", lambda *args: json.dumps(rows))
    assert cluster.leader() is None
    rows[0]["Status"]["leader"] = rows[1]["Status"]["leader"] = 2
    assert cluster.leader() == 1


def test_a_record_that_has_to_wait_for_a_quorum_is_no_error_of_the_script() -> None:
    """It is written when there is one: a server that was flapped or drained meanwhile was left half way."""

    class Waiting:
        def put(self, endpoint: Endpoint) -> None:
            raise RegistryUnavailable("took no record within 5 s")

    fleet = ChaosFleet(4, etcd=False, say=str)
    fleet._book = Waiting()  # type: ignore[assignment]

    async def scene() -> None:
        ident = await fleet.dig_hole()
        assert list(fleet._holes) == [ident]
        for one in fleet._holes.pop(ident):
            one.close()

    asyncio.run(scene())
    fleet.wire.close()


def test_what_servers_say_is_kept_word_by_word_and_nothing_of_who_is_gone(
    gpus: Callable[..., list[GpuServer]],
) -> None:
    one, other = gpus(2)
    told = {"x-request-id": "a", "x-gpuroute-attempt": "2", "x-request-timeout": "250"}
    odd = {"x-request-id": "b", "x-gpuroute-attempt": "x", "x-request-timeout": "1.5"}
    with httpx2.Client(base_url=one.url, timeout=60) as client:
        for headers in (told, odd):
            client.post("/v1/completions", json=ask(1, stream=False), headers=headers).raise_for_status()
    records = Records()
    records.take("gpu-0", one.url)
    gone = other.url
    records.take("gpu-1", gone)
    other.stop()
    with pytest.raises(OSError, match="refused"):
        records.take("gpu-1", gone)
    records.take("gpu-0", one.url)
    found = records.read()
    assert [(name, state["received"]) for name, state in found] == [("gpu-0", 2), ("gpu-1", 0), ("gpu-0", 2)]
    assert [found[0][1]["wire"][ident][0][2:] for ident in "ab"] == [["finished", 2, 250], ["finished", 1, None]]
    records.close()


def verdict(
    *seen: Seen,
    outage: tuple[float, float] | None = None,
    wire: Any = (),
    happened: tuple[Happened, ...] = (),
    lags: tuple[tuple[float, float], ...] = (),
    footprints: Footprints | None = None,
    **signals: int,
) -> Verdict:
    pool = SimpleNamespace(
        shared=SimpleNamespace(signals=Signals(**signals), in_flight=()), snapshot=SimpleNamespace(states=())
    )
    crowd = Crowd(Any, "p", 1, random.Random(1), think_s=1.0)  # type: ignore[arg-type]
    for note in seen:
        crowd.notes.add(note)
    for lag in lags:
        crowd._lags.add(lag)
    script = SimpleNamespace(happened=happened, outage=outage, calm_until=5.0, footprints=footprints)
    fleet = SimpleNamespace(pool="p", wire=noted(*([("gpu-0", {"wire": wire})] if wire else [])))
    router = SimpleNamespace(pool=lambda name: pool)
    soak = footprints is not None
    return Verdict(crowd, script, fleet, router, continuation=False, soak=soak)  # type: ignore[arg-type]


def seen(**fields: Any) -> Seen:
    told = {"ident": "1", "began": 1.0, "timeout": 3.0, "expected": answer("x", 5), "first": 1.1, "ended": 2.0}
    one = Seen(**{**told, "text": answer("x", 5), **fields})
    one.end(one.ended)
    return one


def test_the_verdict_sees_what_it_is_there_to_see() -> None:
    whole = answer("x", 5)
    assert verdict(seen()).missed() == []
    assert verdict(seen(text=whole[:-4])).counts()["lost_events"] == 1
    assert verdict(seen(text=whole[:8] + whole[4:])).counts()["duplicated_events"] > 0
    assert verdict(seen(error="x", text=whole[:8])).counts()["lost_events"] == 0
    assert verdict(seen(error="x")).counts()["caller_failures"] == 1
    assert verdict(seen(error="x", interrupted=True)).counts()["interrupted"] == 1
    assert verdict(seen(ended=4.2)).counts()["beyond_deadline"] == 1
    assert verdict(seen(ended=4.05)).counts()["beyond_deadline"] == 0


def send(number: int, first: float | None, broke: float | None, endpoint: str = "gpu-0") -> Send:
    return Send(endpoint, number, 10.0, first, broke)


def left(at: float, number: int, *, read: float = 9.0) -> list[Any]:
    """The record of a request that left at this moment, of a call whose deadline is 10."""
    return [read, None, "", number, int((10.0 - at) * 1e3)]


@pytest.mark.parametrize(
    ("sends", "rows", "doubled"),
    [
        ([send(1, 1.1, None)], [left(1.0, 1)], 0),
        ([send(1, None, 1.0), send(2, 1.2, None)], [left(0.9, 1), left(1.1, 2)], 0),  # a retry; the first is read late
        ([send(1, 1.1, 1.3), send(2, 1.4, None)], [left(1.0, 1), left(1.3, 2)], 0),  # a continuation
        ([send(1, 1.1, 1.3), send(2, None, 1.4), send(3, 1.5, None)], [left(1.3, 2), left(1.45, 3)], 0),  # repeated
        ([send(1, 1.1, 1.3), send(2, None, 1.6), send(3, 1.5, None)], [left(1.3, 2), left(1.45, 3)], 0),  # hedged
        ([send(1, 1.1, None), send(2, None, 1.2)], [left(1.0, 1), left(1.05, 2)], 0),  # a hedge that lost
        ([send(1, 1.1, None), send(2, None, 1.2)], [left(1.0, 1), left(1.15, 2)], 1),  # and one that left too late
        ([send(1, 1.1, None)], [left(1.0, 1), left(1.2, 1)], 1),  # the same attempt once more
        ([send(1, 1.1, 1.9), send(2, 1.6, None)], [left(1.0, 1), left(1.5, 2)], 1),  # continued before it broke
        ([send(1, 1.1, None)], [left(1.0, 1), left(1.05, 2)], 1),  # nobody here sent that
        ([send(1, 1.1, None), send(1, 1.6, None)], [left(1.0, 1), left(1.5, 1)], 1),  # the caller's own SDK repeats
        ([send(1, None, 1.05), send(1, 1.6, None)], [left(1.0, 1), left(1.5, 1)], 0),
        ([send(1, 1.1, None), send(2, None, 1.2, "gpu-1")], [left(1.0, 1), left(1.05, 2)], 1),  # not there
        ([send(1, 1.1, None)], [[1.05, None, "", 1, None]], 0),  # without a deadline: when it was read
        ([send(1, 1.1, None)], [[1.05, None, "", 1, None], [1.2, None, "", 1, None]], 1),
    ],
)
def test_what_leaves_while_another_attempt_answers_is_a_double(sends: Any, rows: Any, doubled: int) -> None:
    assert verdict(seen(sends=sends), wire={"1": rows}).counts()["doubled_after_first_byte"] == doubled


def test_the_account_of_a_call_is_that_of_its_attempts_and_of_whoever_repeats_above() -> None:
    with Followed(endpoints={"p": ["http://127.0.0.1:1", "http://127.0.0.1:2"]}, clock=lambda: 5.0) as router:
        calls: list[Any] = []
        token = CALLS.set(calls)
        one, other = router.call("p", timeout=3.0), router.call("p")
        CALLS.reset(token)
        router.call("p").close(5.0)
        attempt = one.next_attempt(5.0)
        attempt.first_token(5.5)
        one.finish(attempt, Outcome.FAILED, 6.0, resumable=True)
        again = one.next_attempt(6.1)
        again.first_token(6.2)
        one.finish(again, Outcome.SUCCESS, 7.0)
        other.close(7.0)
        assert calls == [one, other]
        assert sends(calls) == [
            Send(attempt.endpoint.id, 1, 8.0, 5.5, 6.0),
            Send(again.endpoint.id, 2, 8.0, 6.2, None),
        ]


def silent(**fields: Any) -> Happened:
    return Happened("hang", "gpu-0", 10.0, 16.0, **fields)


def test_who_is_silent_must_be_left_while_this_process_runs() -> None:
    def missed(one: Happened, *lags: tuple[float, float]) -> list[str]:
        return verdict(seen(began=1.0, ended=1.5), happened=(one,), lags=lags).missed()

    assert missed(silent(noticed=10.1, out_s=0.9)) == []
    assert missed(silent()) == []  # nobody was there to notice
    assert missed(silent(noticed=10.1, out_s=1.3)) == ["hang gpu-0 out after 1.30 s, may be 1.00"]
    assert missed(silent(noticed=10.1, out_s=1.3), (10.0, 5.0), (20.0, 1.0)) == [
        "hang gpu-0 out after 1.30 s, may be 1.00"
    ], "it stood still before and after that"
    assert missed(silent(noticed=10.1, out_s=1.3), (11.0, 0.4)) == []
    assert missed(silent(noticed=10.1, out_s=1.3), (10.2, 0.4), (11.6, 0.3)) == [
        "hang gpu-0 out after 1.10 s, may be 1.00"
    ], "0.1 s at each end"
    assert missed(Happened("slow", "gpu-0", 10.0, 16.0, noticed=10.1, out_s=5.0)) == []


def test_an_outage_of_everybody_is_judged_by_its_end() -> None:
    calls = [seen(ident=str(n), began=10 + n / 10, ended=10.05 + n / 10) for n in range(40)]
    assert verdict(*calls, outage=(5.0, 10.0)).counts()["recovery_s"] == 0.0
    calls[7] = seen(began=10.7, ended=10.8, error="refused")
    found = verdict(*calls, outage=(5.0, 10.0)).counts()
    assert (found["recovery_s"], found["caller_failures"]) == (0.7, 0)
    calls[30] = seen(began=13.0, ended=13.1, error="refused")
    assert verdict(*calls, outage=(5.0, 10.0)).counts()["recovery_s"] == 99.0


def footprints(memory: Callable[[int], float], files: Callable[[int], int] = lambda n: 30) -> Footprints:
    found = Footprints()
    found.samples = [Sample(5.0 * n, memory(n), files(n)) for n in range(120)]
    return found


@pytest.mark.parametrize(
    ("grown", "missed"),
    [
        (footprints(lambda n: 100.0 + min(n, 30)), []),  # it warms up, and then stands still
        (footprints(lambda n: 100.0 + 5 * (n % 7 == 0)), []),  # a bubble is no leak
        (footprints(lambda n: 100.0 + n / 20), ["memory grew by 2.7% after the warm-up, may be 2%"]),
        (footprints(lambda n: 100.0, lambda n: 30 + n // 10), ["open files grew by 6, may be 4"]),
        (Footprints(), ["memory and open files could not be judged: too short a run, or no /proc"]),
    ],
)
def test_a_soak_tells_a_leak_from_a_warm_up(grown: Footprints, missed: list[str]) -> None:
    assert verdict(seen(), footprints=grown).missed() == missed


def test_footprints_are_of_this_process() -> None:
    found = Footprints()
    found.take()
    assert found.growth() is None
    if Path("/proc/self/statm").exists():
        assert found.samples[0].memory > 10
        assert found.samples[0].files >= 3
        assert "MiB" in found.series()


@pytest.mark.parametrize("arguments", [["--servers=2"], ["--minutes=0"], ["--only=earthquake"]])
def test_nonsense_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from gpuroute.cli import main

    assert main(["chaos", *arguments]) == 2
    assert "expected --minutes above 0" in capsys.readouterr().err
