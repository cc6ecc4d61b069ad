"""What is captured behind the drafter's forward in its CUDA graph: candidates, trees and masks, in buffers of fixed address.

SGLang calls a tail hook while it captures a graph; the graph then repeats it with every draft, padding requests included. A
round reads the first ``batch`` trees. They are good until the next draft.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_dflash.speculative.tree import DraftTree


class DraftTail:
    """Builds trees behind the drafter's forward; SGLang sees it as the drafter's sampler.

    Args:
        propose: hidden states ``[requests, block, hidden]`` and bonus tokens ``[requests]`` to trees.
        storage: empty trees, as many as the largest captured batch.
    """

    def __init__(
        self, propose: Callable[[torch.Tensor, torch.Tensor], DraftTree], *, block_size: int, storage: DraftTree
    ) -> None:
        self._propose = propose
        self._block_size = block_size
        self._storage = storage

    def __call__(self, hidden_TH: torch.Tensor, input_ids_T: torch.Tensor) -> None:
        """Record the tail: ``input_ids_T`` are the block's, whose first is the bonus token."""
        hidden_BTH = hidden_TH.view(-1, self._block_size, hidden_TH.shape[-1])
        bonus_B = input_ids_T.view(-1, self._block_size)[:, 0].to(torch.int64)
        tree = self._propose(hidden_BTH, bonus_B)
        for stored, made in zip(self._storage.first(tree.batch).tensors(), tree.tensors(), strict=True):
            stored.copy_(made)

    def trees(self, batch: int) -> DraftTree:
        """The trees of the last draft."""
        return self._storage.first(batch)
