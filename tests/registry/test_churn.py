"""A fleet in which something changes all the time: following it leaves the processor to the calls."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from registry.watching import Writer, eventually, ids, quick

from gpuroute.registry.etcd import MAX_QUIET_S, QUIET, EtcdRegistry

if TYPE_CHECKING:
    from gpuroute.core.fleet import Fleet

pytestmark = pytest.mark.real_time


def test_deliveries_that_take_long_are_made_seldom(config, writer: Writer) -> None:
    """With 10,000 endpoints one takes some 40 ms; slices of 50 ms kept nearly a whole processor busy."""
    writer.put("a")
    spans: list[tuple[float, float]] = []
    last: list[Fleet] = []
    over = threading.Event()

    def take(fleet: Fleet) -> None:
        began = time.monotonic()
        time.sleep(0.1)
        last.append(fleet)
        spans.append((began, time.monotonic()))

    def churn() -> None:
        number = 0
        while not over.wait(0.005):
            number += 1
            writer.put(f"e{number % 5}", weight=number)

    patient = quick(f"etcd://{config.members[0]}{config.prefix}", heartbeat=60.0)
    subscription = EtcdRegistry(patient, grace=0.0).subscribe(take)
    thread = threading.Thread(target=churn)
    try:
        eventually(lambda: spans, "the first view")
        thread.start()
        eventually(lambda: len(spans) >= 4, "three more")
        over.set()
        thread.join()
        writer.put("last")
        eventually(lambda: "last" in ids(last[-1]), "the end of it")
    finally:
        over.set()
        subscription.close()
    assert subscription.error is None
    for (began, ended), (after, _) in pairwise(spans):
        assert after - ended >= min(MAX_QUIET_S, QUIET * (ended - began)) - 0.001
