"""For tests, ours and yours: time moved by hand, a registry written by hand, and a GPU server without a GPU."""

from __future__ import annotations

from .clock import FakeClock
from .counters import Received, resent_after_first_byte
from .options import ServerOptions
from .process import GpuProcess
from .registry import FakeRegistry
from .server import GpuServer
from .text import answer

__all__ = [
    "FakeClock",
    "FakeRegistry",
    "GpuProcess",
    "GpuServer",
    "Received",
    "ServerOptions",
    "answer",
    "resent_after_first_byte",
]
