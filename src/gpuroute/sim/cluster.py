"""Sweeps on a Ray cluster (`--engine ray`, extra `gpuroute[ray]`), for those who outgrow one machine.

A run is a pure function, so a cluster changes nothing but the time: the rows are those of local processes, to the byte.
`RAY_ADDRESS` names the cluster; without it Ray starts on this machine with `jobs` processes. Its nodes need gpuroute
installed, and a trace file of one's own at the same path.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Task = tuple[str, int]


def spread(work: Callable[..., Any], what: object, tasks: Sequence[Task], jobs: int) -> Iterator[tuple[Task, Any]]:
    """`work(what, *task)` of every task, as they end. Whatever is left when the caller stops is cancelled."""
    ours = not ray.is_initialized()
    if ours:
        local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": max(1, jobs), "include_dashboard": False}
        ray.init(log_to_driver=False, logging_level="error", **local)
    remote, shared = ray.remote(num_cpus=1)(work), ray.put(what)
    waiting = {remote.remote(shared, *task): task for task in tasks}
    try:
        while waiting:
            (done, *_), _ = ray.wait(list(waiting), num_returns=1)
            yield waiting.pop(done), ray.get(done)
    finally:
        for left in waiting:
            ray.cancel(left, force=True)
        if ours:
            ray.shutdown()
