from __future__ import annotations

import pytest
import torch

from sglang_dflash.kernels.round_plan import (
    CommitPlan,
    Opened,
    open_round,
    open_round_torch,
    open_round_triton,
    plan_commit,
    plan_commit_torch,
    plan_commit_triton,
)
from sglang_dflash.kernels.tree_accept import Acceptance, accept_tree

from .test_tree_accept import make_tree, random_batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_round_opens_behind_the_context() -> None:
    table = torch.arange(40).view(2, 20).int()
    opened = open_round_torch(torch.tensor([3, 4]), torch.tensor([10, 0]), torch.tensor([1, 0]), table, 3, 5, 99)
    assert opened.token_BT.tolist() == [[3, 99, 99], [4, 99, 99]]
    assert opened.position_BT.tolist() == [[10, 11, 12], [0, 1, 2]]
    assert opened.slot_BS.tolist() == [[30, 31, 32, 33, 34], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("batch", "block", "slots"), [(1, 2, 2), (3, 8, 17), (5, 16, 16), (2, 8, 65)])
def test_triton_opens_the_same_round(batch: int, block: int, slots: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(batch)
    table = torch.randint(10_000, (7, 200), generator=generator, dtype=torch.int32)
    bonus_B = torch.randint(50_000, (batch,), generator=generator)
    context_B = torch.randint(200 - slots, (batch,), generator=generator).to(dtype)
    row_B = torch.randperm(7, generator=generator)[:batch].to(dtype)
    expected = open_round_torch(bonus_B, context_B, row_B, table, block, slots, 16)
    on_device = [tensor.to(DEVICE) for tensor in (bonus_B, context_B, row_B, table)]
    for name, one, other in zip(Opened._fields, open_round_triton(*on_device, block, slots, 16), expected, strict=True):
        assert one.dtype == other.dtype == torch.int64, name
        assert torch.equal(one.cpu(), other), name
    chosen = open_round(*on_device, block_size=block, num_slots=slots, mask_token_id=16)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(chosen, expected, strict=True))


@pytest.mark.parametrize(("width", "max_depth"), [(9, 8), (9, 3), (33, 7)])
def test_a_commit_brings_the_path_to_the_front(width: int, max_depth: int) -> None:
    batch = 100
    tree, target_BW = random_batch(width + 1, batch, width, 3)
    acceptance = accept_tree(tree, target_BW, max_depth=max_depth)
    pool_size = batch * width + 50
    slots = torch.randperm(pool_size, generator=torch.Generator().manual_seed(0))[: batch * width]
    slot_BW, context_B = slots.view(batch, width), torch.arange(batch)
    plan = plan_commit_torch(acceptance, context_B, slot_BW, width)
    before = torch.arange(pool_size)
    after = before.clone()
    after[plan.slot_BD.reshape(-1)] = before[plan.source_BD.reshape(-1)]
    moved = 0
    for request, length in enumerate(acceptance.length_B.tolist()):
        window = slot_BW[request].tolist()
        rows = acceptance.row_BD[request, : length + 1].tolist()
        assert all(row >= place for place, row in enumerate(rows)), "a destination lies behind its source"
        assert after[window[: length + 1]].tolist() == [window[row] for row in rows]
        assert torch.equal(after[window[length + 1 :]], before[window[length + 1 :]])
        assert plan.hidden_BD[request, : length + 1].tolist() == [request * width + row for row in rows]
        assert plan.position_BD[request].tolist() == list(range(request, request + max_depth + 1))
        assert (int(plan.length_B[request]), int(plan.new_context_len_B[request])) == (length + 1, request + length + 1)
        moved += sum(row != place for place, row in enumerate(rows))
    assert moved > 0
    outside = torch.ones(pool_size, dtype=torch.bool)
    outside[slots] = False
    assert torch.equal(after[outside], before[outside])


def test_a_path_along_the_spine_moves_nothing() -> None:
    """Rows 1 to 3 are the spine, row 4 a branch; whatever part of the spine is accepted stays where it is."""
    tree = make_tree([[9, 1, 2, 3, 4]] * 4, [[-1, 0, 1, 2, 0]] * 4)
    target_BW = torch.tensor([[1, 2, 3, 0, 0], [1, 2, 0, 0, 0], [0, 0, 0, 0, 0], [4, 0, 0, 0, 0]])
    slot_BW = torch.randperm(20, generator=torch.Generator().manual_seed(1)).view(4, 5)
    plan = plan_commit_torch(accept_tree(tree, target_BW, max_depth=3), torch.zeros(4).long(), slot_BW, 5)
    assert torch.equal(plan.source_BD[:3], plan.slot_BD[:3])
    assert plan.source_BD[3, 1] == slot_BW[3, 4] and plan.slot_BD[3, 1] == slot_BW[3, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("width", "slots", "max_depth"), [(2, 8, 1), (9, 9, 8), (17, 17, 7), (65, 65, 15)])
def test_triton_plans_the_same_commit(width: int, slots: int, max_depth: int, dtype: torch.dtype) -> None:
    batch = 12
    tree, target_BW = random_batch(3, batch, width, 4)
    acceptance = accept_tree(tree, target_BW, max_depth=max_depth)
    slot_BS = torch.randperm(batch * slots, generator=torch.Generator().manual_seed(2)).view(batch, slots)
    context_B = torch.randint(5000, (batch,), generator=torch.Generator().manual_seed(3)).to(dtype)
    expected = plan_commit_torch(acceptance, context_B, slot_BS, width)
    moved = Acceptance(
        *(getattr(acceptance, name).to(DEVICE) for name in ("row_BD", "length_B", "bonus_B", "token_BD"))
    )
    actual = plan_commit_triton(moved, context_B.to(DEVICE), slot_BS.to(DEVICE), width)
    for name, one, other in zip(CommitPlan._fields, actual, expected, strict=True):
        assert one.dtype == other.dtype, name
        assert torch.equal(one.cpu(), other), name
    chosen = plan_commit(moved, context_B.to(DEVICE), slot_BS.to(DEVICE), width=width)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(chosen, expected, strict=True))
