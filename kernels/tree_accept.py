"""Acceptance: walk a draft tree along the target's own choices.

From the root, the walk descends to the child that carries the target's token at the current row, and stops where there is
none; that token is the next bonus. The result depends on the drafter only in how far the walk gets. Siblings carry different
tokens; were two equal, the first would be taken.

``accept_tree`` is static-shaped and never synchronises with the host: one Triton program per request on a GPU, torch
elsewhere; ``accept_reference`` walks one tree in plain Python.

Shapes: B requests, W rows, D1 = max_depth + 1 places of a path (root included).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_dflash.speculative.tree import DraftTree


@dataclass(frozen=True)
class Acceptance:
    """The accepted path of every tree in a batch.

    Attributes:
        row_BD: int64 ``[B, D1]``, rows of the path, root first; places past the path repeat its last row.
        length_B: int64, accepted draft tokens (0 to max_depth); the path has one row more.
        bonus_B: int64, the target's token after the last accepted row.
        token_BD: int64 ``[B, D1]``, emitted tokens: accepted drafts, then the bonus, then zeros.
    """

    row_BD: torch.Tensor
    length_B: torch.Tensor
    bonus_B: torch.Tensor
    token_BD: torch.Tensor


def accept_tree(tree: DraftTree, target_token_BW: torch.Tensor, *, max_depth: int) -> Acceptance:
    """Accept along the target's choices.

    Args:
        tree: the batch of draft trees.
        target_token_BW: int64, the target's token after each row.
        max_depth: the deepest a walk can get (nodes below it are not reached).
    """
    accept = accept_tree_triton if target_token_BW.is_cuda else accept_tree_torch
    return accept(tree, target_token_BW, max_depth=max_depth)


def accept_tree_triton(tree: DraftTree, target_token_BW: torch.Tensor, *, max_depth: int) -> Acceptance:
    """``accept_tree`` as one Triton program per request."""
    row_BD = tree.token_BW.new_empty((tree.batch, max_depth + 1))
    token_BD, length_B, bonus_B = torch.empty_like(row_BD), row_BD.new_empty(tree.batch), row_BD.new_empty(tree.batch)
    _accept_kernel[(tree.batch,)](
        tree.token_BW,
        tree.parent_BW,
        tree.valid_BW,
        target_token_BW.contiguous(),
        row_BD,
        length_B,
        bonus_B,
        token_BD,
        tree.token_BW.stride(0),
        tree.parent_BW.stride(0),
        tree.valid_BW.stride(0),
        tree.width,
        max_depth,
        BLOCK_W=triton.next_power_of_2(tree.width),
        num_warps=1,
    )
    return Acceptance(row_BD, length_B, bonus_B, token_BD)


@triton.jit
def _accept_kernel(  # type: ignore[no-untyped-def]
    token_ptr,
    parent_ptr,
    valid_ptr,
    target_ptr,
    row_out,
    length_out,
    bonus_out,
    emitted_out,
    token_stride,
    parent_stride,
    valid_stride,
    width,
    max_depth,
    BLOCK_W: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row_W = tl.arange(0, BLOCK_W)
    inside_W = row_W < width
    token_W = tl.load(token_ptr + request * token_stride + row_W, mask=inside_W, other=0)
    parent_W = tl.load(parent_ptr + request * parent_stride + row_W, mask=inside_W, other=-1)
    valid_W = tl.load(valid_ptr + request * valid_stride + row_W, mask=inside_W, other=0) != 0
    target_W = tl.load(target_ptr + request * width + row_W, mask=inside_W, other=0)
    row, length, going = 0, 0, 1
    for depth in range(max_depth + 1):
        wanted = tl.sum(tl.where(row_W == row, target_W, 0), 0)
        place = request * (max_depth + 1) + depth
        tl.store(row_out + place, row)
        tl.store(emitted_out + place, tl.where(depth <= length, wanted, 0))
        tl.store(bonus_out + request, wanted)
        child = tl.min(tl.where((parent_W == row) & (token_W == wanted) & valid_W, row_W, BLOCK_W), 0)
        going = tl.where((child < BLOCK_W) & (depth < max_depth), going, 0)
        row = tl.where(going == 1, child, row)
        length += going
    tl.store(length_out + request, length)


def accept_tree_torch(tree: DraftTree, target_token_BW: torch.Tensor, *, max_depth: int) -> Acceptance:
    """``accept_tree`` in torch."""
    row_B = torch.zeros_like(tree.token_BW[:, 0])
    going_B = torch.ones_like(row_B, dtype=torch.bool)
    length_B = torch.zeros_like(row_B)
    path = [row_B]
    for _ in range(max_depth):
        wanted_B1 = target_token_BW.gather(1, row_B[:, None])
        match_BW = (tree.parent_BW == row_B[:, None]) & (tree.token_BW == wanted_B1) & tree.valid_BW
        going_B = going_B & match_BW.any(dim=1)
        # argmax of bool takes the first match.
        row_B = torch.where(going_B, match_BW.to(torch.int8).argmax(dim=1), row_B)
        length_B = length_B + going_B
        path.append(row_B)
    row_BD = torch.stack(path, dim=1)
    place_D = torch.arange(max_depth + 1, device=row_BD.device)
    emitted_BD = target_token_BW.gather(1, row_BD)
    return Acceptance(
        row_BD=row_BD,
        length_B=length_B,
        bonus_B=target_token_BW.gather(1, row_B[:, None])[:, 0],
        token_BD=torch.where(place_D <= length_B[:, None], emitted_BD, 0),
    )


def accept_reference(
    token_W: list[int], parent_W: list[int], valid_W: list[bool], target_token_W: list[int], *, max_depth: int
) -> tuple[list[int], int]:
    """Rows of the accepted path (root first) and the bonus token of one tree."""
    path = [0]
    while len(path) <= max_depth:
        wanted = target_token_W[path[-1]]
        children = [
            row
            for row, (token, parent, valid) in enumerate(zip(token_W, parent_W, valid_W, strict=True))
            if valid and row > 0 and parent == path[-1] and token == wanted
        ]
        if not children:
            break
        path.append(children[0])
    return path, target_token_W[path[-1]]
