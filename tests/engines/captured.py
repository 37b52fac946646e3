"""The answers that real engines gave, cut out of the recorded sessions in tests/data/captures."""

from __future__ import annotations

import re
from pathlib import Path

CAPTURES = Path(__file__).parent.parent / "data" / "captures"


def page(name: str) -> bytes:
    """A whole recorded file."""
    return (CAPTURES / name).read_bytes()


def answer(name: str, title: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (names in lower case) and body of the answer under the heading that starts with `title`."""
    after = page(name).decode().replace("\r\n", "\n").partition(f"--- {title}")[2]
    head, _, rest = after.partition("HTTP/1.1 ")[2].partition("\n\n")
    lines = head.splitlines()
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    body = re.split(r"\n--- ", rest)[0]
    return int(lines[0].split()[0]), headers, body.encode()
