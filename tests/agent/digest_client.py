"""One client of a digest as a process: says on each line of its input what it knows, as a line of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

from gpuroute.router import Router

CALLS = 20


def look(router: Router) -> dict[str, object]:
    """Reports by endpoint, trouble, where calls would go now, and the CPU seconds of this process."""
    view = router.snapshot()
    said = {one.id: one.report for one in view.pools["p"].endpoints if one.report is not None}
    picks: Counter[str] = Counter()
    for _ in range(CALLS):
        call = router.call("p", tokens=4_000)
        picks[call.next_attempt(router.clock()).endpoint.id] += 1
        call.close(router.clock())
    return {
        "waiting": {name: report.waiting for name, report in said.items()},
        "sources": sorted({report.source for report in said.values()}),
        "age": max((report.age_s for report in said.values()), default=None),
        "error": view.digest_error,
        "picks": picks,
        "cpu": time.process_time(),
    }


def main() -> None:
    with Router(registry=sys.argv[1], digest=sys.argv[2], agent_key=sys.argv[3], asks="off") as router:
        router.ready(60)
        for _ in sys.stdin:
            print(json.dumps(look(router)), flush=True)


if __name__ == "__main__":
    main()
