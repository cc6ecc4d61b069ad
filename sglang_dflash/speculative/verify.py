"""The target's side of a round: one forward over the root and the nodes of every tree.

Row 0 of a request is its bonus token; a node's position is the committed length plus its depth, and it attends the committed
context, its ancestors and itself. A chain is the tree whose mask is causal, so it is sent without a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_dflash.kernels.tree_mask import ancestor_mask
from sglang_dflash.speculative.tree import DraftTree


@dataclass
class TreeVerifyInput(DFlashVerifyInput):
    """SGLang's verify input plus the in-tree visibility.

    Attributes:
        tree_mask_BWW: bool ``[requests, width, width]``, True where a row attends a row; None for a chain.
    """

    tree_mask_BWW: torch.Tensor | None = None


def tree_verify_input(tree: DraftTree, context_len_B: torch.Tensor) -> TreeVerifyInput:
    """The verify input of a batch of trees over ``context_len_B`` committed tokens each."""
    position_BW = context_len_B[:, None].to(torch.int64) + tree.depth_BW
    return TreeVerifyInput(
        draft_token=tree.token_BW.reshape(-1),
        positions=position_BW.reshape(-1),
        draft_token_num=tree.width,
        tree_mask_BWW=None if tree.is_chain else ancestor_mask(tree),
    )
