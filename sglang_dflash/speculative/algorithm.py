"""DDTREE as SGLang sees it: a registered algorithm of the DFLASH family, and the start-up checks of both.

The family membership keeps SGLang's wiring for DFLASH (tap capture, drafter pool sizing, overlap relay). Stock flags carry the
shape: ``--speculative-num-draft-tokens`` is the verify width (tree nodes + 1), ``--speculative-dflash-block-size`` the draft
block (default: the drafter's config). Everything is checked in the launcher, before weights load.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from sglang.srt.arg_groups.model_override_base import attention_backends_of, model_config_of, record_of
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.arg_groups.speculative_hook import _handle_dflash
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.speculative.spec_registry import CustomSpecAlgo
from sglang.srt.utils.hf_transformers_utils import get_config

from sglang_dflash.attention import BACKEND_NAME
from sglang_dflash.options import PREFIX
from sglang_dflash.speculative.compatibility import (
    DEFAULT_WIDTH,
    DrafterShape,
    IncompatibleError,
    TargetShape,
    check_block,
    check_drafter,
    check_memory,
    check_server,
    check_width,
)

SOURCE = "sglang-dflash"


class DDTreeAlgorithm(CustomSpecAlgo):
    """``--speculative-algorithm DDTREE``."""

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> type | None:
        return None

    def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        device, *rest = args
        return FutureMap(device, self, *rest, **kwargs)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Rows of one request in a captured forward: the drafter's are its block, the target's the verify width."""
        block = get_spec().speculative_dflash_block_size
        return int(block) if is_draft_worker and block is not None else num_draft_tokens

    def resolve_max_speculative_num_draft_tokens(self, server_args: Any) -> int:
        """Rows of one round that may be written to the KV cache: the wider of draft block and verify."""
        cfg = resolving_view(server_args)
        return round_rows(cfg)

    def handle_server_args(self, server_args: Any) -> None:
        """Resolve width and block, and refuse what cannot be served.

        Raises:
            IncompatibleError: names the flag, its value, what is allowed and what to do.
        """
        record = record_of(server_args._cfg)  # SGLang hands a recording stand-in; its view leads to the record
        cfg = resolving_view(record)
        width = DEFAULT_WIDTH if cfg.speculative_num_draft_tokens is None else int(cfg.speculative_num_draft_tokens)
        check_width(width)
        if cfg.speculative_eagle_topk not in (None, 1):
            raise IncompatibleError(
                f"--speculative-eagle-topk {cfg.speculative_eagle_topk} is not how DDTREE branches; it takes the most "
                f"probable prefixes. Limit the candidates per position with {PREFIX}TREE_TOPK."
            )
        drafter = read_drafter(cfg, "DDTREE")
        given = cfg.speculative_dflash_block_size
        block = check_block(drafter.block_size if given is None else int(given))
        # SGLang's DFLASH checks take the block as the width; the width of a tree is declared after them.
        declare_resolution(record, SOURCE, speculative_num_draft_tokens=block, speculative_dflash_block_size=block)
        _handle_dflash(record)
        declare_resolution(record, SOURCE, speculative_num_draft_tokens=width)
        _choose_backend(record)


def _choose_backend(record: Any) -> None:
    """Verify trees with Triton where the user named no backend: SGLang's choice for the GPU may have no tree mask."""
    given = (record.attention_backend, record.prefill_attention_backend, record.decode_attention_backend)
    if not current_platform.is_out_of_tree() and given == (None, None, None):
        declare_resolution(record, SOURCE, attention_backend=tree_backends(uses_mla=False)[0])


def round_rows(spec: Any) -> int:
    """KV rows of one speculative round: the wider of the verify and the draft block."""
    return max(int(spec.speculative_num_draft_tokens or 0), int(spec.speculative_dflash_block_size or 0))


def check_startup(server_args: Any) -> None:
    """AFTER hook of ``_handle_dflash``: the drafter must fit the target, and our worker must be able to serve.

    Raises:
        IncompatibleError: see ``compatibility``.
    """
    cfg = resolving_view(server_args)
    drafter = read_drafter(cfg, cfg.speculative_algorithm)
    config = model_config_of(server_args)
    target = TargetShape(
        hidden_size=int(config.hf_text_config.hidden_size),
        num_layers=int(config.hf_text_config.num_hidden_layers) * int(getattr(config.hf_text_config, "num_loops", 1)),
        vocab_size=int(config.vocab_size),
        has_recurrent_state=mambaish_config(config) is not None,
        has_window_pool=bool(config.is_hybrid_swa),
    )
    check_drafter(drafter, target)
    if served_by_our_worker(cfg.speculative_algorithm):
        check_memory(target)
        uses_mla = config.attention_arch == AttentionArch.MLA
        check_server(cfg, backends=attention_backends_of(cfg), allowed=tree_backends(uses_mla))


def tree_backends(uses_mla: bool) -> tuple[str, ...]:
    """Attention backends that can verify a tree on this platform, the default first.

    SGLang's FlashInfer backend for MLA has no mask; its plan for the others waits for the device in every round.
    """
    if current_platform.is_out_of_tree():
        return (BACKEND_NAME,)
    return ("triton",) if uses_mla else ("triton", "flashinfer")


def served_by_our_worker(algorithm: str | None) -> bool:
    """DDTREE always is; DFLASH only on the CPU platform."""
    on_our_platform = current_platform.is_out_of_tree() and current_platform.supports_speculative_algorithm("DDTREE")
    return algorithm == "DDTREE" or (algorithm == "DFLASH" and on_our_platform)


def read_drafter(cfg: Any, algorithm: str) -> DrafterShape:
    """The drafter's shape from its checkpoint's config (and ``fc`` header where the folder is local).

    Raises:
        IncompatibleError: no drafter is given, or its config cannot be read.
    """
    path = cfg.speculative_draft_model_path
    if path is None:
        raise IncompatibleError(
            f"--speculative-algorithm {algorithm} needs a drafter: give --speculative-draft-model-path a folder or Hub id "
            "of a DFlash checkpoint trained for this target (`sglang-dflash train` makes one)."
        )
    try:
        hf_config = get_config(
            path,
            trust_remote_code=cfg.trust_remote_code,
            revision=cfg.speculative_draft_model_revision,
            model_override_args=json.loads(cfg.json_model_override_args),
        )
        parsed = parse_dflash_draft_config(draft_hf_config=hf_config)
    except (OSError, ValueError) as error:
        raise IncompatibleError(
            f"--speculative-draft-model-path {path} is not a readable DFlash checkpoint: {error}"
        ) from error
    taps = parsed.target_layer_ids
    return DrafterShape(
        path=str(path),
        hidden_size=int(hf_config.get_text_config().hidden_size),
        target_layer_ids=None if taps is None else tuple(taps),
        mask_token_id=parsed.mask_token_id,
        block_size=parsed.block_size,
        num_target_layers=parsed.num_target_layers,
        fc_inputs=_fc_inputs(Path(path)),
    )


def _fc_inputs(folder: Path) -> int | None:
    """Input features of the checkpoint's ``fc`` weight, read from safetensors headers; None where it is not local."""
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is not a mapping
                if name.removeprefix("model.") == "fc.weight":
                    return int(tensors.get_slice(name).get_shape()[1])
    return None
