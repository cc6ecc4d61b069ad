"""Prometheus counters of the rounds, beside SGLang's own speculative metrics, which know one width only.

Fed with numbers that SGLang has on the host anyway; a round is counted when its acceptance arrives, one round after it ran.
Under tensor parallelism rank 0 counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence


class RoundMetrics:
    """``sglang:dflash_rounds_total`` by width, ``…_proposed_drafts_total`` and ``…_accepted_drafts``, a histogram by depth.

    Args:
        labels: label names and values of this server.
        max_depth: the most drafts that one request's round can accept.
    """

    def __init__(self, labels: Mapping[str, str], max_depth: int) -> None:
        # SGLang sets the directory of the multi-process mode before its schedulers start, and this reads it when imported.
        from prometheus_client import Counter, Histogram

        names = list(labels)
        rounds = Counter("sglang:dflash_rounds_total", "Verify rounds by width (tree nodes + 1).", [*names, "width"])
        proposed = Counter("sglang:dflash_proposed_drafts_total", "Draft tokens that were verified.", names)
        accepted = Histogram(
            "sglang:dflash_accepted_drafts",
            "Accepted draft tokens of one request's round.",
            names,
            buckets=[float(depth) for depth in range(max_depth + 1)],
        )
        self._labels = dict(labels)
        self._rounds = rounds
        self._proposed = proposed.labels(**labels)
        self._accepted = accepted.labels(**labels)
        self._in_flight: deque[int] = deque(maxlen=8)

    def began(self, width: int) -> None:
        """A round of this width was launched."""
        self._in_flight.append(width)

    def verified(self, num_drafts: Sequence[int]) -> None:
        """The accepted drafts of a round, request by request; rounds come in the order in which they began."""
        if not self._in_flight:
            return
        width = self._in_flight.popleft()
        self._rounds.labels(**self._labels, width=str(width)).inc()
        self._proposed.inc((width - 1) * len(num_drafts))
        for drafts in num_drafts:
            self._accepted.observe(drafts)
