"""C4: planted secrets come out nowhere: every public object, every way of showing it."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import pickle
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import gpuroute.httpx2
from gpuroute.core.fleet import PoolConfig, PoolSpec
from gpuroute.registry.etcd_config import EtcdConfig
from gpuroute.testing import FakeRegistry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CANARY = "canary-0b5e55ed"
SHOW: dict[str, Callable[[Any], object]] = {
    "repr": repr,
    "str": str,
    "format": lambda thing: f"{thing} {thing!r} {thing!s}" + "%r" % [thing],
    "vars": lambda thing: repr(vars(thing)),
    "asdict": lambda thing: repr(dataclasses.asdict(thing)),
    "json of asdict": lambda thing: json.dumps(dataclasses.asdict(thing), default=repr),
    "as_dict": lambda thing: json.dumps(thing.as_dict()),
    "json": lambda thing: json.dumps(thing, default=lambda other: getattr(other, "__dict__", repr(other))),
    "pickle": lambda thing: pickle.dumps(thing).decode("latin-1"),
    "copy": lambda thing: repr(copy.deepcopy(thing)),
}


def leaks(thing: object) -> list[str]:
    """The ways of showing a thing that let a canary out. What a thing does not offer cannot leak."""
    found = []
    for name, show in SHOW.items():
        try:
            if CANARY in str(show(thing)):
                found.append(name)
        except (TypeError, AttributeError, ValueError):  # it has no such form, or refuses it
            continue
    return found


def locals_of_our_frames(error: BaseException | None) -> Iterator[str]:
    """What a crash reporter prints of gpuroute's own frames, of the error and its causes."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if Path(frame.f_code.co_filename).is_relative_to(Path(gpuroute.__file__).parent):
                yield f"{frame.f_code.co_qualname}: {dict(frame.f_locals)!r}"
        error = error.__cause__ or error.__context__


@pytest.fixture
def router() -> Iterator[gpuroute.Router]:
    endpoint = gpuroute.Endpoint(
        "gpu-1", "http://127.0.0.1:1", headers={"authorization": f"Bearer {CANARY}", "x-api-key": CANARY}
    )
    pool = PoolSpec("llama", (endpoint,), PoolConfig(policy="p2c"))
    environ = {"GPUROUTE_ETCD_USER": "root", "GPUROUTE_ETCD_PASSWORD": CANARY, "GPUROUTE_SALT": CANARY}
    settings = gpuroute.Settings.from_env(environ, attempts=2)
    with gpuroute.Router(FakeRegistry({"llama": pool}), settings=settings) as router:
        router.ready()
        yield router


def test_c4_objects_do_not_show_secrets(router: gpuroute.Router) -> None:
    call = router.call("llama", key=CANARY)
    attempt = call.next_attempt(router.clock())
    pool = router.pool("llama")
    things = {
        "settings": router.settings,
        "router": router,
        "view": router.snapshot(),
        "explanation": router.explain("llama", key=CANARY),
        "call": call,
        "attempt": attempt,
        "state": attempt.state,
        "pool": pool,
        "spec": pool.spec,
        "pool config": pool.spec.config,
        "endpoint": attempt.endpoint,
        "etcd config": EtcdConfig.from_url("etcd://h:2379", user="root", password=CANARY),
        "routed attempt": router.attempt("llama", key=CANARY),
    }
    call.close(router.clock())
    assert {name: found for name, thing in things.items() if (found := leaks(thing))} == {}


def test_c4_failed_calls_do_not_show_secrets(router: gpuroute.Router, caplog: pytest.LogCaptureFixture) -> None:
    """Errors, their notes, the locals of our frames, and the log: of a call that carries credentials and fails."""
    headers = {"authorization": f"Bearer {CANARY}", "x-gpuroute-key": CANARY}
    with caplog.at_level(logging.DEBUG, "gpuroute"), gpuroute.httpx2.Client(router) as client:
        with pytest.raises(gpuroute.httpx2.httpx2.HTTPError) as caught:
            client.post("http://llama/v1/completions", json={"prompt": CANARY}, headers=headers)
        with pytest.raises(gpuroute.UnknownPool) as unknown:
            client.get("http://nobody/", headers=headers)
    for error in (caught.value, unknown.value):
        assert {"json", "pickle"} >= set(leaks(error))  # the client library's errors hold the caller's own request
        assert CANARY not in "".join(traceback.format_exception(error))
        assert CANARY not in repr(getattr(error, "__notes__", []))
        assert list(locals_of_our_frames(error)) != []
        assert [shown for shown in locals_of_our_frames(error) if CANARY in shown] == []
    assert caplog.records != []
    assert [record for record in caplog.records if CANARY in record.getMessage() + repr(vars(record))] == []
