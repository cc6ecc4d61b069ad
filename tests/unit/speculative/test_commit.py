from __future__ import annotations

import torch

from sglang_dflash.kernels.tree_accept import Acceptance, accept_tree
from sglang_dflash.speculative.commit import accepted_index, compact_target_kv, gather_accepted
from sglang_dflash.speculative.tree import DraftTree

WIDTH = 4


class FakePool:
    """Records its KV as one value a slot; moves as SGLang's pools do, all sources read before any target is written."""

    def __init__(self, size: int) -> None:
        self.row_P = torch.arange(size)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        self.row_P[tgt_loc] = self.row_P[src_loc].clone()


def accepted() -> Acceptance:
    """Root with children 1 and 2, row 3 below row 2. Paths: [0, 2, 3], [0, 1] and [0]."""
    parent_BW = torch.tensor([[-1, 0, 0, 2]] * 3)
    tree = DraftTree(
        token_BW=torch.tensor([[9, 1, 2, 3]] * 3),
        parent_BW=parent_BW,
        depth_BW=torch.tensor([[0, 1, 1, 2]] * 3),
        score_BW=torch.zeros(3, WIDTH),
        valid_BW=torch.ones(3, WIDTH, dtype=torch.bool),
    )
    return accept_tree(tree, torch.tensor([[2, 0, 3, 7], [1, 8, 0, 0], [5, 0, 0, 0]]), max_depth=2)


def test_accepted_index_is_flat_over_the_batch() -> None:
    assert accepted_index(accepted(), WIDTH).tolist() == [[0, 2, 3], [4, 5, 5], [8, 8, 8]]


def test_taps_are_gathered_by_accepted_row() -> None:
    hidden_TF = torch.arange(3 * WIDTH, dtype=torch.float32)[:, None] * torch.ones(1, 5)
    gathered_TF = gather_accepted(hidden_TF, accepted(), WIDTH)
    assert gathered_TF.shape == (9, 5)
    assert gathered_TF[:, 0].tolist() == [0, 2, 3, 4, 5, 5, 8, 8, 8]


def test_target_kv_of_the_path_moves_to_the_front_of_the_window() -> None:
    pool = FakePool(16)
    slot_BW = torch.tensor([[7, 3, 12, 5], [0, 1, 2, 4], [15, 14, 13, 11]])
    compact_target_kv(pool, accepted(), slot_BW)
    expected = torch.arange(16)
    expected[3], expected[12] = 12, 5
    assert torch.equal(pool.row_P, expected)
