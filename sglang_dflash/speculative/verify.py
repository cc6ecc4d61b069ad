"""The target's side of a round: one forward over the root and the nodes of every tree.

Row 0 of a request is its bonus token; a node's position is the committed length plus its depth, and it attends the committed
context, its ancestors and itself. A chain is the tree whose mask is causal, so it is sent without a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_utils import GrammarTree

from sglang_dflash.kernels.tree_mask import write_window_mask
from sglang_dflash.speculative.tree import DraftTree


@dataclass
class TreeVerifyInput(DFlashVerifyInput):
    """SGLang's verify input plus the in-tree visibility.

    Attributes:
        tree_mask_BWW: bool ``[requests, width, width]``, True where a row attends a row; None for a chain. The torch backend
            reads it; Triton reads ``custom_mask``, which is the same in its own layout.
    """

    tree_mask_BWW: torch.Tensor | None = None

    def generate_attn_arg_prefill(
        self,
        *,
        req_pool_indices: torch.Tensor,
        paged_kernel_lens: torch.Tensor,
        paged_kernel_lens_sum: int,
        **rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """FlashInfer asks for its arguments. It reads the context's mask bytes too, and those of requests that pad a graph."""
        indices, indptr, query_indptr, _ = super().generate_attn_arg_prefill(
            req_pool_indices=req_pool_indices,
            paged_kernel_lens=paged_kernel_lens,
            paged_kernel_lens_sum=paged_kernel_lens_sum,
            **rest,
        )
        if self.tree_mask_BWW is None:
            return indices, indptr, query_indptr, None
        width, requests = self.draft_token_num, len(req_pool_indices)
        sees = torch.ones(width * (paged_kernel_lens_sum + width * requests), dtype=torch.bool, device=indices.device)
        write_window_mask(sees.view(torch.uint8), self.tree_mask_BWW, paged_kernel_lens[: len(self.tree_mask_BWW)])
        return indices, indptr, query_indptr, sees


def tree_verify_input(
    tree: DraftTree, context_len_B: torch.Tensor, custom_mask: torch.Tensor | None = None
) -> TreeVerifyInput:
    """The verify input of a batch of trees over ``context_len_B`` committed tokens each; see ``WindowMask``."""
    position_BW = context_len_B[:, None].to(torch.int64) + tree.depth_BW
    return TreeVerifyInput(
        draft_token=tree.token_BW.reshape(-1),
        positions=position_BW.reshape(-1),
        draft_token_num=tree.width,
        tree_mask_BWW=tree.mask_BWW,
        custom_mask=custom_mask,
    )


def grammar_links(tree: DraftTree) -> GrammarTree:
    """The tree as SGLang walks it for a grammar: each row's first child and next sibling (-1: none), on their way to the host."""
    row_W = torch.arange(tree.width, device=tree.parent_BW.device)
    valid_BW1 = tree.valid_BW[:, :, None]
    # Rows of dim 1 are candidates for being linked to from rows of dim 2.
    is_child_BWW = valid_BW1 & (tree.parent_BW[:, :, None] == row_W)
    is_later_sibling_BWW = (
        valid_BW1
        & tree.valid_BW[:, None, :]
        & (tree.parent_BW[:, :, None] == tree.parent_BW[:, None, :])
        & (row_W[:, None] > row_W)
    )
    child_BW, sibling_BW = (
        torch.where(link_BWW.any(dim=1), link_BWW.to(torch.int8).argmax(dim=1), -1)
        for link_BWW in (is_child_BWW, is_later_sibling_BWW)
    )
    return GrammarTree.from_device(child_BW, sibling_BW, tree.token_BW)


class WindowMask:
    """The tree mask where SGLang's Triton backend reads it.

    The backend's CUDA graphs read one buffer of fixed address; a batch that is larger than any captured one runs eagerly and
    reads the buffer that it is given. Both read past the tensor that ``write`` returns: it only carries the address, and is
    one byte long because the backend copies what it is given onto its own buffer.
    """

    def __init__(self, backend: Any, width: int) -> None:
        self._backend = backend
        self._width = width
        self._spare: torch.Tensor | None = None

    def write(
        self, mask_BWW: torch.Tensor, context_len_B: torch.Tensor, context_len_cpu_B: torch.Tensor
    ) -> torch.Tensor:
        """Write the masks of a batch.

        Args:
            context_len_cpu_B: lengths on the host, which may be larger than those on the device, never smaller.
        """
        captured = self._backend.verify_mask
        if captured is not None and captured.fits(mask_BWW.shape[0]):
            buffer = captured.buffer
        else:
            buffer = self._eager_buffer(int(context_len_cpu_B.sum()), mask_BWW)
        write_window_mask(buffer, mask_BWW, context_len_B)
        return buffer[:1]

    def _eager_buffer(self, context: int, mask_BWW: torch.Tensor) -> torch.Tensor:
        size = self._width * (context + self._width * mask_BWW.shape[0])
        if self._spare is None or len(self._spare) < size:
            self._spare = torch.zeros(2 * size, dtype=torch.uint8, device=mask_BWW.device)
        return self._spare
