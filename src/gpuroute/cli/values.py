"""Values of options: each checked against a form, so that a bad one is answered with what is accepted."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuroute.errors import ConfigError
from gpuroute.forms import Form

if TYPE_CHECKING:
    from collections.abc import Callable


def count(least: int, most: int = 10**15) -> Form[int]:
    """A whole number from `least` to `most`."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,16}", text.strip()) or not least <= int(text) <= most:
            raise ValueError(text)
        return int(text)

    return Form(f"a whole number of at least {least}" + (f" and at most {most}" if most < 10**15 else ""), parse)


def number(least: float, most: float, *, above: bool = False) -> Form[float]:
    """A number from `least` to `most`; `above`: greater than `least`."""

    def parse(text: str) -> float:
        found = float(text)
        if not (least < found <= most if above else least <= found <= most):  # NaN is neither
            raise ValueError(text)
        return found

    return Form(f"a number {'above' if above else 'from'} {least:g} {'and at most' if above else 'to'} {most:g}", parse)


def typed(form: Form[Any]) -> Callable[[str], Any]:
    """A form as the type of an option."""

    def parse(text: str) -> Any:
        try:
            return form.parse(text)
        except (ValueError, TypeError):
            raise argparse.ArgumentTypeError(f"{text!r}: expected {form.accepts}") from None

    return parse


def read_record(path: str) -> dict[str, Any]:
    """The object in the JSON file that --record names. Raises ConfigError."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "not JSON"
        raise ConfigError(f"--record {path!r}: {reason}; expected a JSON file") from None
    if not isinstance(record, dict):
        raise ConfigError(f"--record {path!r}: expected one JSON object")
    return record


def over(stated: Any, given: dict[str, Any]) -> Any:
    """What options say, over what a record says. A record's value that is no object stays, to be refused with it."""
    if stated is None or isinstance(stated, dict):
        return {**(stated or {}), **given} or None
    return stated
