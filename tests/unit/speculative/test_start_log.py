from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_dflash.speculative.budget import StepCosts
from sglang_dflash.speculative.start_log import describe_costs, list_buffers
from sglang_dflash.speculative.tree import DraftTree
from sglang_dflash.speculative.widths import VerifyState


def test_costs_are_one_line() -> None:
    costs = StepCosts((1, 8), {17: (1.5, 2.0), 8: (1.0, 1.25)}, {8: (0.0, 0.0), 17: (0.0, 0.0)})
    assert describe_costs(costs) == "width 8 1.00 1.25; width 17 1.50 2.00, with 1, 8 requests"


def test_buffers_are_listed_with_their_real_size() -> None:
    batch, width, context = 4, 17, 100
    backend = SimpleNamespace(
        verify_mask=SimpleNamespace(buffer=torch.zeros(batch * width * (context + width), dtype=torch.uint8)),
        cuda_graph_kv_indices=torch.zeros(batch * width * context, dtype=torch.int64),
        cuda_graph_attn_logits=None,
    )
    static = SimpleNamespace(next_token_logits_buffer=torch.zeros(batch * width, 11), aux_hidden_states=None)
    states = {width: VerifyState(backend, SimpleNamespace(buffers=static), None)}
    sizes = {buffer.name: buffer.num_bytes for buffer in list_buffers(DraftTree.empty(batch, width, "cpu"), states)}
    assert sizes == {
        "trees": batch * width * (29 + width),
        "window mask, width 17": batch * width * (context + width),
        "KV indices, all widths": batch * width * context * 8,
        "logits, all widths": batch * width * 11 * 4,
    }


def test_without_graphs_there_is_nothing_to_list() -> None:
    assert list_buffers(None, {17: VerifyState(object(), None, None)}) == []
