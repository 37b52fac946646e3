"""A child that is forked while another thread of its parent holds one of our locks does not wait for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")

PROGRAM = """
import os, signal
import gpuroute
from gpuroute.transports import asking
router = gpuroute.Router("llama=http://a")
with asking._lock:
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(asking.asker_of(router) is None)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_can_ask() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0"], done.stderr
