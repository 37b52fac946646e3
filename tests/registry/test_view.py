"""Distrust of the registry, in pure time: E5, E6 and E9 as far as the view decides them."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuroute.errors import InvalidRecord
from gpuroute.registry.view import View, document_of, document_records


def key(ident: str, pool: str = "llama") -> str:
    return f"{pool}/endpoints/{ident}"


def record(ident: str, **fields) -> dict:
    return {"url": f"http://{ident}:8000", **fields}


def view_of(*idents: str, grace: float = 5.0) -> View:
    view = View(grace=grace, where="at:")
    view.replace({key(ident): record(ident) for ident in idents}, 0.0)
    return view


def shown(view: View, now: float, pool: str = "llama") -> list[str]:
    return [endpoint.id for endpoint in view.pools(now)[pool].endpoints]


def test_a_listing_is_diffed_and_unchanged_pools_stay_the_same_objects() -> None:
    view = view_of("a", "b")
    view.put(key("x", "embed"), record("x"))
    before = view.pools(1.0)
    view.replace({key("a"): record("a"), key("b"): record("b", weight=2), key("x", "embed"): record("x")}, 2.0)
    after = view.pools(2.0)
    assert after["embed"] is before["embed"]
    assert after["llama"] is not before["llama"]
    assert [endpoint.weight for endpoint in after["llama"].endpoints] == [1.0, 2.0]


def test_pool_config_and_its_removal() -> None:
    view = view_of("a")
    view.put("llama/config", {"policy": "p2c"})
    assert view.pools(0.0)["llama"].config.policy == "p2c"
    view.put("llama/config", {"policy": 5})
    assert view.pools(0.0)["llama"].config.policy == "p2c", "a config that turned bad keeps its last good form"
    assert "policy" in view.problems["llama/config"]
    view.delete("llama/config", 1.0)
    assert view.pools(1.0)["llama"].config.policy is None
    assert not view.problems


def test_a_key_below_a_config_is_not_the_config() -> None:
    """It was taken for it, and its removal for the removal of the config."""
    view = View(grace=0.0)
    view.put("llama/config", {"policy": "p2c"})
    view.put("llama/config/old", {"policy": "random"})
    assert view.pools(0.0)["llama"].config.policy == "p2c"
    view.delete("llama/config/old", 0.0)
    assert view.pools(0.0)["llama"].config.policy == "p2c"


def test_keys_of_a_later_schema_are_ignored() -> None:
    view = view_of("a")
    view.put("llama/quotas/x", b"not json")
    view.put("whatever", b"")
    assert not view.problems
    assert list(view.pools(0.0)) == ["llama"]


BAD = {
    "empty": b"",
    "truncated": b'{"url": "http://c',
    "array": b"[]",
    "not-utf8": b"\xff\xfe",
    "bad-port": b'{"url": "http://c:70000"}',
    "bad-weight": b'{"url": "http://c", "weight": "abc"}',
    "huge": b'{"url": "http://c", "model": "' + b"x" * 2_000_000 + b'"}',
    "bad\\xffkey": b'{"url": "http://c"}',
}


def test_E5_bad_records_spoil_nothing_and_are_named_once() -> None:
    view = View(grace=5.0, where="/gpuroute/pools/")
    good = {key(f"good-{i}"): json.dumps(record(f"g{i}", unknown=[1])).encode() for i in range(5)}
    bad = {key(ident): value for ident, value in BAD.items()}
    view.replace({**good, **bad, "LLAMA/endpoints/a": b'{"url": "http://c"}'}, 0.0)
    assert shown(view, 0.0) == [f"good-{i}" for i in range(5)]
    assert set(view.problems) == {*bad, "LLAMA/endpoints/a"}
    for name, text in view.problems.items():
        assert text.startswith(f"/gpuroute/pools/{name}: ")
        assert len(text) < 400


def test_E5_a_record_that_turned_bad_keeps_its_last_good_form_until_its_key_goes() -> None:
    view = view_of("a", "b", "c")
    view.put(key("a"), b"{")
    assert shown(view, 1.0) == ["a", "b", "c"]
    assert list(view.problems) == [key("a")]
    view.put(key("a"), json.dumps(record("a", weight=3)).encode())
    assert view.pools(1.0)["llama"].endpoints[0].weight == 3
    assert not view.problems
    view.put(key("a"), b"")
    view.delete(key("a"), 2.0)
    assert shown(view, 2.0) == ["b", "c"]
    assert not view.problems


def test_E5_one_address_under_two_ids_is_reported_and_used() -> None:
    view = View(grace=5.0)
    view.replace({key("a"): record("x"), key("b"): {"url": "http://x:8000/"}}, 0.0)
    assert shown(view, 0.0) == ["a", "b"]
    assert view.warnings() == ("llama: b has the same URL as a; both are used",)
    view.put(key("b"), record("b"))
    view.pools(1.0)
    assert view.warnings() == ()


def test_E6_all_keys_vanish_and_return_within_the_grace() -> None:
    view = view_of("a", "b", "c", "d")
    for moment, ident in enumerate("abcd"):
        view.delete(key(ident), 10 + moment / 1000)
        assert shown(view, 10 + moment / 1000), "never empty"
    assert shown(view, 13.0) == ["a", "b", "c", "d"]
    assert "vanished" in view.warnings()[0]
    for ident in "abcd":
        view.put(key(ident), record(ident))
    assert shown(view, 13.0) == shown(view, 99.0) == ["a", "b", "c", "d"]
    assert view.warnings() == ()


def test_E6_all_keys_vanish_for_good() -> None:
    view = view_of("a", "b", "c", "d")
    view.replace({}, 10.0)
    assert shown(view, 14.999) == ["a", "b", "c", "d"]
    assert view.due() == 15.0
    assert shown(view, 15.0) == [], "no ghost after the grace, and the pool itself stays known"
    assert view.due() == math.inf


def test_E6_without_grace_an_empty_listing_is_taken_at_once() -> None:
    view = view_of("a", "b", grace=0.0)
    view.replace({}, 10.0)
    assert shown(view, 10.0) == []


@pytest.mark.parametrize(
    ("total", "gone", "held"), [(10, 6, True), (10, 5, False), (4, 2, False), (3, 2, False), (5, 3, True)]
)
def test_implausible_is_more_than_half_and_more_than_two(total: int, gone: int, held: bool) -> None:
    idents = [f"e{i}" for i in range(total)]
    view = view_of(*idents)
    for i, ident in enumerate(idents[:gone]):
        view.delete(key(ident), 10 + i / 100)  # one event each, as expiring leases are
    assert shown(view, 11.0) == (idents if held else idents[gone:])
    assert shown(view, 15.1) == idents[gone:]


def test_slow_departures_are_believed() -> None:
    idents = [f"e{i}" for i in range(8)]
    view = view_of(*idents)
    for i, ident in enumerate(idents[:7]):
        view.delete(key(ident), 10.0 * i)
        assert shown(view, 10.0 * i) == idents[i + 1 :]


def test_a_whole_pool_may_be_replaced_at_once() -> None:
    view = view_of("a", "b", "c", "d")
    view.replace({key(ident): record(ident) for ident in "wxyz"}, 10.0)
    assert shown(view, 10.0) == ["w", "x", "y", "z"]


def test_departures_that_were_believed_cost_nothing_when_their_grace_ends() -> None:
    """Each of thousands that left one by one made the whole pool be built and compared again, ten seconds later."""
    view = View(grace=10.0)
    for number in range(100):
        view.put(f"llama/endpoints/e{number}", b'{"url": "http://a"}')
    for number in range(40):
        view.delete(f"llama/endpoints/e{number}", float(number) / 10)
    before = view.pools(5.0)["llama"]
    assert len(before.endpoints) == 60
    for moment in (10.05, 12.0, 15.0):
        assert view.pools(moment)["llama"] is before
    assert view.due() == math.inf


def test_announced_departures_are_believed_at_once() -> None:
    view = view_of("a", "b", "c", "d")
    for ident in "abcd":
        view.put(key(ident), record(ident, state="draining") if ident != "d" else record(ident, weight=0))
        view.delete(key(ident), 10.0)
    assert shown(view, 10.0) == []


def test_E9_a_flapping_key_leaves_and_returns_as_the_same_endpoint() -> None:
    view = view_of("a", "b", "c", "d")
    original = view.pools(0.0)["llama"].endpoints[1]
    for second in range(0, 60, 2):
        view.delete(key("b"), float(second))
        assert shown(view, float(second)) == ["a", "c", "d"]
        view.put(key("b"), record("b"))
        assert view.pools(second + 0.5)["llama"].endpoints[1] == original


def test_E9_a_flap_of_the_only_endpoint_does_not_show() -> None:
    view = view_of("b")
    for second in range(0, 60, 2):
        view.delete(key("b"), float(second))
        assert shown(view, second + 0.5) == ["b"]
        view.put(key("b"), record("b"))
        assert shown(view, second + 1.0) == ["b"]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "bad", "delete"]), st.sampled_from("abcdef"), st.floats(0, 3)), max_size=40
)


@given(OPERATIONS, st.sampled_from([0.0, 1.0, 5.0]))
def test_any_history_ends_in_the_truth_once_the_grace_is_over(operations, grace: float) -> None:
    view, truth, now = View(grace=grace), set(), 0.0
    for what, ident, pause in operations:
        now += pause
        if what == "put":
            view.put(key(ident), record(ident))
            truth.add(ident)
        elif what == "delete":
            view.delete(key(ident), now)
            truth.discard(ident)
        else:
            view.put(key(ident), b"[")  # keeps what there was
        pools = view.pools(now)
        if "llama" in pools:
            found = {endpoint.id for endpoint in pools["llama"].endpoints}
            assert truth <= found, "nothing that is registered is ever hidden"
            assert found or not truth
            assert grace or found == truth
    settled = view.pools(now + grace + 0.001)
    assert {endpoint.id for spec in settled.values() for endpoint in spec.endpoints} == truth


# ------------------------------------------------------------------------------------------ documents


def test_a_document_round_trip() -> None:
    view = view_of("a", "b")
    view.put("llama/config", {"policy": "p2c"})
    view.put(key("x", "embed"), record("x", headers={"a": "b"}))
    document = json.loads(json.dumps(document_of(view.pools(0.0))))
    again = View(grace=0.0)
    again.replace(document_records(document, "f"), 0.0)
    assert again.pools(0.0) == view.pools(0.0)


def test_endpoints_without_an_id_and_as_bare_urls() -> None:
    document = {"pools": {"p": {"endpoints": ["http://a:1", {"url": "http://b:2/x"}, {"id": "c", "url": "http://c"}]}}}
    assert list(document_records(document, "f")) == [
        "p/config",
        "p/endpoints/a:1",
        "p/endpoints/b:2_x",
        "p/endpoints/c",
    ]


def test_bad_items_of_a_document_are_problems_of_their_own() -> None:
    items = ["http://a:1", "http://a:1", {"id": "a/b", "url": "http://c"}, {"weight": 1}, 5, "http://b:99999"]
    view = View(grace=0.0, where="f: ")
    view.replace(document_records({"pools": {"p": {"endpoints": items}, "Bad": {"endpoints": ["http://a"]}}}, "f"), 0.0)
    assert shown(view, 0.0, "p") == ["a:1"]
    texts = "\n".join(view.problems.values())
    for part in ("item 2 repeats", "bad id", "url is missing", "a JSON object", "bad port", "bad pool name 'Bad'"):
        assert part in texts


@pytest.mark.parametrize(
    "document", [None, [], {}, {"pools": []}, {"pools": {"p": []}}, {"pools": {"p": {"endpoints": {}}}}]
)
def test_a_document_of_another_shape_is_refused_whole(document: object) -> None:
    with pytest.raises(InvalidRecord, match=r"^f: .*accepted: "):
        document_records(document, "f")


# ------------------------------------------------------------------------------------ what nobody reads


def test_settings_that_nobody_reads_are_named_with_what_was_meant_and_kept() -> None:
    view = view_of("a")
    view.put(
        "llama/config", {"policy": "p2c", "time_out": 2, "Max-In-Flight": 3, "canary": 4, "salt": "s3cret", "x": None}
    )
    assert view.pools(0.0)["llama"].config.options == {"time_out": 2, "Max-In-Flight": 3, "canary": 4, "x": None}
    assert not view.problems, "a newer writer may mean something by them"
    text = view.unread()["llama/config"]
    assert text.startswith(
        "at:llama/config: nobody reads 'Max-In-Flight' (did you mean max_in_flight?), 'canary', 'time_out' "
    )
    assert "'time_out' (did you mean timeout?); accepted: policy, timeout, attempts" in text
    assert "watchdog" in text
    assert "s3cret" not in text
    view.put("llama/config", {"policy": "p2c", "hedge": True})
    assert view.unread() == {}
    view.put("llama/config", {"time_out": 2})
    view.put("llama/config", {"policy": 5})
    assert view.unread() == {}, "a bad record is told as one"
    view.put("llama/config", {"time_out": 2})
    view.delete("llama/config", 1.0)
    assert view.unread() == {}


def test_slips_in_records_are_named_once_for_a_pool_and_the_fields_of_later_releases_are_not() -> None:
    view = View(grace=5.0)
    later = {"priority": 1, "weights": None, "shards": [1], "gpu": {"kind": "H100", "vendor": "x"}}
    wrong = {"weigth": 2, "capacity": {"max_inflight": 3}}
    view.replace({key(i): record(i, **later, **wrong) for i in "abc"} | {key("d", "embed"): record("d", weigth=1)}, 0.0)
    assert view.unread() == {
        key("a"): "llama/endpoints/a: nobody reads 'weigth' (did you mean weight?); "
        "nobody reads 'max_inflight' (did you mean max_in_flight?) in capacity",
        key("d", "embed"): "embed/endpoints/d: nobody reads 'weigth' (did you mean weight?)",
    }
    assert shown(view, 0.0) == ["a", "b", "c"]
    view.delete(key("a"), 1.0)
    assert set(view.unread()) == {key("b"), key("d", "embed")}


def test_a_record_full_of_unread_fields_makes_a_short_line() -> None:
    view = view_of("a")
    view.put("llama/config", {f"setting-{number:04}" * 40: 1 for number in range(3_000)})
    text = view.unread()["llama/config"]
    assert "and 2990 more; accepted" in text
    assert len(text) < 1_500


@pytest.mark.parametrize("config", [[], 0, False, "", "p2c", [1]])
def test_a_config_in_a_document_that_is_no_object_is_a_bad_record(config: object) -> None:
    view = View(grace=5.0)
    view.replace(document_records({"pools": {"llama": {"config": config, "endpoints": ["http://a:1"]}}}, "f"), 0.0)
    assert "accepted: a JSON object" in view.problems["llama/config"]


@pytest.mark.parametrize(
    ("ident", "taken"), [(0, "0"), (5, "5"), ("", "a:1"), (None, "a:1"), ([], ""), ({}, ""), (False, "")]
)
def test_an_id_in_a_document_is_text_or_a_whole_number(ident: object, taken: str) -> None:
    view = View(grace=5.0)
    view.replace(document_records({"pools": {"llama": {"endpoints": [{"id": ident, "url": "http://a:1"}]}}}, "f"), 0.0)
    pools = view.pools(0.0)
    assert [endpoint.id for endpoint in pools["llama"].endpoints] == ([taken] if taken else [])
    assert bool(view.problems) == (not taken)


@pytest.mark.parametrize("name", ["endpoint", "confg", "salt"])
def test_what_a_pool_in_a_document_says_and_nobody_reads_is_a_problem(name: str) -> None:
    view = View(grace=0.0)
    pool = {"endpoints": ["http://a:1"], "config": {"policy": "p2c"}}
    view.replace(document_records({"pools": {"llama": pool | {name: []}}}, "fleet.json"), 0.0)
    assert shown(view, 0.0) == ["a:1"]
    (problem,) = view.problems.values()
    assert f"fleet.json: pool llama: nobody reads {name!r}" in problem
    assert problem.endswith("accepted: endpoints, config")
    view.replace(document_records({"pools": {"llama": pool}}, "fleet.json"), 0.0)
    assert not view.problems
