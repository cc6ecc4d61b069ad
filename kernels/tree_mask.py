"""Who sees whom inside a draft tree: a row attends itself and its ancestors; and that mask where an attention kernel reads it.

Padding rows attend themselves alone, so that their softmax is finite; nothing attends them. ``ancestor_mask`` is
static-shaped torch without a host synchronisation; ``ancestor_mask_reference`` follows parents in plain Python.

``write_window_mask`` puts the masks into the layout of SGLang's extend kernels (``TreeMaskMode.FULL_MASK``): request after
request, W rows of context + W bytes. Only the last W bytes of a row are written, since those kernels see the whole context
without asking the mask. Row starts follow from lengths on the device, so nothing is read back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def ancestor_mask(parent_BW: torch.Tensor) -> torch.Tensor:
    """Bool ``[B, W, W]``: True where the row of dim 1 attends the row of dim 2; ``parent_BW`` as in ``DraftTree``.

    Doubles the reach of every row until it spans the deepest possible path (pointer jumping).
    """
    width = parent_BW.shape[1]
    eye_WW = torch.eye(width, dtype=torch.bool, device=parent_BW.device)
    row_W = torch.arange(width, device=parent_BW.device)
    reach_BWW = eye_WW | (parent_BW[:, :, None] == row_W)
    for _ in range((width - 1).bit_length()):
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


def write_window_mask(buffer: torch.Tensor, mask_BWW: torch.Tensor, context_len_B: torch.Tensor) -> None:
    """Write the masks of a batch into ``buffer`` (uint8 or bool, flat), in ``FULL_MASK`` layout, context bytes left alone.

    Args:
        context_len_B: committed tokens of each request, on the device of ``buffer``.
    """
    batch, width, _ = mask_BWW.shape
    _window_mask_kernel[(batch, width)](
        buffer,
        mask_BWW.view(torch.uint8),
        context_len_B,
        mask_BWW.stride(0),
        mask_BWW.stride(1),
        width,
        BLOCK_W=triton.next_power_of_2(width),
        BLOCK_B=triton.next_power_of_2(batch),
        num_warps=1,
    )


@triton.jit
def _window_mask_kernel(  # type: ignore[no-untyped-def]
    buffer_ptr,
    mask_ptr,
    context_ptr,
    request_stride,
    row_stride,
    width,
    BLOCK_W: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    request = tl.program_id(0)
    row = tl.program_id(1)
    request_B = tl.arange(0, BLOCK_B)
    before_B = tl.load(context_ptr + request_B, mask=request_B < request, other=0).to(tl.int64)
    start = width * (tl.sum(before_B, 0) + request * width)
    context = tl.load(context_ptr + request).to(tl.int64)
    column_W = tl.arange(0, BLOCK_W)
    inside_W = column_W < width
    sees_W = tl.load(mask_ptr + request * request_stride + row * row_stride + column_W, mask=inside_W)
    tl.store(buffer_ptr + start + row * (context + width) + context + column_W, sees_W, mask=inside_W)


def write_window_mask_reference(buffer: torch.Tensor, mask_BWW: torch.Tensor, context_len_B: torch.Tensor) -> None:
    """``write_window_mask``, request by request and row by row."""
    width = mask_BWW.shape[1]
    start = 0
    for mask_WW, context in zip(mask_BWW, context_len_B.tolist(), strict=True):
        for row_W in mask_WW:
            buffer[start + context : start + context + width] = row_W
            start += context + width
