"""The worker that serves DDTREE, and DFLASH where SGLang's own worker cannot run: one round, chain and tree alike.

It keeps from SGLang's DFLASH worker what is the same for both (drafter loading, pools, the target prefill, projecting taps
into the drafter's KV) and replaces the decode round with draft -> tree -> verify -> accept -> commit, each in its own module.
The verify width is separate from the draft block: ``speculative_num_draft_tokens`` is the width, and
``speculative_dflash_block_size`` the block. With one branch the tree is the chain: nothing is masked and nothing moves.

Requests that this round cannot serve exactly are refused before they get here (``compatibility.refused_request``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_exec, get_observability, get_parallel, get_serving, get_spec
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.draft_worker_common import make_draft_block_spec_info
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import build_grammar_vocab_mask, draft_tp_context

from sglang_dflash.kernels.round_plan import CommitPlan, open_round, plan_commit
from sglang_dflash.kernels.tree_accept import Acceptance, accept_tree
from sglang_dflash.kernels.tree_build import build_tree
from sglang_dflash.options import read_options
from sglang_dflash.speculative.accept import choose_tokens
from sglang_dflash.speculative.budget import Budget, widths_to_verify
from sglang_dflash.speculative.captured import DraftTail, Outcome, VerifyTail
from sglang_dflash.speculative.compatibility import IncompatibleError, check_block
from sglang_dflash.speculative.costs import measure_costs
from sglang_dflash.speculative.draft import Window, block_forward_batch, draft_candidates
from sglang_dflash.speculative.metrics import RoundMetrics
from sglang_dflash.speculative.penalties import PathPenalties, is_penalised
from sglang_dflash.speculative.start_log import log_start
from sglang_dflash.speculative.tree import DraftTree
from sglang_dflash.speculative.verify import TreeVerifyInput, grammar_links, tree_verify_input
from sglang_dflash.speculative.widths import Promise, VerifyState, build_states, installed


class TreeWorker(DFlashWorkerV2):
    """Speculative worker for chain (DFLASH) and tree (DDTREE) drafts of a plain DFlash drafter."""

    _fused_kv_helper: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._is_domino or self.selector is not None or self.lilicorr is not None:
            raise IncompatibleError(
                "The drafter has a Domino, DFlash2 or LiLiCorr head; this worker serves plain DFlash drafters. Serve it with "
                "SGLang's own --speculative-algorithm DFLASH on CUDA."
            )
        spec = get_spec()
        self.is_tree = spec.speculative_algorithm == "DDTREE"
        self.width = int(spec.speculative_num_draft_tokens)
        self._adopt_block(spec.speculative_dflash_block_size if self.is_tree else self.width)
        self.num_nodes = self.width - 1
        self.chain_width = min(self.block_size, self.width)
        self.tree_topk = (read_options().tree_topk or self.num_nodes) if self.is_tree else 1
        self.max_depth = min(self.num_nodes, self.block_size - 1)
        self._penalties = PathPenalties(int(self.model_runner.model_config.vocab_size), self.device)
        self.tree_storage: DraftTree | None = None
        self._draft_tail: DraftTail | None = None
        self._verify_tail: VerifyTail | None = None
        self._captured_kv_helper: Any = None
        self._budget: Budget | None = None
        self._promise: Promise | None = None
        self._metrics: RoundMetrics | None = None
        self.states: dict[int, VerifyState] = {}
        self._avoid_fused_qk_norm_rope()
        self._plan_tails()

    def _adopt_block(self, block: int | None) -> None:
        """Undo the superclass's assumption that the draft block is as wide as the verify."""
        self.block_size = check_block(int(block) if block is not None else None)
        self.draft_model.set_block_size(self.block_size)
        self._draft_block_spec_info = make_draft_block_spec_info(draft_token_num=self.block_size, device=self.device)

    def _plan_tails(self) -> None:
        """Fold the tree into the drafter's CUDA graphs, acceptance and commit into the target's; both are captured later."""
        decode = get_exec().graph.cuda_graph_config.decode
        if not self.is_tree or torch.device(self.device).type != "cuda" or decode.backend == Backend.DISABLED:
            return
        self.tree_storage = DraftTree.empty(max(decode.bs), self.width, self.device, num_spine=self.chain_width - 1)
        self._draft_tail = DraftTail(self._propose, block_size=self.block_size, storage=self.tree_storage)
        self._verify_tail = VerifyTail(
            trees=self._draft_tail.trees,
            choose=self._argmax,
            settle=self._settle,
            commit=self._commit_in_graph,
            device=self.device,
        )
        self.model_runner.capture_tail_hooks.append(self._verify_tail)

    def init_cuda_graphs(self) -> None:
        """Capture the drafter, and the target at the other widths that may be chosen; then measure what rounds cost."""
        super().init_cuda_graphs()
        adapts = self.is_tree and read_options().budget == "adaptive"
        widths = widths_to_verify(self.block_size, self.width) if adapts else (self.width,)
        self.states = build_states(self.model_runner, widths, chain_width=self.chain_width)
        costs = None
        if len(widths) > 1:
            costs = get_parallel().tp_group.broadcast_object(measure_costs(self, widths), src=0)
            self._budget = Budget(costs, share=self._share)
            self._promise = Promise(widths, self.device)
        if get_parallel().tp_rank == 0:
            log_start(self, costs)
            if get_observability().enable_metrics:
                self._metrics = RoundMetrics({"model_name": str(get_serving().served_model_name)}, self.max_depth)

    def _share(self, number: float) -> float:
        return float(get_parallel().tp_group.broadcast_object(number, src=0))

    def prewarm_sampling(self) -> Any:
        # SGLang's DFLASH rehearses its own acceptance kernels here, which this worker does not use.
        return self.model_runner.prewarm_sampling()

    def _maybe_build_draft_sampler(self) -> DraftTail | None:
        # SGLang asks before it captures the drafter's graphs, and captures what it is given behind them.
        return self._draft_tail

    def _avoid_fused_qk_norm_rope(self) -> None:
        """The drafter's fused QK-norm-RoPE is a CUDA kernel; elsewhere its torch form serves."""
        if torch.device(self.device).type == "cpu":
            for layer in self.draft_model.layers:
                layer.self_attn.use_table_qk_norm_rope = False

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """One scheduler step: SGLang's prefill for an extend batch, one speculative round for a decode batch."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            self._penalties.start(batch.reqs)
            return super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
        window = self._window(batch)
        tree = self.draft_trees(window)
        tree = tree.narrowed(self._choose_width(tree, window))
        # On its way to the host while the target runs.
        grammar_tree = grammar_links(tree) if batch.has_grammar else None
        is_plain = self._takes_argmax(batch)
        if self._verify_tail is not None:
            self._verify_tail.arm(is_plain)
        logits_output, in_graph = self._verify(batch, tree, window)
        if self._verify_tail is not None and is_plain and in_graph:
            captured_batch = self.states[tree.width].graph_runner.bs
            outcome = self._verify_tail.outcome(tree.width, tree.batch, captured_batch)
            if on_publish is not None:
                on_publish(outcome.new_context_len_B)
        else:
            logits_output.next_token_logits = self._gathered(logits_output.next_token_logits)
            self._adjust(logits_output.next_token_logits, tree, batch, grammar_tree, grammar_barrier)
            outcome = self._accept(batch, tree, window, logits_output, on_publish)
        logits_output.hidden_states = None
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=outcome.token_BD.reshape(-1),
            accept_lens=outcome.length_B,
            cap_lens=torch.full((tree.batch,), tree.width - 1),  # verified drafts, by request
            can_run_cuda_graph=in_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=outcome.bonus_B, new_seq_lens=outcome.new_context_len_B
            ),
            speculative_num_draft_tokens=tree.width,
            speculative_output_stride=self.max_depth + 1,
            new_seq_lens=outcome.new_context_len_B,
        )

    def _choose_width(self, tree: DraftTree, window: Window) -> int:
        width = self.width if self._budget is None else self._ask_budget(tree, window)
        if self._metrics is not None:
            self._metrics.began(width)
        return width

    def _ask_budget(self, tree: DraftTree, window: Window) -> int:
        assert self._budget is not None and self._promise is not None
        if (promised := self._promise.next(tree)) is not None:
            self._budget.promise(promised)
        context = int(window.context_len_cpu_B.sum())
        return self._budget.choose(len(window.context_len_B), context, 1000 * time.monotonic())

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """SGLang has brought a round's acceptance to the host."""
        if self._budget is not None:
            self._budget.accepted(num_correct_drafts_per_req)
        if self._metrics is not None:
            self._metrics.verified(num_correct_drafts_per_req)

    def _takes_argmax(self, batch: ScheduleBatch) -> bool:
        """Whether the bare argmax is every request's choice, and nothing else is asked of the logits."""
        sampling = batch.sampling_info
        is_greedy = sampling is None or (sampling.is_all_greedy and sampling.logit_bias is None)
        return (
            is_greedy
            and not batch.has_grammar
            and not batch.return_logprob
            and not any(is_penalised(req.sampling_params) for req in batch.reqs)
        )

    def _accept(
        self,
        batch: ScheduleBatch,
        tree: DraftTree,
        window: Window,
        logits_output: Any,
        on_publish: Callable[[torch.Tensor], None] | None,
    ) -> Outcome:
        """Choose from adjusted logits, accept and commit, outside the graphs."""
        target_token_BW = choose_tokens(logits_output.next_token_logits, batch.sampling_info, tree.width)
        acceptance, plan = self._settle(tree, target_token_BW, window.context_len_B, window.rows.slot_BS)
        self._penalties.commit(tree, acceptance, batch.reqs)
        if batch.return_logprob:
            compute_spec_logprobs(batch, logits_output, target_token_BW.reshape(-1), accept_index=plan.hidden_BD)
        if on_publish is not None:
            on_publish(plan.new_context_len_B)
        self._commit(logits_output.hidden_states, tree, plan)
        return Outcome.of(acceptance, plan)

    def _settle(
        self, tree: DraftTree, target_token_BW: torch.Tensor, context_len_B: torch.Tensor, slot_BS: torch.Tensor
    ) -> tuple[Acceptance, CommitPlan]:
        """The accepted paths, and what committing them reads and writes; rank 0's choices are everyone's."""
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_GREEDY, target_token_BW)
        acceptance = accept_tree(tree, target_token_BW, max_depth=self.max_depth)
        return acceptance, plan_commit(acceptance, context_len_B, slot_BS, width=tree.width)

    def _gathered(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """Logits over the whole vocabulary, where the verify left every rank its shard."""
        processor = self._target_logits_processor
        if processor is not None and processor.is_deferred_shard(logits_TV):
            return processor.finish_deferred_gather(logits_TV)
        return logits_TV

    def _argmax(self, logits_TV: torch.Tensor) -> torch.Tensor:
        processor = self._target_logits_processor
        if processor is not None and processor.is_deferred_shard(logits_TV):
            return processor.deferred_argmax(logits_TV)
        return logits_TV.argmax(dim=-1)

    def _adjust(
        self, logits_TV: torch.Tensor, tree: DraftTree, batch: ScheduleBatch, grammar_tree: Any, grammar_barrier: Any
    ) -> None:
        """Penalties, then the grammar, on every row, in SGLang's order; ``choose_tokens`` adds the logit bias."""
        self._penalties.apply(logits_TV, tree, batch.reqs)
        if grammar_tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar_tree,
                sampling_info=batch.sampling_info,
                device=logits_TV.device,
                barrier=grammar_barrier,
            )
            if mask is not None:
                mask.apply(logits_TV)

    def _window(self, batch: ScheduleBatch) -> Window:
        context_len_cpu_B = batch.seq_lens_cpu
        if context_len_cpu_B is None:
            context_len_cpu_B = batch.spec_info.nxt_kv_lens_cpu
        return self.open_window(
            batch.spec_info.bonus_tokens.view(-1), batch.req_pool_indices, batch.seq_lens, context_len_cpu_B
        )

    def open_window(
        self,
        bonus_B: torch.Tensor,
        pool_index_B: torch.Tensor,
        context_len_B: torch.Tensor,
        context_len_cpu_B: torch.Tensor,
    ) -> Window:
        rows = open_round(
            bonus_B,
            context_len_B,
            pool_index_B,
            self.model_runner.req_to_token_pool.req_to_token,
            block_size=self.block_size,
            num_slots=max(self.block_size, self.width),
            mask_token_id=self._mask_token_id,
        )
        return Window(rows, pool_index_B, context_len_B, context_len_cpu_B)

    def plan_slots(self, window: Window, slot_BT: torch.Tensor) -> Any:
        """SGLang's plan of the KV slots that a forward writes and of the context that it reads."""
        return self.model_runner.kv_index_translator.plan(
            req_pool_indices=window.pool_index_B,
            seq_lens=window.context_len_B,
            seq_lens_cpu=window.context_len_cpu_B,
            write_virtual=slot_BT.reshape(-1),
            read_extent=slot_BT.shape[1],
        )

    def draft_trees(self, window: Window) -> DraftTree:
        """The drafter's trees at full width."""
        rows = window.rows
        output = self._draft_forward(window)
        if self._draft_tail is not None and output.can_run_graph:
            return self._draft_tail.trees(len(rows.token_BT), self.width)
        hidden_BTH = output.logits_output.hidden_states.view(*rows.token_BT.shape, -1)
        with draft_tp_context(self.draft_parallel_layout):
            tree = self._propose(hidden_BTH, rows.token_BT[:, 0])
        if self._draft_tail is not None:
            self._draft_tail.store(tree)
        return tree

    def _propose(self, hidden_BTH: torch.Tensor, bonus_B: torch.Tensor) -> DraftTree:
        """Trees from the drafter's final hidden states over the block. Runs inside the drafter's graph where there is one."""
        id_TK, logp_TK = draft_candidates(
            hidden_BTH[:, 1:].reshape(-1, hidden_BTH.shape[-1]),
            unwrap_lora_layer(self.target_worker.model_runner.model.lm_head),
            top_k=self.tree_topk,
        )
        shape = (hidden_BTH.shape[0], self.block_size - 1, id_TK.shape[-1])
        if not self.is_tree:
            return DraftTree.chain(id_TK.view(shape)[:, : self.num_nodes, 0], bonus_B)
        return build_tree(id_TK.view(shape), logp_TK.view(shape), bonus_B, num_nodes=self.num_nodes)

    def _draft_forward(self, window: Window) -> Any:
        """The drafter over the block of every request: SGLang's ``ModelRunnerOutput``."""
        embedding_BTH = self.target_worker.model_runner.model.get_input_embeddings()(window.rows.token_BT)
        embedding_TH = embedding_BTH.reshape(-1, embedding_BTH.shape[-1])
        if self._noise_embed_scale != 1:
            embedding_TH = embedding_TH * self._noise_embed_scale
        slot_BT = window.rows.slot_BS[:, : self.block_size].contiguous()
        forward_batch = block_forward_batch(
            window,
            slot_BT,
            embedding_TH=embedding_TH.to(self.draft_model_runner.dtype),
            spec_info=self._draft_block_spec_info,
        )
        self.plan_slots(window, slot_BT).bind(forward_batch, self.draft_model_runner.kv_index_translator)
        with torch.inference_mode(), draft_tp_context(self.draft_parallel_layout):
            return self.draft_model_runner.forward(forward_batch)

    def verify_input(self, tree: DraftTree, window: Window) -> TreeVerifyInput:
        """What the target verifies, with its mask and its slots."""
        mask = self.states[tree.width].window_mask
        custom_mask = None
        if mask is not None and tree.mask_BWW is not None:
            custom_mask = mask.write(tree.mask_BWW, window.context_len_B, window.context_len_cpu_B)
        verify_input = tree_verify_input(tree, window.context_len_B, custom_mask)
        verify_input.kv_loc_plan = self.plan_slots(window, window.rows.slot_BS[:, : tree.width])
        return verify_input

    def _verify(self, batch: ScheduleBatch, tree: DraftTree, window: Window) -> tuple[Any, bool]:
        """The target's logits and taps for every row of the trees."""
        verify_input = self.verify_input(tree, window)
        batch.out_cache_loc = window.rows.slot_BS[:, : tree.width].reshape(-1)
        kept = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu = window.context_len_cpu_B + tree.width
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        with installed(self.model_runner, self.states[tree.width]):
            # The graph runner plans once more if it is planned for here.
            forward_batch, _ = verify_input.prepare_for_verify(batch, self.target_worker, defer_metadata_init=True)
            batch.seq_lens_cpu, batch.seq_lens_sum = kept
            output = self.target_worker.forward_batch_generation(
                batch=None, forward_batch=forward_batch, is_verify=True
            )
        return output.logits_output, output.can_run_cuda_graph

    def _commit(self, hidden_TF: torch.Tensor, tree: DraftTree, plan: CommitPlan) -> None:
        """The accepted path becomes context, in the target's KV pool and in the drafter's.

        Its rows lie anywhere in the window of a tree. Taps are gathered row by row: a contiguous slice would hand the drafter
        the taps of rejected nodes.
        """
        if not tree.is_chain:
            self.model_runner.token_to_kv_pool.move_kv_cache(plan.slot_BD.view(-1), plan.source_BD.view(-1))
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden_TF.index_select(0, plan.hidden_BD.view(-1)),
            cache_loc=plan.slot_BD.view(-1),
            cache_loc_2d=plan.slot_BD,
            positions=plan.position_BD.view(-1),
            commit_lens=plan.length_B,
        )

    def _commit_in_graph(self, hidden_TF: torch.Tensor, tree: DraftTree, plan: CommitPlan) -> None:
        """``_commit`` with workspaces that no prefill replaces: a graph keeps the addresses that it was captured with."""
        shared = self._fused_kv_helper
        self._fused_kv_helper = self._captured_kv_helper = self._captured_kv_helper or copy(shared)
        try:
            self._commit(hidden_TF, tree, plan)
        finally:
            self._fused_kv_helper = shared

    def _append_target_hidden_to_draft_kv_by_loc(self, *, target_hidden: torch.Tensor, **kwargs: Any) -> None:
        # The drafter may be loaded in another dtype than the target computes in.
        super()._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=target_hidden.to(self.draft_model.fc.weight.dtype), **kwargs
        )
