"""Load that an endpoint reports with its answers (ORCA): the next best thing where there is no agent to ask.

Engines that speak it send it only to those who ask in the request, and vLLM never on streams. An endpoint with an agent
is not asked: its bids say more, and sooner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuroute.core.learning import learn_bid
from gpuroute.core.orca import FORMAT_HEADER, REPORT_HEADER, parse_orca
from gpuroute.core.report import CARRIED, Report
from gpuroute.engines.catalog import engine_of

if TYPE_CHECKING:
    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.orca import LoadReport
    from gpuroute.core.state import EndpointState

REQUEST = FORMAT_HEADER
ANSWER = REPORT_HEADER.encode()


def wanted(endpoint: Endpoint) -> str:
    """The format to ask this endpoint for; "" where that is of no use."""
    return "" if endpoint.agent else engine_of(endpoint.engine).orca


def learn_header(state: EndpointState, value: bytes, mean_tokens: float, now: float) -> bool:
    """What the header of an answer says of the endpoint's load; False if it says nothing. Never raises."""
    said = parse_orca(value.decode("latin-1"))
    return said is not None and learn_load(state, said, mean_tokens, now)


def learn_load(state: EndpointState, said: LoadReport, mean_tokens: float, now: float) -> bool:
    """A report that came with an answer; False if it does not count requests."""
    if said.requests is None:
        return False
    queued = -1 if said.queued_tokens is None else int(said.queued_tokens)
    running = said.in_flight if said.running is None else said.running
    report = Report(now, int(running or 0), int(said.waiting or 0), queued, said.kv_usage or 0.0, source=CARRIED)
    learn_bid(state, report, mean_tokens)
    return True
