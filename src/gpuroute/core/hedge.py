"""Second attempts before the first has failed: hedging, and rerouting a call that is still queued.

Hedging (Dean & Barroso, "The Tail at Scale", 2013) is for the tail: after the observed high percentile of the time to the
first byte, at most 5 % extra load. Rerouting is for a queue that was misjudged: no first token after 1 s + 2x the call's
own prefill, from a budget of 10 % that is closed while the pool is saturated (unbounded rerouting collapsed in our
simulation: every reroute lengthens the queues that cause reroutes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpuroute.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HedgeRules:
    """Opt in. `hedge`: send a second attempt after the usual high TTFT; `reroute`: move a call that is still queued.

    Shares are of calls; `spreads` counts mean absolute deviations of log(TTFT) above its mean (2: about the p95);
    `patience_s` + `patience_factor` x predicted prefill is when a call counts as queued.
    """

    hedge: bool = False
    hedge_share: float = 0.05
    spreads: float = 2.0
    min_delay_s: float = 0.005
    reroute: bool = False
    reroute_share: float = 0.1
    patience_s: float = 1.0
    patience_factor: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.hedge_share <= 1 or not 0 <= self.reroute_share <= 1 or self.min_delay_s < 0:
            raise ConfigError(f"hedge rules: shares lie in 0..1 and min_delay_s >= 0; got {self!r}")

    def hedge_after(self, high_ttft: float) -> float:
        """Seconds after which a second attempt is due; infinite if off or nothing is known yet."""
        if not self.hedge or math.isinf(high_ttft):
            return math.inf
        return max(self.min_delay_s, high_ttft)

    def reroute_after(self, prefill_s: float) -> float:
        """Seconds after which a call without a first token counts as queued; infinite if off."""
        return self.patience_s + self.patience_factor * prefill_s if self.reroute else math.inf
