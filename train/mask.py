"""Who attends whom in training: many blocks of one sample in one forward, each as it would stand alone when serving.

A row of the block at anchor position P sees context positions strictly before P (the anchor's own taps do not exist yet when
serving) and rows of its own block: all of them, or the earlier ones when causal. Blocks never see each other. Keys are the T
context positions, then the block rows in query order.

Shapes: B samples, A anchors, S block size, Q = A * S, T context positions.
"""

from __future__ import annotations

import torch


def block_attention_mask(anchor_BA: torch.Tensor, num_context: int, block_size: int, *, causal: bool) -> torch.Tensor:
    """Bool ``[B, Q, T + Q]``, True where a block row attends a key.

    Args:
        anchor_BA: int64 anchor positions. A padding anchor may have any position; its rows are masked like others, and its
            loss is left out elsewhere.
    """
    device = anchor_BA.device
    rows = anchor_BA.shape[1] * block_size
    anchor_BQ = anchor_BA.repeat_interleave(block_size, dim=1)
    context_BQT = torch.arange(num_context, device=device) < anchor_BQ[:, :, None]
    row_Q = torch.arange(rows, device=device)
    block_QQ = row_Q[:, None] // block_size == row_Q // block_size
    if causal:
        block_QQ = block_QQ & (row_Q <= row_Q[:, None])
    return torch.cat([context_BQT, block_QQ.expand(anchor_BA.shape[0], rows, rows)], dim=2)


def block_attention_mask_reference(
    anchors: list[int], num_context: int, block_size: int, *, causal: bool
) -> list[list[bool]]:
    """The mask of one sample, key by key."""
    mask = []
    for block, anchor in enumerate(anchors):
        for slot in range(block_size):
            context = [position < anchor for position in range(num_context)]
            rows = [
                other == block and (not causal or other_slot <= slot)
                for other in range(len(anchors))
                for other_slot in range(block_size)
            ]
            mask.append(context + rows)
    return mask
