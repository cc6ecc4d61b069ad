"""After acceptance: the accepted path becomes context, in the target's KV pool and in the drafter's.

The accepted rows of a tree lie anywhere in the verify window. Their KV moves to the front of the window (destination never
behind source, so one gather-then-scatter is safe), and their hidden rows are gathered *by accepted index*, since a contiguous
slice would hand the drafter the taps of rejected nodes. The spine comes first in the window, so a greedy path moves nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dflash.kernels.tree_accept import Acceptance, compaction


def compact_target_kv(pool: Any, acceptance: Acceptance, slot_BW: torch.Tensor) -> None:
    """Move the accepted rows' KV to the first slots of each request's window in the target's ``pool``."""
    source_BD, target_BD = compaction(acceptance, slot_BW)
    pool.move_kv_cache(target_BD.reshape(-1), source_BD.reshape(-1))


def gather_accepted(hidden_TF: torch.Tensor, acceptance: Acceptance, width: int) -> torch.Tensor:
    """Taps of the accepted rows, in path order: ``[requests * (depth + 1), features]``; rows past the path repeat its last."""
    return hidden_TF.index_select(0, accepted_index(acceptance, width).reshape(-1))


def accepted_index(acceptance: Acceptance, width: int) -> torch.Tensor:
    """Flat row index ``[requests, depth + 1]`` of the accepted rows in a ``[requests * width]`` batch of rows."""
    first_B1 = torch.arange(acceptance.row_BD.shape[0], device=acceptance.row_BD.device)[:, None] * width
    return first_B1 + acceptance.row_BD
