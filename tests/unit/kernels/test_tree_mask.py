from __future__ import annotations

import random

import pytest
import torch

from sglang_dflash.kernels.tree_mask import ancestor_mask, ancestor_mask_reference
from sglang_dflash.speculative.tree import DraftTree


def tree_of(parent: list[list[int]]) -> DraftTree:
    """A tree batch for its parents alone; rows other than 0 with parent -1 are padding."""
    parent_BW = torch.tensor(parent)
    valid_BW = parent_BW >= 0
    valid_BW[:, 0] = True
    zeros = torch.zeros_like(parent_BW)
    return DraftTree(token_BW=zeros, parent_BW=parent_BW, depth_BW=zeros, score_BW=zeros.float(), valid_BW=valid_BW)


def random_parents(seed: int, batch: int, width: int) -> list[list[int]]:
    rng = random.Random(seed)
    parents = []
    for _ in range(batch):
        real = rng.randint(1, width)
        parents.append([-1] + [rng.randrange(row) if row < real else -1 for row in range(1, width)])
    return parents


@pytest.mark.parametrize("width", [1, 2, 3, 5, 16, 17, 65])
def test_mask_equals_the_reference(width: int) -> None:
    parents = random_parents(width, 20, width)
    mask_BWW = ancestor_mask(tree_of(parents))
    assert mask_BWW.dtype == torch.bool
    assert mask_BWW.tolist() == [ancestor_mask_reference(parent) for parent in parents]


@pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 64, 65])
def test_chain_is_causal(width: int) -> None:
    tree = DraftTree.chain(torch.zeros(2, width - 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    assert torch.equal(ancestor_mask(tree), torch.ones(2, width, width, dtype=torch.bool).tril())


def test_padding_sees_itself_alone_and_is_seen_by_nobody() -> None:
    mask_WW = ancestor_mask(tree_of([[-1, 0, 0, 1, -1, -1]]))[0].int().tolist()
    assert mask_WW == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_empty_batch() -> None:
    tree = DraftTree.chain(torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert ancestor_mask(tree).shape == (0, 5, 5)


def test_traces_without_a_graph_break() -> None:
    tree = tree_of(random_parents(0, 3, 9))
    traced = torch.compile(ancestor_mask, fullgraph=True, backend="eager")(tree)
    assert torch.equal(traced, ancestor_mask(tree))
