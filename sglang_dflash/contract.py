"""Every SGLang name that the plugin overrides, calls or reads, and what it expects of it; checked when the plugin loads.

This is the only place that may list a hook. SGLang moves names between releases and swallows a plugin's exceptions, so a
mismatch must be found by us: ``check()`` resolves each name and compares parameters, ``plugin.py`` registers hooks only when it
holds, and the algorithms' own validation fails with the report when it does not. ``sglang-dflash check`` prints it.
"""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

SUPPORTED_SGLANG = ("0.5.23",)

HookKind = Literal["before", "after", "around", "replace"]


class ContractError(RuntimeError):
    """The installed SGLang is not one that this plugin knows. The message is the report."""


@dataclass(frozen=True)
class Symbol:
    """An upstream name that we call, read or subclass.

    Attributes:
        path: dotted path, resolved with ``pkgutil.resolve_name``.
        parameters: names that must be among the callable's parameters; empty for anything that only has to exist.
        used_by: our module that relies on it.
    """

    path: str
    used_by: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hook:
    """A change to an upstream function.

    Attributes:
        when: ``always``, ``cpu`` (only on our CPU platform) or ``dump`` (only when a dump directory is set).
        patch: the file in ``patches/`` that would make this hook unnecessary upstream.
    """

    symbol: Symbol
    kind: HookKind
    implementation: str
    when: Literal["always", "cpu", "dump"]
    what: str
    why: str
    patch: str


_WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
_SPEC_HOOK = "sglang.srt.arg_groups.speculative_hook"

HOOKS: tuple[Hook, ...] = (
    Hook(
        Symbol(f"{_SPEC_HOOK}._handle_dflash", "hooks", ("server_args",)),
        "after",
        "sglang_dflash.hooks:after_handle_dflash",
        "always",
        "checks that the drafter fits the target",
        "a tap, mask token or hidden size that does not fit fails late, or serves with collapsed acceptance",
        "0001-dflash-check-the-drafter-against-the-target.patch",
    ),
    Hook(
        Symbol("sglang.srt.speculative.dflash_utils.validate_dflash_request", "hooks", ("req", "enable_overlap")),
        "after",
        "sglang_dflash.hooks:after_validate_request",
        "always",
        "refuses requests that our worker cannot serve exactly",
        "without it penalties and grammars would be approximated along a drafted path",
        "0002-dflash-let-a-worker-validate-requests.patch",
    ),
    Hook(
        Symbol(
            "sglang.srt.speculative.dflash_info_v2.page_aligned_decode_alloc_lens",
            "hooks",
            ("reqs", "reserve", "page_size"),
        ),
        "before",
        "sglang_dflash.hooks:before_decode_reservation",
        "always",
        "reserves KV for the wider of draft block and verify",
        "SGLang takes the verify width for both, so a narrow verify would let the draft block write unreserved slots",
        "0003-dflash-separate-block-from-verify-width.patch",
    ),
    Hook(
        Symbol("sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len", "hooks"),
        "after",
        "sglang_dflash.hooks:after_extra_context_len",
        "always",
        "lengthens rows of the request table to hold the reservation",
        "at page size 1 SGLang adds width + 4 columns but reserves twice the width, so a request near the context limit "
        "writes past its row",
        "0004-size-request-rows-for-the-speculative-reservation.patch",
    ),
    Hook(
        Symbol("sglang.srt.speculative.dflash_utils.resolve_dflash_verify_mask_policy", "hooks", ("attn_backend",)),
        "after",
        "sglang_dflash.hooks:after_verify_mask_policy",
        "always",
        "captures the target's verify graphs with a custom mask when DDTREE serves",
        "DFLASH's chain needs none, so SGLang captures without one for every backend that is causal by itself",
        "0007-dflash-verify-mask-from-the-algorithm.patch",
    ),
    Hook(
        Symbol(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
            "hooks",
            ("meta_info", "recv_obj", "i"),
        ),
        "after",
        "sglang_dflash.hooks:after_spec_metrics",
        "always",
        "counts the drafts of a request that were verified",
        "SGLang takes every round as the widest, so a budget that narrows rounds makes its acceptance rates too low",
        "0008-count-verified-drafts-by-round.patch",
    ),
    Hook(
        Symbol(
            "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
            "platform.torch_cpu",
            ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"),
        ),
        "replace",
        "sglang_dflash.platform.torch_cpu:assign_req_to_token",
        "cpu",
        "writes slots into the request table with torch",
        "it launches a Triton kernel on every platform but SGLang's own CPU one, and has no platform seam",
        "0005-platform-seam-for-request-table-writes.patch",
    ),
    Hook(
        Symbol("sglang.srt.arg_groups.validation_hook.handle_aux_hidden_state_capture", "hooks", ("server_args",)),
        "after",
        "sglang_dflash.hooks:after_handle_capture",
        "dump",
        "refuses flags under which a dump would lose rows",
        "a dump that is asked for and not made must stop the start",
        "0006-hidden-state-sink.patch",
    ),
    Hook(
        Symbol("sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends", "dump.hook"),
        "after",
        "sglang_dflash.dump.hook:after_init_attention_backends",
        "dump",
        "opens the dump directory",
        "a directory that cannot be continued must stop the start, not the first request",
        "0006-hidden-state-sink.patch",
    ),
    Hook(
        Symbol("sglang.srt.model_executor.model_runner.ModelRunner.forward", "dump.hook", ("self", "forward_batch")),
        "after",
        "sglang_dflash.dump.hook:after_model_runner_forward",
        "dump",
        "hands the target's taps to the dump",
        "SGLang returns them only through the response, as lists, without the middle chunks of a chunked prefill",
        "0006-hidden-state-sink.patch",
    ),
)

SYMBOLS: tuple[Symbol, ...] = (
    Symbol("sglang.srt.speculative.spec_info.SpeculativeAlgorithm.register", "plugin", ("name", "spec_class")),
    Symbol("sglang.srt.speculative.spec_registry.CustomSpecAlgo", "speculative.algorithm"),
    Symbol("sglang.srt.arg_groups.overrides.declare_resolution", "speculative.algorithm", ("server_args", "source")),
    Symbol("sglang.srt.arg_groups.overrides.resolving_view", "speculative.algorithm", ("server_args",)),
    Symbol("sglang.srt.arg_groups.overrides._ForeignDefaults._cfg", "speculative.algorithm"),
    Symbol("sglang.srt.arg_groups.model_override_base.record_of", "speculative.algorithm", ("view",)),
    Symbol("sglang.srt.arg_groups.model_override_base.model_config_of", "speculative.algorithm"),
    Symbol("sglang.srt.arg_groups.model_override_base.attention_backends_of", "speculative.algorithm", ("cfg",)),
    Symbol(
        "sglang.srt.speculative.spec_registry.CustomSpecAlgo.get_num_tokens_per_req_for_target_verify",
        "speculative.algorithm",
        ("num_draft_tokens", "is_draft_worker"),
    ),
    Symbol(f"{_WORKER}._maybe_build_draft_sampler", "speculative.worker"),
    Symbol(f"{_WORKER}.prewarm_sampling", "speculative.worker"),
    Symbol("sglang.srt.model_executor.cuda_graph_config.Backend.DISABLED", "speculative.worker"),
    Symbol("sglang.srt.configs.hybrid_arch.mambaish_config", "speculative.algorithm", ("model_config",)),
    Symbol("sglang.srt.configs.model_config.AttentionArch.MLA", "speculative.algorithm"),
    Symbol(
        "sglang.srt.speculative.dflash_info.DFlashVerifyInput.generate_attn_arg_prefill",
        "speculative.verify",
        ("req_pool_indices", "paged_kernel_lens", "paged_kernel_lens_sum"),
    ),
    Symbol("sglang.srt.model_executor.model_runner.ModelRunner._get_attention_backend", "speculative.widths"),
    Symbol(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner",
        "speculative.widths",
        ("model_runner", "attn_backend", "speculative_num_draft_tokens"),
    ),
    Symbol("sglang.srt.runtime_context.get_observability", "speculative.worker"),
    Symbol("sglang.srt.runtime_context.get_serving", "speculative.worker"),
    Symbol("sglang.srt.model_executor.model_runner.ModelRunner", "speculative.worker"),
    Symbol("sglang.srt.layers.logits_processor.LogitsProcessor.deferred_argmax", "speculative.worker", ("logits",)),
    Symbol("sglang.srt.layers.attention.triton_backend.TritonAttnBackend.verify_mask", "speculative.verify"),
    Symbol("sglang.srt.layers.attention.verify_mask.VerifyMask.fits", "speculative.verify", ("bs",)),
    Symbol(
        "sglang.srt.speculative.dflash_utils.parse_dflash_draft_config", "speculative.algorithm", ("draft_hf_config",)
    ),
    Symbol("sglang.srt.speculative.dflash_info.DFlashVerifyInput", "speculative.verify", ("draft_token", "positions")),
    Symbol(
        "sglang.srt.speculative.dflash_info.DFlashVerifyInput.prepare_for_verify",
        "speculative.worker",
        ("batch", "target_worker"),
    ),
    Symbol(
        f"{_WORKER}.forward_batch_generation",
        "speculative.worker",
        ("batch", "on_publish", "grammar_barrier", "pp_proxy_tensors"),
    ),
    Symbol(f"{_WORKER}._make_next_draft_input_decode", "speculative.worker", ("bonus_tokens", "new_seq_lens")),
    Symbol(
        f"{_WORKER}._append_target_hidden_to_draft_kv_by_loc",
        "speculative.worker",
        ("target_hidden", "cache_loc", "positions", "cache_loc_2d", "commit_lens"),
    ),
    Symbol(f"{_WORKER}._defer_target_verify_gather", "speculative.worker"),
    Symbol("sglang.srt.speculative.draft_worker_common.make_draft_block_spec_info", "speculative.worker"),
    Symbol(
        "sglang.srt.managers.utils.GenerationBatchResult",
        "speculative.worker",
        ("accept_lens", "cap_lens", "speculative_output_stride", "speculative_num_draft_tokens", "new_seq_lens"),
    ),
    Symbol(
        "sglang.srt.layers.logprob_processor.compute_spec_logprobs",
        "speculative.worker",
        ("batch", "logits_output", "accept_index"),
    ),
    Symbol(
        "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        "speculative.accept",
        ("probs", "top_ks", "top_ps", "min_ps", "need_min_p_sampling", "sampling_seed", "positions", "max_top_k"),
    ),
    Symbol(
        "sglang.srt.layers.sampler.sampling_from_probs_torch",
        "speculative.accept",
        ("probs", "sampling_seed", "positions"),
    ),
    Symbol("sglang.srt.layers.logits_processor.should_apply_lm_head_quant_method", "speculative.draft"),
    Symbol(
        "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.plan",
        "speculative.worker",
        ("req_pool_indices", "seq_lens", "seq_lens_cpu", "write_virtual", "read_extent"),
    ),
    Symbol(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        "speculative.draft",
        ("forward_mode", "input_embeds", "out_cache_loc", "spec_info"),
    ),
    Symbol(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.move_kv_cache", "speculative.commit", ("tgt_loc", "src_loc")
    ),
    Symbol("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup", "platform.torch_cpu"),
    Symbol("sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata", "attention"),
    Symbol("sglang.srt.layers.attention.attention_registry.register_attention_backend", "plugin", ("name",)),
    Symbol("sglang.srt.arg_groups.choices.add_draft_attention_backend_choices", "plugin"),
    Symbol("sglang.srt.platforms.cpu.CpuDeviceMixin", "platform.torch_cpu"),
    Symbol(
        "sglang.srt.platforms.interface.SRTPlatform.get_speculative_worker_cls", "platform.torch_cpu", ("algorithm",)
    ),
    Symbol("sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod", "platform.packed_model"),
    Symbol("sglang.srt.layers.quantization.unquant.UnquantizedEmbeddingMethod", "platform.packed_model"),
    Symbol("sglang.srt.layers.radix_attention.AttentionType.ENCODER_ONLY", "attention"),
    Symbol("sglang.srt.layers.radix_attention.RadixAttention", "attention"),
    Symbol("sglang.srt.mem_cache.memory_pool.KVWriteLoc", "attention"),
    Symbol("sglang.srt.mem_cache.allocation_sizing.get_alloc_page_size", "hooks"),
    Symbol("sglang.srt.runtime_context.get_parallel", "speculative.draft"),
    Symbol("sglang.srt.runtime_context.get_exec", "dump.hook"),
    Symbol("sglang.srt.runtime_context.get_spec", "speculative.worker"),
    Symbol("sglang.srt.platforms.current_platform", "speculative.algorithm"),
    Symbol("sglang.srt.platforms.device_mixin.PlatformEnum.OOT", "platform.torch_cpu"),
    Symbol("sglang.srt.arg_groups.choices.add_attention_backend_choices", "plugin"),
    Symbol("sglang.srt.plugins.hook_registry.HookRegistry", "plugin"),
    Symbol("sglang.srt.plugins.hook_registry.HookType", "plugin"),
    Symbol(
        "sglang.srt.utils.hf_transformers_utils.get_config",
        "speculative.algorithm",
        ("model", "trust_remote_code", "revision", "model_override_args"),
    ),
    Symbol("sglang.srt.managers.overlap_utils.FutureMap", "speculative.algorithm"),
    Symbol("sglang.srt.managers.schedule_batch.ScheduleBatch", "speculative.worker"),
    Symbol("sglang.srt.model_executor.forward_batch_info.CaptureHiddenMode.NULL", "speculative.draft"),
    Symbol("sglang.srt.model_executor.forward_batch_info.ForwardMode.TARGET_VERIFY", "speculative.draft"),
    Symbol("sglang.srt.lora.layers.unwrap_lora_layer", "speculative.worker"),
    Symbol("sglang.srt.speculative.spec_tp_sync.SpecTpSyncSite.DFLASH_ACCEPT_GREEDY", "speculative.worker"),
    Symbol("sglang.srt.speculative.spec_utils.draft_tp_context", "speculative.worker"),
    Symbol(
        "sglang.srt.speculative.spec_utils.build_grammar_vocab_mask",
        "speculative.worker",
        ("reqs", "tree", "sampling_info", "device", "barrier"),
    ),
    Symbol(
        "sglang.srt.speculative.spec_utils.GrammarTree.from_device",
        "speculative.verify",
        ("retrieve_next_token", "retrieve_next_sibling", "draft_token"),
    ),
)


@dataclass(frozen=True)
class Finding:
    """One checked name; ``problem`` is empty where it holds."""

    symbol: Symbol
    problem: str


@dataclass(frozen=True)
class Report:
    """The outcome of ``check()``; ``str()`` is the text for people."""

    sglang_version: str
    version_problem: str
    findings: tuple[Finding, ...] = field(repr=False)

    @property
    def ok(self) -> bool:
        return not self.version_problem and not any(finding.problem for finding in self.findings)

    def __str__(self) -> str:
        failed = [finding for finding in self.findings if finding.problem]
        held = len(self.findings) - len(failed)
        lines = [f"sglang-dflash contract with SGLang {self.sglang_version}: {'holds' if self.ok else 'DOES NOT HOLD'}"]
        if self.version_problem:
            lines.append(f"  {self.version_problem}")
        lines.append(f"  {held} of {len(self.findings)} upstream names are as expected ({len(HOOKS)} of them hooked)")
        lines += [
            f"  {finding.symbol.path} (used by {finding.symbol.used_by}): {finding.problem}" for finding in failed
        ]
        return "\n".join(lines)


def check() -> Report:
    """Resolve every name of the contract against the installed SGLang. Imports SGLang; changes nothing."""
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return Report("(not installed)", "SGLang is not installed; run: pip install sglang==0.5.23", ())
    problem = ""
    if version not in SUPPORTED_SGLANG:
        problem = (
            f"version {version} is not one this plugin was tested with; install one of: {', '.join(SUPPORTED_SGLANG)}"
        )
    symbols = [hook.symbol for hook in HOOKS] + list(SYMBOLS)
    return Report(version, problem, tuple(Finding(symbol, check_symbol(symbol)) for symbol in symbols))


def check_symbol(symbol: Symbol) -> str:
    """What is wrong with one name, or an empty string."""
    try:
        value: Any = pkgutil.resolve_name(symbol.path)
    except Exception as error:  # noqa: BLE001 - a broken upstream import may raise anything, and SGLang would swallow it
        return f"not found ({error})"
    if not symbol.parameters:
        return ""
    if not callable(value):
        return f"is {type(value).__name__}, expected a callable"
    known = inspect.signature(inspect.unwrap(value)).parameters
    missing = [name for name in symbol.parameters if name not in known]
    if missing:
        return f"parameters {', '.join(missing)} are gone; it has ({', '.join(known)})"
    return ""
