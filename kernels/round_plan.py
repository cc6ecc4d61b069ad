"""Where a round reads and writes, each in one launch: before the draft (``open_round``), and after acceptance (``plan_commit``).

Rounds of a small model are bound by the host: every index computed by its own torch operation is a launch that the GPU waits
for. Both operations are static-shaped, never synchronise with the host, and have their torch form beside them, which serves
where there is no GPU.

Shapes: B requests, T block rows, S = max(block, width) slots of a round, W verify rows, D1 = max depth + 1 places of a path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_dflash.kernels.tree_accept import Acceptance


class Opened(NamedTuple):
    """A round's block rows and KV slots, all int64.

    Attributes:
        token_BT: the bonus token as anchor, then MASK.
        position_BT: positions behind the committed context.
        slot_BS: KV slots behind the committed context; the block writes the first T, the verify the first W.
    """

    token_BT: torch.Tensor
    position_BT: torch.Tensor
    slot_BS: torch.Tensor


class CommitPlan(NamedTuple):
    """What committing an acceptance reads and writes. Places past a path repeat its last row, or move onto themselves.

    Attributes:
        length_B: int32, committed rows, root included.
        new_context_len_B: context lengths after the commit, in the dtype that they had.
        hidden_BD: int64, flat rows of the path in the ``[B * W]`` verified rows.
        position_BD: int64, positions of the path.
        source_BD, slot_BD: int64, KV slots that move, and where to: the front of the window. No destination lies behind its
            source, because rows are numbered so that a path's row i is never before i: gather all, then scatter.
    """

    length_B: torch.Tensor
    new_context_len_B: torch.Tensor
    hidden_BD: torch.Tensor
    position_BD: torch.Tensor
    source_BD: torch.Tensor
    slot_BD: torch.Tensor


def open_round(
    bonus_B: torch.Tensor,
    context_len_B: torch.Tensor,
    pool_index_B: torch.Tensor,
    req_to_token: torch.Tensor,
    *,
    block_size: int,
    num_slots: int,
    mask_token_id: int,
) -> Opened:
    """The rows and slots of a round.

    Args:
        pool_index_B: each request's row of ``req_to_token``.
        num_slots: S, at least ``block_size``; that many slots are reserved behind every context.
    """
    make = open_round_triton if req_to_token.is_cuda else open_round_torch
    return make(bonus_B, context_len_B, pool_index_B, req_to_token, block_size, num_slots, mask_token_id)


def open_round_torch(
    bonus_B: torch.Tensor,
    context_len_B: torch.Tensor,
    pool_index_B: torch.Tensor,
    req_to_token: torch.Tensor,
    block_size: int,
    num_slots: int,
    mask_token_id: int,
) -> Opened:
    """``open_round`` in torch."""
    position_BS = context_len_B[:, None].to(torch.int64) + torch.arange(num_slots, device=req_to_token.device)
    token_BT = torch.full_like(position_BS[:, :block_size], mask_token_id)
    token_BT[:, 0] = bonus_B
    slot_BS = req_to_token[pool_index_B[:, None].to(torch.int64), position_BS].to(torch.int64)
    return Opened(token_BT, position_BS[:, :block_size], slot_BS)


def open_round_triton(
    bonus_B: torch.Tensor,
    context_len_B: torch.Tensor,
    pool_index_B: torch.Tensor,
    req_to_token: torch.Tensor,
    block_size: int,
    num_slots: int,
    mask_token_id: int,
) -> Opened:
    """``open_round`` as one Triton program per request."""
    batch = len(bonus_B)
    token_BT = bonus_B.new_empty((batch, block_size), dtype=torch.int64)
    opened = Opened(token_BT, torch.empty_like(token_BT), token_BT.new_empty((batch, num_slots)))
    _open_kernel[(batch,)](
        bonus_B,
        context_len_B,
        pool_index_B,
        req_to_token,
        *opened,
        req_to_token.stride(0),
        block_size,
        num_slots,
        mask_token_id,
        BLOCK_S=triton.next_power_of_2(num_slots),
        num_warps=1,
    )
    return opened


@triton.jit
def _open_kernel(  # type: ignore[no-untyped-def]
    bonus_ptr,
    context_ptr,
    pool_index_ptr,
    table_ptr,
    token_ptr,
    position_ptr,
    slot_ptr,
    table_stride,
    block_size,
    num_slots,
    mask_token_id,
    BLOCK_S: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    place_S = tl.arange(0, BLOCK_S)
    position_S = tl.load(context_ptr + request).to(tl.int64) + place_S
    row = tl.load(pool_index_ptr + request).to(tl.int64) * table_stride
    slot_S = tl.load(table_ptr + row + position_S, mask=place_S < num_slots, other=0).to(tl.int64)
    tl.store(slot_ptr + request * num_slots + place_S, slot_S, mask=place_S < num_slots)
    bonus = tl.load(bonus_ptr + request).to(tl.int64)
    token_S = tl.where(place_S == 0, bonus, mask_token_id)
    out_S = request * block_size + place_S
    tl.store(token_ptr + out_S, token_S, mask=place_S < block_size)
    tl.store(position_ptr + out_S, position_S, mask=place_S < block_size)


def plan_commit(
    acceptance: Acceptance, context_len_B: torch.Tensor, slot_BS: torch.Tensor, *, width: int
) -> CommitPlan:
    """What to read and write to commit an acceptance.

    Args:
        slot_BS: the round's slots; row i of a tree was verified in the i-th.
        width: W, rows of one request in the verified rows.
    """
    make = plan_commit_triton if slot_BS.is_cuda else plan_commit_torch
    return make(acceptance, context_len_B, slot_BS, width)


def plan_commit_torch(
    acceptance: Acceptance, context_len_B: torch.Tensor, slot_BS: torch.Tensor, width: int
) -> CommitPlan:
    """``plan_commit`` in torch."""
    row_BD = acceptance.row_BD
    batch, places = row_BD.shape
    place_D = torch.arange(places, device=row_BD.device)
    slot_BD = slot_BS[:, :places].contiguous()
    on_path_BD = place_D <= acceptance.length_B[:, None]
    length_B = (acceptance.length_B + 1).to(torch.int32)
    return CommitPlan(
        length_B=length_B,
        new_context_len_B=context_len_B + length_B.to(context_len_B.dtype),
        hidden_BD=torch.arange(batch, device=row_BD.device)[:, None] * width + row_BD,
        position_BD=context_len_B[:, None].to(torch.int64) + place_D,
        source_BD=torch.where(on_path_BD, slot_BS.gather(1, row_BD), slot_BD),
        slot_BD=slot_BD,
    )


def plan_commit_triton(
    acceptance: Acceptance, context_len_B: torch.Tensor, slot_BS: torch.Tensor, width: int
) -> CommitPlan:
    """``plan_commit`` as one Triton program per request."""
    row_BD = acceptance.row_BD
    batch, places = row_BD.shape
    plan = CommitPlan(
        row_BD.new_empty(batch, dtype=torch.int32),
        torch.empty_like(context_len_B),
        *(torch.empty_like(row_BD) for _ in range(4)),
    )
    _commit_kernel[(batch,)](
        row_BD,
        acceptance.length_B,
        context_len_B,
        slot_BS,
        *plan,
        slot_BS.stride(0),
        width,
        places,
        BLOCK_D=triton.next_power_of_2(places),
        num_warps=1,
    )
    return plan


@triton.jit
def _commit_kernel(  # type: ignore[no-untyped-def]
    row_ptr,
    accepted_ptr,
    context_ptr,
    window_ptr,
    length_ptr,
    new_context_ptr,
    hidden_ptr,
    position_ptr,
    source_ptr,
    slot_ptr,
    window_stride,
    width,
    places,
    BLOCK_D: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    place_D = tl.arange(0, BLOCK_D)
    inside_D = place_D < places
    accepted = tl.load(accepted_ptr + request)
    context = tl.load(context_ptr + request)
    tl.store(length_ptr + request, (accepted + 1).to(tl.int32))
    tl.store(new_context_ptr + request, context + (accepted + 1).to(context.dtype))
    out_D = request * places + place_D
    row_D = tl.load(row_ptr + out_D, mask=inside_D, other=0)
    window = window_ptr + request * window_stride
    slot_D = tl.load(window + place_D, mask=inside_D, other=0)
    source_D = tl.load(window + row_D, mask=inside_D, other=0)
    tl.store(hidden_ptr + out_D, request * width + row_D, mask=inside_D)
    tl.store(position_ptr + out_D, context.to(tl.int64) + place_D, mask=inside_D)
    tl.store(source_ptr + out_D, tl.where(place_D <= accepted, source_D, slot_D), mask=inside_D)
    tl.store(slot_ptr + out_D, slot_D, mask=inside_D)
