"""The KV pool of the CPU platform: SGLang's own, with rows moved by torch indexing in place of a Triton copy."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class TorchMHAPool(MHATokenToKVPool):
    """Multi-head pool on any torch device. The MLA pool already moves rows with torch."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True
