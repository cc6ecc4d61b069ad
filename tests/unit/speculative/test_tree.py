from __future__ import annotations

import dataclasses

import pytest
import torch

from sglang_dflash.speculative.tree import DraftTree


def test_chain_is_one_branch_in_order() -> None:
    tree = DraftTree.chain(torch.tensor([[11, 12, 13], [21, 22, 23]]), torch.tensor([10, 20]))
    assert (tree.batch, tree.width, tree.is_chain) == (2, 4, True)
    assert tree.token_BW.tolist() == [[10, 11, 12, 13], [20, 21, 22, 23]]
    assert tree.parent_BW.tolist() == [[-1, 0, 1, 2]] * 2
    assert tree.depth_BW.tolist() == [[0, 1, 2, 3]] * 2
    assert tree.score_BW.dtype == torch.float32 and not tree.score_BW.any()
    assert bool(tree.valid_BW.all())


@pytest.mark.parametrize(("batch", "nodes"), [(0, 3), (2, 0)])
def test_chain_of_nothing(batch: int, nodes: int) -> None:
    tree = DraftTree.chain(torch.zeros(batch, nodes, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64))
    assert (tree.batch, tree.width) == (batch, nodes + 1)
    assert tree.parent_BW.tolist() == [[-1, *range(nodes)]] * batch


def test_tree_cannot_be_rebound() -> None:
    tree = DraftTree.chain(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.is_chain = False  # type: ignore[misc]
