"""`gpuroute simulate --suite headline`: the claims that this project makes of its policies, as rows of data.

A case is the arguments of one `gpuroute simulate` command; a row takes a figure from one or two of its policies and sets
it against a bar. What misses its bar is printed as missed. Terms are `[case:]policy[.metric]`, mean TTFT if no metric is
named; a row with two terms is their ratio. With several seeds a figure is the mean of theirs, with the half width of its
95 % confidence interval. Rows without a bar are there to be read.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .measure import confidence, mean_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .run import Result

_CONVERSATION: Final = "--dram-tokens 4300000 --fleet {fleet} --copies {copies} --clients {clients}"
_WINDOW: Final = "--window {window} --warmup {warmup}"
_MIXED: Final = "15xH100,1xH100@0.5,4xH200,15xA100,1xA100@0.5,4xL40S"


def _talk(
    policies: str,
    *,
    gpus: int = 64,
    copies: int = 27,
    clients: int = 128,
    window: int = 60,
    warmup: int = 60,
    more: str = "",
) -> str:
    where = _CONVERSATION.format(fleet=f"{gpus}xH100", copies=copies, clients=clients)
    when = _WINDOW.format(window=window, warmup=warmup)
    return f"{where} {when} --policy {policies} {more}".strip()


CASES: Final[Mapping[str, str]] = {
    "headline": _talk(
        "auto+asks,auto+engine,auto,oracle,peer:token-queue,peer:sglang,peer:llm-d,peer:kubeai,peer:kubeai-per-client,p2c",
        gpus=256,
        copies=110,
        clients=512,
        window=100,
        warmup=100,
    ),
    "load-50": _talk("auto+asks,oracle,peer:sglang,p2c", copies=17),
    "load-70": _talk("auto+asks,oracle,peer:sglang,p2c", copies=24),
    "base": _talk("auto+asks,auto,oracle,peer:sglang,p2c"),
    "seeds": _talk("auto+asks,oracle,peer:sglang,p2c", more="--seeds 3"),
    "load-85": _talk("auto+asks,oracle,peer:sglang,p2c", copies=29),
    "load-95": _talk("auto+asks,oracle,peer:token-queue", copies=30, window=100, warmup=100),
    "over": _talk("auto+asks,oracle,peer:token-queue", copies=32, window=100, warmup=100),
    "mixed": f"--trace azure-conv --fleet {_MIXED} --copies 110 --clients 200 --window 60 --warmup 60 --policy "
    "auto+engine,auto+piggyback,auto,oracle,p2c,peer:envoy,peer:peak-ewma,peer:least-conn,peer:litellm,"
    "round_robin,weighted_round_robin,least_latency,predictive",
    "h-0.7": _talk("auto+asks,peer:sglang,p2c", more="--scale-h 0.7"),
    "h-1.3": _talk("auto+asks,peer:sglang,p2c", more="--scale-h 1.3"),
    "a-0.7": _talk("auto+asks,peer:sglang,p2c", more="--scale-a 0.7"),
    "a-1.3": _talk("auto+asks,peer:sglang,p2c", more="--scale-a 1.3 --copies 22"),
    "k-0.7": _talk("auto+asks,peer:sglang,p2c", more="--scale-k 0.7"),
    "k-1.3": _talk("auto+asks,peer:sglang,p2c", more="--scale-k 1.3"),
    "clients-1": _talk("auto+asks,auto", clients=1),
    "clients-10": _talk("auto+asks,auto", clients=10),
    "clients-1000": _talk("auto+asks,auto", clients=1000),
    "clients-16": _talk("auto+asks", clients=16),
    "clients-512": _talk("auto+asks", clients=512),
    "clients-4000": _talk("auto+asks", clients=4000),
    "delay-1": _talk("auto+asks", more="--report-delay 0.001"),
    "delay-5": _talk("auto+asks", more="--report-delay 0.005"),
    "delay-20": _talk("auto+asks", more="--report-delay 0.02"),
    "delay-50": _talk("auto+asks", more="--report-delay 0.05"),
    "loss-10": _talk("auto+asks", more="--report-loss 0.1"),
    "loss-30": _talk("auto+asks", more="--report-loss 0.3"),
    "coverage-10": _talk("auto+asks", more="--coverage 0.1"),
    "coverage-50": _talk("auto+asks", more="--coverage 0.5"),
    "liars-2": _talk("auto+asks", more="--liars 0.02"),
    "liars-10": _talk("auto+asks", more="--liars 0.1"),
    "liars-10-engines": _talk("auto+asks", more="--liars 0.1 --second-opinions"),
    "frozen-10": _talk("auto+asks", more="--report-frozen-at 50 --report-frozen-share 0.1"),
    "frozen-10-engines": _talk("auto+asks", more="--report-frozen-at 50 --report-frozen-share 0.1 --second-opinions"),
    "blind-10": _talk("auto+asks", more="--report-frozen-at 50 --report-frozen-share 0.1 --report-frozen-sample"),
    "cache-30": _talk("auto+asks", more="--cache-error 0.3"),
    "foreign-50": _talk("auto+asks,oracle,peer:sglang", more="--foreign 0.5"),
    "handshake": _talk("auto+asks", more="--handshake 0.02"),
    "honoured": "--trace azure-conv --fleet 16xA100*1.7,16xV100 --copies 20 --clients 32 --window 60 --warmup 60 "
    "--policy weighted_round_robin,p2c,auto+engine,round_robin",
    "hang": "--trace azure-conv --fleet 32xH100 --copies 90 --clients 64 --window 60 --warmup 30 --event 45:hang:3-4 "
    "--watchdog --policy auto,auto+asks,p2c",
    "small": "--trace synthetic:rate=5500,prompt=10,output=1,sigma=0 --fleet 64xbatcher --clients 128 --copies 1 "
    "--window 5 --warmup 2 --policy p2c,auto,auto+asks,least_request",
    "stale": "--trace azure-conv --fleet 32xH100 --copies 90 --clients 64 --window 60 --warmup 30 --report-stale 5 "
    "--policy auto+piggyback,queue_depth+piggyback,p2c",
    "frozen": "--trace azure-conv --fleet 32xH100 --copies 90 --clients 64 --window 60 --warmup 30 --report-frozen-at 20 "
    "--policy auto+piggyback,queue_depth+piggyback,p2c",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One claim: `figure` of `case` against a bar, `"<= 1.1"` or `">= 5"`; no bar: to be read. `item`: of the issue."""

    item: str
    name: str
    case: str
    figure: str
    bar: str = ""

    def by_seed(self, found: Mapping[str, Sequence[Result]]) -> list[float]:
        """The figure of each seed; those that an interrupt left incomplete are missing."""
        figures = []
        for seed in sorted({each.row.get("seed", 1) for its in found.values() for each in its}):
            its_own = {case: [each for each in its if each.row.get("seed", 1) == seed] for case, its in found.items()}
            with suppress(KeyError):
                figures.append(self.value(its_own))
        return figures

    def value(self, found: Mapping[str, Sequence[Result]]) -> float:
        """The figure, of the results by case. KeyError if a case or a policy is missing."""
        above, _, below = self.figure.partition(" / ")
        value = _term(above, self.case, found)
        return value / _term(below, self.case, found) if below else value

    def met(self, value: float) -> bool | None:
        """Whether the bar is met; None without one."""
        sign, _, bar = self.bar.partition(" ")
        if not sign:
            return None
        return value <= float(bar) if sign == "<=" else value >= float(bar)


def _term(text: str, case: str, found: Mapping[str, Sequence[Result]]) -> float:
    at, colon, rest = text.partition("::")
    case, text = (at, rest) if colon else (case, text)
    policy, dot, metric = text.rpartition(".")
    policy, metric = (policy, metric) if dot else (text, "ttft_mean")
    values = [{**each.row, **each.extra}[metric] for each in found[case] if each.row["policy"] == policy]
    if not values:
        raise KeyError(f"{case}: {policy}")
    return mean_of(values)


_BLIND_PEERS: Final = ("p2c", "peer:envoy", "peer:peak-ewma", "peer:least-conn", "peer:litellm")
_DANGERS: Final = {
    **{f"asks take {ms} ms each way": f"delay-{ms}" for ms in (1, 5, 20, 50)},
    **{f"{clients} clients": f"clients-{clients}" for clients in (16, 512, 4000)},
    **{f"{share} % of messages get lost": f"loss-{share}" for share in (10, 30)},
    **{f"{share} % of the endpoints have agents": f"coverage-{share}" for share in (10, 50)},
    "agents misjudge the cache by 30 %": "cache-30",
    "20 ms for each first contact": "handshake",
}

ROWS: Final[Sequence[Row]] = (
    Row("1", "auto+asks against full knowledge", "headline", "auto+asks / oracle", "<= 1.1"),
    Row("1", "the same, p95", "headline", "auto+asks.ttft_p95 / oracle.ttft_p95", "<= 1.1"),
    Row("1", "auto+asks against the ideal central token queue", "headline", "auto+asks / peer:token-queue", "<= 1.1"),
    Row("1", "auto+asks against central SGLang", "headline", "auto+asks / peer:sglang", "<= 0.6"),
    Row("1", "auto+asks against central llm-d", "headline", "auto+asks / peer:llm-d", "<= 0.6"),
    Row("1", "auto+engine against central SGLang", "headline", "auto+engine / peer:sglang", "<= 0.9"),
    Row("1", "auto, no asks, against per-client hashing", "headline", "auto / peer:kubeai-per-client", "<= 0.35"),
    Row("1", "attempts per call of auto, no asks", "headline", "auto.attempts_per_call", "<= 1.1"),
    Row("1", "auto, no asks, against p2c", "headline", "auto / p2c"),
    Row("1", "near saturation: 30 copies", "load-95", "auto+asks / oracle", "<= 1"),
    Row("1", "the same against the token queue", "load-95", "auto+asks / peer:token-queue", "<= 1"),
    Row("1", "above saturation: 32 copies", "over", "auto+asks / oracle", "<= 1"),
    Row("1", "the same against the token queue", "over", "auto+asks / peer:token-queue", "<= 1"),
    Row("2", "mixed fleet: auto+engine against full knowledge", "mixed", "auto+engine / oracle", "<= 1.3"),
    *(
        Row("2", f"mixed fleet: {peer} against auto+piggyback", "mixed", f"{peer} / auto+piggyback", ">= 5")
        for peer in _BLIND_PEERS
    ),
    Row(
        "3",
        "claimed 1.15: weighted over naive round robin, GPU use",
        "mixed",
        "weighted_round_robin.utilisation / round_robin.utilisation",
    ),
    Row("3", "claimed 0.70: response-time routing, P99 TTFT", "mixed", "least_latency.ttft_p99 / round_robin.ttft_p99"),
    Row(
        "3", "claimed 1.25: learned over heuristic, goodput", "mixed", "predictive.goodput / weighted_round_robin.goodput"
    ),
    Row("3", "the same against p2c, goodput", "mixed", "predictive.goodput / p2c.goodput"),
    Row("3", "the same against p2c, mean TTFT", "mixed", "predictive / p2c"),
    *(
        Row(
            "3",
            f"claimed 1.7: A100 over V100, {what} of {policy}",
            "honoured",
            f"{policy}.{key}_A100 / {policy}.{key}_V100",
            bar,
        )
        for policy, what, key, bar in (
            ("weighted_round_robin", "calls", "calls", ">= 1.7"),
            ("p2c", "calls", "calls", ""),
            ("auto+engine", "prompt tokens", "prompts", ""),
        )
    ),
    Row(
        "3",
        "the same: weighted over naive round robin, goodput",
        "honoured",
        "weighted_round_robin.goodput / round_robin.goodput",
    ),
    Row("3", "claimed 0.4-0.6: prefill saved by prefix caches", "headline", "auto+asks.hit"),
    Row("3", "claimed 0.95 against 0.60: GPU use", "mixed", "auto+engine.utilisation"),
    Row(
        "3",
        "claimed 100: spread of request times, p99 over p50 TTFT",
        "headline",
        "auto+asks.ttft_p99 / auto+asks.ttft_p50",
    ),
    *(
        Row("4", f"load {load} %: against SGLang", f"load-{load}", "auto+asks / peer:sglang", "<= 1")
        for load in (50, 70, 85)
    ),
    *(
        Row("4", f"load {load} %: against full knowledge", f"load-{load}", "auto+asks / oracle", "<= 1.1")
        for load in (50, 70, 85)
    ),
    *(
        Row("4", f"three seeds: {name}", "seeds", figure, bar)
        for name, figure, bar in (
            ("auto+asks against full knowledge", "auto+asks / oracle", "<= 1.1"),
            ("auto+asks against SGLang", "auto+asks / peer:sglang", "<= 1"),
            ("SGLang against p2c", "peer:sglang / p2c", "<= 1"),
        )
    ),
    *(
        Row("4", f"{constant} x {factor}: against SGLang", f"{constant}-{factor}", "auto+asks / peer:sglang", "<= 1")
        for constant in "hak"
        for factor in (0.7, 1.3)
    ),
    *(
        Row("4", f"{clients} clients: against 128", f"clients-{clients}", "auto+asks / base::auto+asks", "<= 1.1")
        for clients in (1, 10, 1000)
    ),
    *(
        Row("4", f"no asks, {clients} clients: against 128", f"clients-{clients}", "auto / base::auto")
        for clients in (1, 10, 1000)
    ),
    *(Row("5", name, case, "auto+asks / base::auto+asks") for name, case in _DANGERS.items()),
    *(
        Row("5", f"{share} % of the endpoints have agents: against none", case, f"{term} / base::auto")
        for share, case, term in (
            (10, "coverage-10", "auto+asks"),
            (50, "coverage-50", "auto+asks"),
            (100, "base", "auto+asks"),
        )
    ),
    Row("5", "half of the traffic is foreign: against SGLang", "foreign-50", "auto+asks / peer:sglang", "<= 1"),
    Row("5", "half of the traffic is foreign: against full knowledge", "foreign-50", "auto+asks / oracle"),
    *(
        Row("5", f"2 of 32 engines hang: calls answered, {policy}", "hang", f"{policy}.success", ">= 0.99")
        for policy in ("auto", "auto+asks", "p2c")
    ),
    Row("5", "2 of 32 engines hang: p99 of TTFT, auto, in seconds", "hang", "auto.ttft_p99"),
    Row("5", "2 % of agents always say idle", "liars-2", "auto+asks / base::auto+asks", "<= 1.1"),
    Row("5", "10 % of agents always say idle", "liars-10", "auto+asks / base::auto+asks", "<= 1.1"),
    Row("5", "the same, engines can be asked", "liars-10-engines", "auto+asks / base::auto+asks", "<= 1.1"),
    Row("5", "10 % of agents repeat what was true at second 50", "frozen-10", "auto+asks / base::auto+asks", "<= 1.1"),
    Row("5", "the same, engines can be asked", "frozen-10-engines", "auto+asks / base::auto+asks", "<= 1.1"),
    Row("5", "10 % of agents see no engine from second 50 on", "blind-10", "auto+asks / base::auto+asks", "<= 1.1"),
    Row("5", "small jobs, 5,500/s: auto against p2c", "small", "auto / p2c"),
    Row("5", "small jobs, 5,500/s: auto+asks against p2c", "small", "auto+asks / p2c"),
    *(
        Row("6", f"reports {how}: fullest over mean, {policy}", how, f"{policy}.max_over_mean", "<= 1.5")
        for how in ("stale", "frozen")
        for policy in ("auto+piggyback", "queue_depth+piggyback")
    ),
    *(Row("6", f"reports {how}: fullest over mean, p2c", how, "p2c.max_over_mean") for how in ("stale", "frozen")),
)

SUITES: Final[Mapping[str, Sequence[Row]]] = {"headline": ROWS}


def cases_of(rows: Sequence[Row]) -> list[str]:
    """The cases that these rows need, in the order of `CASES`."""
    needed = {row.case for row in rows} | {
        term.partition("::")[0] for row in rows for term in row.figure.split(" / ") if "::" in term
    }
    return [name for name in CASES if name in needed]


def judged(rows: Sequence[Row], found: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """Rows with their figures, for people and machines; those whose cases were not run are left out."""
    table = []
    for row in rows:
        if figures := row.by_seed(found):
            value, half = confidence(figures)
            said = {
                "item": row.item,
                "case": row.case,
                "name": row.name,
                "figure": row.figure,
                "value": value,
                "plus_minus": half,
                "bar": row.bar,
            }
            table.append({**said, "met": row.met(value), "command": f"gpuroute simulate {CASES[row.case]}"})
    return table
