"""Candidates over a vocabulary that is split between ranks; threads stand in for ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.speculative import draft as draft_module
from sglang_dflash.speculative.draft import draft_candidates

HIDDEN, ROWS = 16, 6


class Rank(threading.local):
    number = 0


class Group:
    """An all-gather between threads, along the last dimension."""

    def __init__(self, size: int, rank: Rank) -> None:
        self._rank = rank
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        self._parts[self._rank.number] = tensor
        self._barrier.wait()
        gathered = torch.cat(self._parts, dim=dim)
        self._barrier.wait()
        return gathered


def head(weight_VH: torch.Tensor, start: int, stop: int, padding: int) -> Any:
    """A shard as SGLang keeps it: its own rows, then padding that must never be drafted."""
    shard_VH = torch.cat([weight_VH[start:stop], torch.full((padding, HIDDEN), 9.0)])
    indices = SimpleNamespace(num_org_elements=stop - start, org_vocab_start_index=start)
    return SimpleNamespace(weight=shard_VH, shard_indices=indices, quant_method=None)


@pytest.mark.parametrize("bounds", [(0, 40), (0, 20, 40), (0, 16, 32, 40)])
@pytest.mark.parametrize("top_k", [1, 4, 8])
def test_ranks_agree_on_the_candidates_of_the_whole_vocabulary(
    bounds: tuple[int, ...], top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight_VH, hidden_TH = torch.randn(40, HIDDEN, generator=generator), torch.randn(ROWS, HIDDEN, generator=generator)
    expected_logp, expected_id = (hidden_TH @ weight_VH.T).log_softmax(-1).topk(top_k)
    size, rank = len(bounds) - 1, Rank()
    monkeypatch.setattr(draft_module, "get_parallel", lambda: SimpleNamespace(tp_size=size, tp_group=group))
    group = Group(size, rank)

    def candidates(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        rank.number = number
        return draft_candidates(hidden_TH, head(weight_VH, bounds[number], bounds[number + 1], number), top_k=top_k)

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(candidates, range(size)))
    for id_TK, logp_TK in results:
        assert torch.equal(id_TK, expected_id)
        torch.testing.assert_close(logp_TK, expected_logp)
