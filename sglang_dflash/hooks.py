"""The functions behind the hooks that ``contract.py`` lists. One hook, one function; each says only what it changes.

Imported when SGLang loads the plugin; heavy modules are imported inside the functions, when they first run.
"""

from __future__ import annotations

from typing import Any


def after_handle_dflash(result: Any, server_args: Any) -> None:
    """Refuse a drafter that does not fit, in the launcher, before weights load."""
    from sglang_dflash.speculative.algorithm import check_startup

    check_startup(server_args)


def after_handle_capture(result: Any, server_args: Any) -> None:
    """Refuse a dump that these flags cannot make, in the launcher."""
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_dflash.dump.hook import check_dump_flags
    from sglang_dflash.options import read_options

    check_dump_flags(resolving_view(server_args), read_options())


def after_validate_request(result: str | None, req: Any, enable_overlap: bool) -> str | None:
    """Refuse what our worker cannot serve exactly; the message becomes the response's error."""
    if result is not None:
        return result
    from sglang.srt.runtime_context import get_spec

    from sglang_dflash.speculative.algorithm import served_by_our_worker
    from sglang_dflash.speculative.compatibility import refused_request

    if not served_by_our_worker(get_spec().speculative_algorithm):
        return None
    return refused_request(
        req.sampling_params,
        custom_logit_processor=req.custom_logit_processor,
        return_hidden_states=req.return_hidden_states,
    )


def after_verify_mask_policy(result: tuple[str, bool], attn_backend: Any) -> tuple[str, bool]:
    """Capture the verify graphs with a mask where trees are verified that are wider than the chain."""
    from sglang.srt.runtime_context import get_spec

    backend_name, build_mask = result
    spec = get_spec()
    is_tree = spec.speculative_algorithm == "DDTREE"
    return backend_name, build_mask or (
        is_tree and spec.speculative_num_draft_tokens > spec.speculative_dflash_block_size
    )


def after_spec_metrics(result: None, manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int) -> None:
    """Count the drafts that were verified, where the worker says how many; SGLang takes every round as the widest."""
    verified = recv_obj.spec_num_cap_tokens[i] if recv_obj.spec_num_cap_tokens else 0
    if verified and "spec_num_proposed_drafts" in meta_info:
        meta_info["spec_num_proposed_drafts"] = verified
        meta_info["spec_accept_rate"] = meta_info["spec_num_correct_drafts"] / verified


def before_decode_reservation(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Reserve KV for the wider of draft block and verify; SGLang reserves for the verify alone."""
    kwargs["reserve"] = max(kwargs["reserve"], _round_reserve())
    return args, kwargs


def after_extra_context_len(extra: int) -> int:
    """Make rows of the request table long enough for the whole reservation of a request at the context limit."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size

    reserve = _round_reserve()
    return max(extra, reserve + get_alloc_page_size() - 1) if reserve else extra


def _round_reserve() -> int:
    """KV rows that a DFLASH or DDTREE request may hold beyond its committed length (twice a round: the host lags by one)."""
    from sglang.srt.runtime_context import get_spec

    from sglang_dflash.speculative.algorithm import round_rows

    spec = get_spec()
    return 2 * round_rows(spec) if spec.speculative_algorithm in ("DFLASH", "DDTREE") else 0
