"""A pre-fork server (gunicorn, uWSGI): the router is made before the fork, the first call of each worker starts it.

No watcher, socket or counter of the parent is shared: a worker begins with the parent's view of the fleet, if it had
one, and an in-flight count of its own.
"""

import os

from _fleet import fleet

import gpuroute
import gpuroute.httpx2

WORKERS = 3


def work(router: gpuroute.Router, pool: str) -> None:
    with gpuroute.httpx2.Client(router) as client:
        for number in range(4):
            body = {"model": pool, "prompt": f"Worker {os.getpid()}, question {number}", "max_tokens": 4}
            client.post(f"http://{pool}/v1/completions", json=body).raise_for_status()
    print(f"worker {os.getpid()}: 4 calls, in flight {router.snapshot().pools[pool].in_flight}", flush=True)


with fleet() as pool:
    router = gpuroute.Router.from_env()
    workers = []
    for _ in range(WORKERS):
        worker = os.fork()
        if worker == 0:
            status = 1
            try:
                work(router, pool)
                status = 0
            finally:
                os._exit(status)  # a worker must not run the parent's exits
        workers.append(worker)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers]
    router.close()
if any(statuses):
    raise SystemExit(f"workers ended with {statuses}")
