"""Calls that are made up: after the statistics of real clients (ServeGen), or of a few numbers.

Both draw from random streams of their own, so that the same seed gives the same calls.
"""

from __future__ import annotations

from math import gamma, inf, nan
from random import Random
from typing import TYPE_CHECKING, Any, Final

from .request import Request

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_ROWS: Final = 10_000_000


def servegen(data: Any, *, seed: int, seconds: float) -> list[Request]:
    """ServeGen clients: in each window of a client, arrivals are a Gamma or Weibull renewal process of
    its own.

    Starts at the busiest window of the file. Clients without token lengths are left out (the file lacks
    them). ValueError says what is wrong with `data`.
    """
    try:
        return _servegen(data, Random(f"{seed}/servegen"), seconds)
    except (KeyError, IndexError, StopIteration, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"it is no ServeGen file: {type(error).__name__} {error}") from None


def _servegen(data: Any, random: Random, seconds: float) -> list[Request]:
    width = float(data["window_s"])
    if not 0 < width < inf:
        raise ValueError(f"window_s is {width}; expected seconds above 0")
    clients = [client for client in data["clients"] if client.get("tok")]
    if not clients:
        raise ValueError("no client has token lengths")
    windows = max(len(client["win"]) for client in clients)
    rates = [sum(c["win"][w][0] for c in clients if w < len(c["win"]) and c["win"][w]) for w in range(windows)]
    start = min(rates.index(max(rates)), max(0, windows - int(seconds // width) - 1))
    points = [point / 100 for point in data["quantile_points"]]
    rows = []
    for client in clients:
        tokens = client["tok"]
        inputs = next(field["q"] for key, field in tokens.items() if "input" in key or "prompt" in key)
        outputs = next(field["q"] for key, field in tokens.items() if "output" in key)
        for at in _renewals(client["win"][start:], width, seconds, random):
            prompt, output = (_quantile(points, q, random.random()) for q in (inputs, outputs))
            rows.append(Request(at, prompt, output, (), int(client["id"])))
            _check_size(len(rows))
    return rows


def _check_size(rows: float) -> None:
    if not rows <= MOST_ROWS:
        raise ValueError(f"more than {MOST_ROWS} calls would be generated")


def _renewals(windows: list[list[Any]], width: float, seconds: float, random: Random) -> Iterator[float]:
    for index, window in enumerate(windows):
        if not window or index * width >= seconds:
            continue
        _, _, pattern, shape, scale = window
        if not (0 < shape < inf and 0 < scale < inf):
            raise ValueError(f"a window has shape {shape} and scale {scale}; expected numbers above 0")
        at, end = index * width, min((index + 1) * width, seconds)
        _check_size((end - at) / (scale * (shape if pattern == "G" else gamma(1 + 1 / shape))))
        while True:
            at += random.gammavariate(shape, scale) if pattern == "G" else random.weibullvariate(scale, shape)
            if at >= end:
                break
            yield at


def _quantile(points: list[float], values: list[float], chance: float) -> int:
    for index in range(1, len(points)):
        if chance <= points[index]:
            low, high = points[index - 1], points[index]
            share = (chance - low) / (high - low)
            return max(1, round(values[index - 1] + share * (values[index] - values[index - 1])))
    return max(1, round(values[-1]))


_SYNTHETIC: Final = {  # default, least, most
    "rate": (10.0, 1e-6, 1e6),
    "prompt": (1000.0, 1.0, 1e6),
    "output": (200.0, 1.0, 1e6),
    "sigma": (0.8, 0.0, 5.0),
    "groups": (0.0, 0.0, 1e5),
    "shared": (0.0, 0.0, 1e6),
}


def _options(text: str) -> dict[str, float]:
    values = {name: default for name, (default, _, _) in _SYNTHETIC.items()}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in values:
            raise ValueError(f"synthetic trace: unknown option {key!r}; known are {', '.join(values)}")
        _, least, most = _SYNTHETIC[key]
        try:
            values[key] = float(value)
        except ValueError:
            values[key] = nan
        if not least <= values[key] <= most:
            raise ValueError(f"synthetic trace: {part!r}: expected {key}= and a number from {least:g} to {most:g}")
    return values


def synthetic(options: str, *, seed: int, seconds: float) -> list[Request]:
    """Poisson arrivals of log-normal lengths: `rate` (1/s), `prompt`, `output` (mean tokens), `sigma`, and
    `groups` prompts of `shared` tokens that the calls have in common (Zipf popularity), e.g. system prompts.
    """
    values = _options(options)
    _check_size(values["rate"] * seconds)
    random, at, rows = Random(f"{seed}/synthetic"), 0.0, []
    groups = int(values["groups"])
    weights = [1 / rank for rank in range(1, groups + 1)]
    depth = int(values["shared"]) // 512
    while (at := at + random.expovariate(values["rate"])) < seconds:
        prompt, output = (_lognormal(random, values[key], values["sigma"]) for key in ("prompt", "output"))
        group = random.choices(range(groups), weights)[0] if groups else None
        blocks = () if group is None else tuple(group << 12 | level for level in range(depth))
        rows.append(Request(at, prompt + 512 * len(blocks), output, blocks, group))
    return rows


def _lognormal(random: Random, mean: float, sigma: float) -> int:
    return max(1, round(mean * random.lognormvariate(-sigma * sigma / 2, sigma) if sigma else mean))
