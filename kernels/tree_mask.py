"""Who sees whom inside a draft tree: a row attends itself and its ancestors.

Padding rows attend themselves alone, so that their softmax is finite; nothing attends them. ``ancestor_mask`` is
static-shaped torch without a host synchronisation; ``ancestor_mask_reference`` follows parents in plain Python.
"""

from __future__ import annotations

import torch

from sglang_dflash.speculative.tree import DraftTree


def ancestor_mask(tree: DraftTree) -> torch.Tensor:
    """Bool ``[B, W, W]``: True where the row of dim 1 attends the row of dim 2.

    Doubles the reach of every row until it spans the deepest possible path (pointer jumping).
    """
    eye_WW = torch.eye(tree.width, dtype=torch.bool, device=tree.parent_BW.device)
    row_W = torch.arange(tree.width, device=tree.parent_BW.device)
    reach_BWW = eye_WW | (tree.parent_BW[:, :, None] == row_W)
    for _ in range((tree.width - 1).bit_length()):
        # Products of 0/1 matrices in fp32 are exact up to 2**24 rows.
        reach_BWW = torch.bmm(reach_BWW.float(), reach_BWW.float()) > 0
    return reach_BWW


def ancestor_mask_reference(parent_W: list[int]) -> list[list[bool]]:
    """The mask of one tree, row by row."""
    width = len(parent_W)
    mask = [[False] * width for _ in range(width)]
    for row in range(width):
        seen = row
        while seen >= 0:
            mask[row][seen] = True
            seen = parent_W[seen]
    return mask
