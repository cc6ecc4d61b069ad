from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_dflash.kernels.round_plan import CommitPlan, plan_commit
from sglang_dflash.kernels.tree_accept import Acceptance, accept_tree
from sglang_dflash.kernels.tree_build import build_tree
from sglang_dflash.speculative.captured import DraftTail, Outcome, VerifyTail
from sglang_dflash.speculative.tree import DraftTree

BLOCK, VOCABULARY, NODES = 4, 11, 6
WIDTH, DEPTH = NODES + 1, BLOCK - 1


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
        made = tail.trees(batch, NODES + 1)
        assert made.batch == batch and not made.is_chain
        for one, other in zip(made.tensors(), expected.tensors(), strict=True):
            assert torch.equal(one, other)
        assert [tensor.data_ptr() for tensor in made.tensors()] == addresses


def drafted(seed: int, batch: int) -> DraftTree:
    hidden_TH, input_ids_T = draft(seed, batch)
    return propose(hidden_TH.view(batch, BLOCK, -1), input_ids_T.view(batch, BLOCK)[:, 0])


@dataclass
class Round:
    """What SGLang gives a capture hook: static inputs of a graph, and its outputs."""

    next_token_logits: torch.Tensor
    hidden_states: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens)


def settle(
    tree: DraftTree, choice_BW: torch.Tensor, context_len_B: torch.Tensor, slot_BW: torch.Tensor
) -> tuple[Acceptance, CommitPlan]:
    acceptance = accept_tree(tree, choice_BW, max_depth=DEPTH)
    return acceptance, plan_commit(acceptance, context_len_B, slot_BW, width=WIDTH)


def verify(tree: DraftTree, seed: int) -> Round:
    """A target that likes its drafter: the token after a row is that of its first child, where it has one."""
    generator = torch.Generator().manual_seed(seed)
    logits_BWV = torch.rand(tree.batch, WIDTH, VOCABULARY, generator=generator)
    for request in range(tree.batch):
        for row in range(WIDTH - 1, 0, -1):
            logits_BWV[request, tree.parent_BW[request, row], tree.token_BW[request, row]] += 2
    return Round(
        logits_BWV.view(-1, VOCABULARY),
        torch.randn(tree.batch * WIDTH, 2, generator=generator),
        torch.randint(1, 50, (tree.batch,), generator=generator),
        torch.randperm(500, generator=generator)[: tree.batch * WIDTH],
    )


def make_tail(storage: DraftTree, committed: list[CommitPlan]) -> VerifyTail:
    return VerifyTail(
        trees=lambda batch, width: storage.first(batch).narrowed(width),
        choose=lambda logits_TV: logits_TV.argmax(-1),
        settle=settle,
        commit=lambda hidden_TF, tree, plan: committed.append(plan),
        device="cpu",
    )


def test_an_armed_verify_accepts_and_commits_what_a_round_outside_would() -> None:
    tree = drafted(5, 3)
    round_ = verify(tree, 6)
    committed: list[CommitPlan] = []
    tail = make_tail(tree, committed)
    tail(None, round_, round_, 3 * WIDTH)
    choice_BW = round_.next_token_logits.argmax(-1).view(3, WIDTH)
    acceptance, plan = settle(tree, choice_BW, round_.seq_lens, round_.out_cache_loc.view(3, WIDTH))
    assert int(acceptance.length_B.min()) > 0
    for one, other in zip(committed[0], plan, strict=True):
        assert torch.equal(one, other)
    # Two of the three requests are real, the third is padding.
    outcome = tail.outcome(WIDTH, 2, 3)
    for one, other in zip(outcome, Outcome.of(acceptance, plan), strict=True):
        assert torch.equal(one, other[:2])


def test_an_outcome_outlives_the_next_replay() -> None:
    tree = drafted(7, 2)
    round_ = verify(tree, 8)
    tail = make_tail(tree, [])
    tail(None, round_, round_, 2 * WIDTH)
    outcome = tail.outcome(WIDTH, 2, 2)
    before = [part.clone() for part in outcome]
    tail._packed[WIDTH, 2].fill_(-7)
    assert all(torch.equal(one, other) for one, other in zip(outcome, before, strict=True))


def test_a_disarmed_verify_moves_nothing_and_the_next_armed_one_accepts_again() -> None:
    tree = drafted(9, 3)
    round_ = verify(tree, 10)
    committed: list[CommitPlan] = []
    tail = make_tail(tree, committed)
    tail.arm(False)
    tail(None, round_, round_, 3 * WIDTH)
    tail.arm(True)
    tail(None, round_, round_, 3 * WIDTH)
    disarmed, armed = committed
    assert torch.equal(disarmed.source_BD, disarmed.slot_BD)
    assert disarmed.length_B.tolist() == [1, 1, 1]
    assert int(armed.length_B.min()) > 1
