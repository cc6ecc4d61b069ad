from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.train.model import Drafter
from sglang_dflash.train.simulate import Simulated, simulate

Make = Callable[..., Any]
VOCAB = 48


class Scripted:
    """Drafts the successor rule of the samples in the first ``right`` slots, and token 0 behind them.

    Its hidden states are one-hot, for a head that is the identity. ``second`` puts the right token second from there on.
    """

    def __init__(self, block_size: int, right: int, *, second: bool = False) -> None:
        self.config = SimpleNamespace(block_size=block_size)
        self.right, self.second = right, second
        self.anchors: list[list[int]] = []

    def context(self, taps_BTF: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        number_B = torch.arange(len(taps_BTF))
        return [(number_B, number_B)]

    def __call__(
        self, context: Any, anchor_BA: torch.Tensor, token_BA: torch.Tensor, embedding_VH: torch.Tensor
    ) -> torch.Tensor:
        self.anchors.append(anchor_BA[:, 0].tolist())
        hidden_BASH = torch.zeros(*anchor_BA.shape, self.config.block_size, VOCAB)
        token_BA1 = token_BA[:, :, None]
        for slot in range(1, self.config.block_size):
            token_BA1 = (5 * token_BA1 + 3) % 47
            if slot <= self.right or self.second:
                hidden_BASH[:, :, slot].scatter_(2, token_BA1, 10.0)
            if slot > self.right:
                hidden_BASH[:, :, slot, 0] = 12.0
        return hidden_BASH


def walk(lengths: list[tuple[int, int]], right: int, block_size: int) -> list[int]:
    """How many steps accepted 0, 1, ... drafts, for (prompt length, length) of requests; no token is 0 by chance."""
    counts = [0] * block_size
    for position, length in lengths:
        while position < length - 1:
            accepted = min(right, length - 1 - position)
            counts[accepted] += 1
            position += accepted + 1
    return counts


def without_zero(samples: list[Any]) -> list[Any]:
    return [sample for sample in samples if 0 not in sample.token_ids]


@pytest.mark.parametrize("right", [0, 1, 2, 4])
def test_rounds_are_those_of_a_server(right: int, make_samples: Make) -> None:
    # More requests than are walked at once.
    samples = without_zero(make_samples(60))
    assert len(samples) > 16
    identity = torch.eye(VOCAB)
    result = simulate(Scripted(5, right), samples, identity, identity)  # type: ignore[arg-type]
    expected = walk([(s.prompt_len, len(s.token_ids)) for s in samples], right, 5)
    assert list(result.steps_by_accepted) == expected
    assert result.verify_steps == sum(expected)
    assert result.tau == pytest.approx(1 + result.accepted_drafts / result.verify_steps)


def test_the_walk_starts_at_the_first_generated_token_and_jumps_behind_the_bonus(make_samples: Make) -> None:
    drafter = Scripted(4, 2)
    sample = without_zero(make_samples(10))[0]
    identity = torch.eye(VOCAB)
    simulate(drafter, [sample], identity, identity, max_length=12)  # type: ignore[arg-type]
    assert drafter.anchors == [[4], [7], [10]], "position 11 is the last row: nothing is known behind it"


def test_a_tree_finds_second_choices(make_samples: Make) -> None:
    samples = without_zero(make_samples(10))
    identity = torch.eye(VOCAB)
    chain = simulate(Scripted(4, 1, second=True), samples, identity, identity)  # type: ignore[arg-type]
    tree = simulate(Scripted(4, 1, second=True), samples, identity, identity, num_nodes=12)  # type: ignore[arg-type]
    assert list(tree.steps_by_accepted) == walk([(s.prompt_len, len(s.token_ids)) for s in samples], 3, 4)
    assert tree.tau > chain.tau
    short = simulate(Scripted(4, 3), samples, identity, identity, num_nodes=1)  # type: ignore[arg-type]
    assert list(short.steps_by_accepted) == walk([(s.prompt_len, len(s.token_ids)) for s in samples], 1, 4)


@pytest.mark.parametrize("num_nodes", [None, 6])
def test_requests_do_not_mix(num_nodes: int | None, make_sample: Make, make_drafter: Callable[..., Drafter]) -> None:
    """A real drafter accepts for a batch what it accepts request by request."""
    drafter = make_drafter()
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(9):
        # Three tokens alone, and a head that hardly knows others: an untrained drafter is right now and then.
        token_T = torch.randint(3, (12 + number,), generator=generator)
        taps_TF = torch.randn(len(token_T), drafter.fc.in_features, generator=generator)
        samples.append(make_sample(f"r{number}", token_T, taps_TF, 4))
    embedding_VH, head_VH = (torch.randn(VOCAB, drafter.config.hidden_size, generator=generator) for _ in range(2))
    head_VH[3:] *= 1e-3
    together = simulate(drafter, samples, embedding_VH, head_VH, num_nodes=num_nodes)
    alone = [simulate(drafter, [s], embedding_VH, head_VH, num_nodes=num_nodes).steps_by_accepted for s in samples]
    assert list(together.steps_by_accepted) == [sum(column) for column in zip(*alone, strict=True)]
    assert sum(steps > 0 for steps in together.steps_by_accepted) > 2, "several lengths of acceptance occur"


def test_nothing_to_replay() -> None:
    nothing = simulate(Scripted(4, 1), [], torch.eye(VOCAB), torch.eye(VOCAB))  # type: ignore[arg-type]
    assert nothing == Simulated((0, 0, 0, 0)) and nothing.tau == 1.0
