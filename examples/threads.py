"""One router and one client for all threads of a service; nothing needs a lock or a client per thread."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from _fleet import fleet

import gpuroute
import gpuroute.httpx2

with fleet() as pool, gpuroute.Router.from_env() as router, gpuroute.httpx2.Client(router) as client:

    def ask(number: int) -> str:
        body = {"model": pool, "prompt": f"Question {number}", "max_tokens": 8}
        response = client.post(f"http://{pool}/v1/completions", json=body).raise_for_status()
        return str(response.extensions["gpuroute"]["endpoint"])

    with ThreadPoolExecutor(8) as threads:
        served = Counter(threads.map(ask, range(40)))
    for endpoint, calls in sorted(served.items()):
        print(f"{endpoint}: {calls} calls")
    left = router.snapshot().pools[pool].in_flight
    print(f"in flight at the end: {left}")
