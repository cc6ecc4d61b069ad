"""How many nodes to verify in the next round: the width that emits the most tokens per second, by what was measured.

A tree's first rows are themselves the best tree of that width (the spine first, then the others by score), so one draft serves
every width: the verify reads the first rows, down to the spine alone, which is the plain chain.

``StepCosts`` is filled at start-up: what a round costs on the device at each width, by batch size and context. ``Budget``
weighs it against the tokens that the trees promise (the sum of their nodes' probabilities, corrected by what recent rounds
accepted), and watches the rounds' wall time: where the host is the limit, narrower rounds would save nothing.

Plain Python over numbers that ``worker`` supplies. Under tensor parallelism every rank must decide alike: a rank's own clock
enters only through ``share``, which hands out rank 0's.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SMOOTHING = 0.1
WINDOW_ROUNDS = 64
HOST_BOUND = 1.1


def widths_to_verify(block: int, width: int) -> tuple[int, ...]:
    """The widths that a budget may choose, ascending: the chain's, then up to ``width``, halving the nodes downwards.

    A tree no wider than the block is the chain.
    """
    chain = min(block, width)
    wider = {width} - {chain}
    while (width := (width - 1) // 2 + 1) >= 1.5 * chain:
        wider.add(width)
    return (chain, *sorted(wider))


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a round on the device.

    Attributes:
        batches: measured batch sizes, ascending.
        base_ms: by width, one entry a batch size: draft and verify with next to no context.
        per_token_ms: by width, one entry a batch size: what every token of all requests' context adds.
    """

    batches: tuple[int, ...]
    base_ms: dict[int, tuple[float, ...]]
    per_token_ms: dict[int, tuple[float, ...]]

    def ms(self, width: int, batch: int, context: int) -> float:
        """The cost at the smallest measured batch that holds ``batch``; in proportion to the largest beyond it.

        Args:
            context: committed tokens of all requests together.
        """
        place = min(bisect_left(self.batches, batch), len(self.batches) - 1)
        scale = max(1.0, batch / self.batches[-1])
        return scale * self.base_ms[width][place] + context * self.per_token_ms[width][place]


class Budget:
    """Chooses widths.

    Args:
        costs: measured step costs; their widths are the choice.
        share: makes rank 0's number every rank's; called once in ``WINDOW_ROUNDS`` rounds.
    """

    def __init__(self, costs: StepCosts, *, share: Callable[[float], float] = lambda number: number) -> None:
        self.widths = tuple(sorted(costs.base_ms))
        self._costs = costs
        self._share = share
        self._promised: dict[int, float] = {}
        self._accepted_share = 1.0
        self._in_flight: deque[float] = deque(maxlen=8)
        self._host_ms = 0.0
        self._periods_ms: list[float] = []
        self._last: tuple[float, int] | None = None

    def choose(self, batch: int, context: int, now_ms: float) -> int:
        """The width of the round that begins now.

        Args:
            batch: requests.
            context: their committed tokens together.
            now_ms: any clock that does not go backwards.
        """
        width = max(self.widths, key=lambda width: self._tokens(width) / self._round_ms(width, batch, context))
        self._watch_host(batch, now_ms, self._costs.ms(width, batch, context))
        self._in_flight.append(self._promised.get(width, 1.0) - 1)
        return width

    def promise(self, tokens: Sequence[float]) -> None:
        """What recent trees promise to emit at every width, ascending: the mean over requests, bonus included."""
        self._promised = dict(zip(self.widths, tokens, strict=True))

    def accepted(self, num_drafts: Sequence[int]) -> None:
        """The accepted drafts of a round, request by request; rounds come in the order in which they were chosen."""
        if self._in_flight and num_drafts:
            promised_drafts = self._in_flight.popleft()
            if promised_drafts > 0:
                share = min(statistics.fmean(num_drafts) / promised_drafts, 4.0)
                self._accepted_share += SMOOTHING * (share - self._accepted_share)

    def _tokens(self, width: int) -> float:
        """Expected tokens of one request's round; alike for all widths until a tree was seen, so that cost decides."""
        return 1 + self._accepted_share * (self._promised.get(width, 1.0) - 1)

    def _round_ms(self, width: int, batch: int, context: int) -> float:
        return max(self._costs.ms(width, batch, context), self._host_ms)

    def _watch_host(self, batch: int, now_ms: float, device_ms: float) -> None:
        """Learn the rounds' wall time from rounds of one batch size that follow each other."""
        if self._last is not None and self._last[1] == batch:
            self._periods_ms.append(now_ms - self._last[0])
        self._last = (now_ms, batch)
        if len(self._periods_ms) == WINDOW_ROUNDS:
            typical_ms = statistics.median(self._periods_ms)
            self._host_ms = self._share(typical_ms if typical_ms > HOST_BOUND * device_ms else 0.0)
            self._periods_ms.clear()
