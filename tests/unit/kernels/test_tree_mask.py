from __future__ import annotations

import random

import pytest
import torch

from sglang_dflash.kernels.tree_mask import (
    ancestor_mask,
    ancestor_mask_reference,
    write_window_mask,
    write_window_mask_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
    mask_BWW = ancestor_mask(torch.tensor(parents))
    assert mask_BWW.dtype == torch.bool
    assert mask_BWW.tolist() == [ancestor_mask_reference(parent) for parent in parents]


@pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 64, 65])
def test_chain_is_causal(width: int) -> None:
    parent_BW = torch.arange(-1, width - 1).expand(2, -1)
    assert torch.equal(ancestor_mask(parent_BW), torch.ones(2, width, width, dtype=torch.bool).tril())


def test_padding_sees_itself_alone_and_is_seen_by_nobody() -> None:
    mask_WW = ancestor_mask(torch.tensor([[-1, 0, 0, 1, -1, -1]]))[0].int().tolist()
    assert mask_WW == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_empty_batch() -> None:
    assert ancestor_mask(torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 5, 5)


def test_traces_without_a_graph_break() -> None:
    parent_BW = torch.tensor(random_parents(0, 3, 9))
    traced = torch.compile(ancestor_mask, fullgraph=True, backend="eager")(parent_BW)
    assert torch.equal(traced, ancestor_mask(parent_BW))


@pytest.mark.parametrize("width", [2, 5, 17, 65])
@pytest.mark.parametrize("context", [[0], [7, 0, 1, 33], [5] * 9])
def test_window_masks_stand_where_the_extend_kernel_reads_them(width: int, context: list[int]) -> None:
    mask_BWW = ancestor_mask(torch.tensor(random_parents(1, len(context), width)))
    expected = torch.full((sum(width * (length + width) for length in context) + 3,), 7, dtype=torch.uint8)
    buffer = expected.to(DEVICE)
    write_window_mask_reference(expected, mask_BWW, torch.tensor(context))
    write_window_mask(buffer, mask_BWW.to(DEVICE), torch.tensor(context, device=DEVICE))
    assert torch.equal(buffer.cpu(), expected)
    assert int((expected == 7).sum()) == width * sum(context) + 3, "the context's bytes are left alone"


def test_window_masks_of_the_first_rows_of_wider_trees() -> None:
    mask_BWW = ancestor_mask(torch.tensor(random_parents(2, 3, 17)))[:, :9, :9]
    expected = torch.zeros(sum(9 * (length + 9) for length in (4, 0, 6)), dtype=torch.uint8)
    buffer = expected.to(DEVICE)
    write_window_mask_reference(expected, mask_BWW, torch.tensor([4, 0, 6]))
    write_window_mask(buffer, mask_BWW.to(DEVICE), torch.tensor([4, 0, 6], device=DEVICE))
    assert torch.equal(buffer.cpu(), expected)
