"""The draft tree of one round, for a batch of requests: plain tensors, one row a node.

Row 0 is the root, which carries the bonus token. Parents come before their children. Trees of a batch have one width; a
request with fewer prefixes than nodes pads with rows that are never valid, attended or accepted.

Shapes: B requests, W rows (width = nodes + 1), L draft positions (block - 1).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch


@dataclass(frozen=True)
class DraftTree:
    """A batch of draft trees.

    Attributes:
        token_BW: int64, the token of each row; the bonus token at row 0.
        parent_BW: int64, the row of the parent; -1 for the root and for padding.
        depth_BW: int64, 0 for the root and for padding.
        score_BW: fp32, log-probability of the prefix that ends in the row; 0 for the root, -inf for padding.
        valid_BW: bool, False for padding.
        mask_BWW: bool, True where the row of dim 1 attends the row of dim 2 (itself and its ancestors); None for a chain,
            whose mask is causal.
        is_chain: every tree is one branch with row i at depth i. Known when the tree is made, never read from the device.
        num_spine: nodes of the greedy chain, which are rows 1 to ``num_spine`` at depths 1 to ``num_spine``.
    """

    token_BW: torch.Tensor
    parent_BW: torch.Tensor
    depth_BW: torch.Tensor
    score_BW: torch.Tensor
    valid_BW: torch.Tensor
    mask_BWW: torch.Tensor | None = None
    is_chain: bool = False
    num_spine: int = 0

    @property
    def batch(self) -> int:
        return int(self.token_BW.shape[0])

    @property
    def width(self) -> int:
        return int(self.token_BW.shape[1])

    @staticmethod
    def empty(batch: int, width: int, device: torch.device | str, *, num_spine: int = 0) -> DraftTree:
        """Storage, not filled, for trees that a kernel or a CUDA graph writes whole."""
        shape = (batch, width)
        return DraftTree(
            token_BW=torch.empty(shape, dtype=torch.int64, device=device),
            parent_BW=torch.empty(shape, dtype=torch.int64, device=device),
            depth_BW=torch.empty(shape, dtype=torch.int64, device=device),
            score_BW=torch.empty(shape, dtype=torch.float32, device=device),
            valid_BW=torch.empty(shape, dtype=torch.bool, device=device),
            mask_BWW=torch.empty((batch, width, width), dtype=torch.bool, device=device),
            num_spine=num_spine,
        )

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that there is, in the order of the attributes."""
        every = (self.token_BW, self.parent_BW, self.depth_BW, self.score_BW, self.valid_BW, self.mask_BWW)
        return [tensor for tensor in every if tensor is not None]

    def first(self, batch: int) -> DraftTree:
        """The trees of the first ``batch`` requests, as views."""
        return replace(
            self,
            **{
                field.name: getattr(self, field.name)[:batch]
                for field in fields(self)
                if isinstance(getattr(self, field.name), torch.Tensor)
            },
        )

    def narrowed(self, width: int) -> DraftTree:
        """The best trees of ``width`` rows, as views: the first rows. No wider than the spine, they are chains."""
        is_chain = width <= self.num_spine + 1
        if width == self.width and is_chain == self.is_chain:
            return self
        return DraftTree(
            token_BW=self.token_BW[:, :width],
            parent_BW=self.parent_BW[:, :width],
            depth_BW=self.depth_BW[:, :width],
            score_BW=self.score_BW[:, :width],
            valid_BW=self.valid_BW[:, :width],
            mask_BWW=None if is_chain or self.mask_BWW is None else self.mask_BWW[:, :width, :width],
            is_chain=is_chain,
            num_spine=min(self.num_spine, width - 1),
        )

    @staticmethod
    def chain(token_BL: torch.Tensor, bonus_B: torch.Tensor) -> DraftTree:
        """One branch per request: the bonus token, then ``token_BL`` in order. Scores are 0."""
        token_BW = torch.cat([bonus_B[:, None], token_BL], dim=1)
        row_BW = torch.arange(token_BW.shape[1], device=token_BW.device).expand_as(token_BW)
        return DraftTree(
            token_BW=token_BW,
            parent_BW=row_BW - 1,
            depth_BW=row_BW,
            score_BW=torch.zeros(token_BW.shape, dtype=torch.float32, device=token_BW.device),
            valid_BW=torch.ones_like(token_BW, dtype=torch.bool),
            is_chain=True,
            num_spine=token_BW.shape[1] - 1,
        )
