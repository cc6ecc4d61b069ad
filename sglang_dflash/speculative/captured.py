"""What is captured behind the forwards in their CUDA graphs, in buffers of fixed address.

SGLang calls a tail hook while it captures a graph; the graph then repeats it with every replay, padding requests included.
Behind the drafter stand candidates, trees and masks (``DraftTail``); behind the target, acceptance along its argmax and the
commit of the accepted path (``VerifyTail``). A round whose choices are not the bare argmax disarms the second and does the same
outside. Whatever stands here is good until the next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from sglang_dflash.kernels.round_plan import CommitPlan
from sglang_dflash.kernels.tree_accept import Acceptance
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
        self.store(self._propose(hidden_BTH, bonus_B))

    def store(self, tree: DraftTree) -> None:
        """Put trees where the target's graph reads them; more than it was captured for are left out, since it cannot run."""
        if tree.batch > self._storage.batch:
            return
        for stored, made in zip(self._storage.first(tree.batch).tensors(), tree.tensors(), strict=True):
            stored.copy_(made)

    def trees(self, batch: int, width: int) -> DraftTree:
        """The first rows of the trees of the last draft."""
        return self._storage.first(batch).narrowed(width)


class Outcome(NamedTuple):
    """What a round decided, as the scheduler and the next round need it; int64, or int32 where its part was.

    Attributes:
        token_BD: emitted tokens, then zeros.
        length_B: committed rows, root included.
        bonus_B: the token that the next round starts from.
        new_context_len_B: context lengths after the commit.
    """

    token_BD: torch.Tensor
    length_B: torch.Tensor
    bonus_B: torch.Tensor
    new_context_len_B: torch.Tensor

    @classmethod
    def of(cls, acceptance: Acceptance, plan: CommitPlan) -> Outcome:
        return cls(acceptance.token_BD, plan.length_B, acceptance.bonus_B, plan.new_context_len_B)


class VerifyTail:
    """Accepts along the target's argmax and commits, behind the target's forward.

    Disarmed, it accepts nothing: no row moves, and what it writes for the root the round's own commit writes again.

    Args:
        trees: the trees of the round, by batch size and width.
        choose: logits ``[requests * width, vocabulary]`` to the target's token after every row.
        settle: trees, choices ``[requests, width]``, context lengths and slots ``[requests, width]`` to the decision.
        commit: makes the decision context, given the verified rows' taps.
    """

    def __init__(
        self,
        *,
        trees: Callable[[int, int], DraftTree],
        choose: Callable[[torch.Tensor], torch.Tensor],
        settle: Callable[[DraftTree, torch.Tensor, torch.Tensor, torch.Tensor], tuple[Acceptance, CommitPlan]],
        commit: Callable[[torch.Tensor, DraftTree, CommitPlan], None],
        device: torch.device | str,
    ) -> None:
        self._trees = trees
        self._choose = choose
        self._settle = settle
        self._commit = commit
        self._armed = True
        self._armed_on_device = torch.ones(1, dtype=torch.bool, device=device)
        self._packed: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, runner: Any, output: Any, forward_batch: Any, num_tokens: int) -> None:
        """Record the tail; the signature is that of SGLang's capture hooks."""
        batch = forward_batch.batch_size
        tree = self._trees(batch, num_tokens // batch)
        tree = replace(tree, valid_BW=tree.valid_BW & self._armed_on_device)
        choice_BW = self._choose(output.next_token_logits).view(batch, tree.width)
        slot_BW = forward_batch.out_cache_loc.view(batch, tree.width)
        acceptance, plan = self._settle(tree, choice_BW, forward_batch.seq_lens, slot_BW)
        self._commit(output.hidden_states, tree, plan)
        outcome = Outcome.of(acceptance, plan)
        self._packed[tree.width, batch] = torch.cat([part.reshape(-1).to(torch.int64) for part in outcome])

    def arm(self, armed: bool) -> None:
        """Whether the next replay accepts."""
        if armed != self._armed:
            self._armed_on_device.fill_(armed)
            self._armed = armed

    def outcome(self, width: int, batch: int, captured_batch: int) -> Outcome:
        """The first ``batch`` outcomes of the last replay, which ran ``captured_batch``, in memory that no replay writes."""
        packed = self._packed[width, captured_batch].clone()
        token, rest = packed[: -3 * captured_batch], packed[-3 * captured_batch :].view(3, captured_batch)
        return Outcome(token.view(captured_batch, -1)[:batch], *rest[:, :batch])
