from __future__ import annotations

import torch

from sglang_dflash.kernels.tree_build import build_tree
from sglang_dflash.speculative.captured import DraftTail
from sglang_dflash.speculative.tree import DraftTree

BLOCK, VOCABULARY, NODES = 4, 11, 6


def propose(hidden_BTH: torch.Tensor, bonus_B: torch.Tensor) -> DraftTree:
    """Hidden states are logits here."""
    logp_BLK, id_BLK = hidden_BTH[:, 1:].log_softmax(-1).topk(NODES)
    return build_tree(id_BLK, logp_BLK, bonus_B, num_nodes=NODES)


def draft(seed: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_TH = torch.randn(batch * BLOCK, VOCABULARY, generator=generator)
    return hidden_TH, torch.randint(VOCABULARY, (batch * BLOCK,), generator=generator)


def test_the_trees_of_a_draft_stand_in_the_same_storage_every_time() -> None:
    storage = DraftTree.empty(5, NODES + 1, "cpu")
    tail = DraftTail(propose, block_size=BLOCK, storage=storage)
    addresses = [tensor.data_ptr() for tensor in storage.tensors()]
    for seed, batch in ((1, 5), (2, 3), (3, 1)):
        hidden_TH, input_ids_T = draft(seed, batch)
        tail(hidden_TH, input_ids_T)
        expected = propose(hidden_TH.view(batch, BLOCK, -1), input_ids_T.view(batch, BLOCK)[:, 0])
        made = tail.trees(batch)
        assert made.batch == batch and not made.is_chain
        for one, other in zip(made.tensors(), expected.tensors(), strict=True):
            assert torch.equal(one, other)
        assert [tensor.data_ptr() for tensor in made.tensors()] == addresses
