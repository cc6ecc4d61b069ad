"""An out-of-tree SGLang platform: any CPU, plain torch, no CUDA, no AMX.

It is what the tests and the demo run on, and where every later piece has a place to be tried without a GPU. It is active
only where torch sees no CUDA device (see ``plugin.activate_cpu_platform``). It chooses backend, dtype and pool sizes, so that
a server starts with the stock flags alone; an explicit flag always wins. It leaves numerics to SGLang's native (torch) ops
and replaces only what launches a Triton kernel on the way. SGLang imports this module while its own are still loading, so it may
import nothing of SGLang but the platform interface.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_dflash.attention import BACKEND_NAME
from sglang_dflash.options import read_options

logger = logging.getLogger(__name__)

SPECULATIVE_ALGORITHMS = ("DFLASH", "DDTREE")
# A KV pool sized from free memory would take all of a desktop's; this is plenty for a model that a CPU can serve.
DEFAULT_MAX_TOTAL_TOKENS = 32768


def extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device,
) -> torch.Tensor:
    """KV slots of the ``draft_token_num`` rows from ``start_offset`` on, per request; int64 ``[batch * rows]``."""
    column_BW = start_offset[:, None] + torch.arange(draft_token_num, device=device)
    return req_to_token[req_pool_indices[:, None], column_BW].to(torch.int64).reshape(-1)


def assign_req_to_token(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write newly allocated slots into columns ``[start, end)`` of each request's row, consuming them in order."""
    taken = 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in spans:
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU in plain torch, registered as SGLang platform ``dflash_cpu``."""

    _enum = PlatformEnum.OOT

    def get_device(self, device_id: int = 0) -> str:
        # SGLang's argument resolution splits the name; its CPU mixin returns a torch.device.
        return "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        from sglang.srt.arg_groups.model_override_base import record_of

        # SGLang has filled in its own CPU defaults by now; the record still tells what the user gave.
        given = record_of(server_args._cfg)
        if given.dtype == "auto":
            # The packed GEMM takes and returns fp32; half-precision activations would only add conversions.
            server_args.dtype = "float32"
        if given.attention_backend is None:
            server_args.attention_backend = BACKEND_NAME
        # An idle scheduler that polls would take a core from whatever else runs here, the client first of all.
        server_args.sleep_on_idle = True
        if given.max_total_tokens is None:
            server_args.max_total_tokens = DEFAULT_MAX_TOTAL_TOKENS

    def get_default_attention_backend(self) -> str:
        return BACKEND_NAME

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in SPECULATIVE_ALGORITHMS

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return BACKEND_NAME

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return algorithm in SPECULATIVE_ALGORITHMS and backend == BACKEND_NAME

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        if algorithm not in SPECULATIVE_ALGORITHMS:
            return None
        from sglang_dflash.speculative.worker import TreeWorker

        return TreeWorker

    def get_speculative_cache_locs_fn(self) -> Any:
        return extend_cache_locs

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        from sglang_dflash.platform.kv_pool import TorchMHAPool

        return TorchMHAPool

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def post_load_model(self, model: torch.nn.Module) -> None:
        if read_options().cpu_linear == "packed_fp16":
            from sglang_dflash.platform.packed_model import pack_linears

            pack_linears(model)
