"""Does this drafter fit this target, and can our worker serve this configuration? Answered before any weight is loaded.

Pure checks over plain records, so that each refusal is a unit test; ``algorithm.py`` fills the records from SGLang's
resolved arguments. Every refusal names what was given, what is allowed and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MIN_WIDTH = 2
MAX_WIDTH = 65
DEFAULT_WIDTH = 17


class IncompatibleError(ValueError):
    """The drafter, the target and the flags cannot be served together exactly."""


@dataclass(frozen=True)
class DrafterShape:
    """What a DFlash checkpoint's config.json says of its target.

    Attributes:
        target_layer_ids: 0-based target layers whose output is tapped.
        block_size: rows of a draft block, anchor included; None where the config does not say.
        fc_inputs: input features of the checkpoint's ``fc`` weight; None where it could not be read.
    """

    path: str
    hidden_size: int
    target_layer_ids: tuple[int, ...] | None
    mask_token_id: int | None
    block_size: int | None
    num_target_layers: int | None = None
    fc_inputs: int | None = None


@dataclass(frozen=True)
class TargetShape:
    """The target's sizes and memory.

    Attributes:
        num_layers: decoder layers.
        has_recurrent_state: some layers keep a state instead of keys and values (Mamba, GDN, KDA, linear attention).
        has_window_pool: sliding-window layers keep their keys and values in a pool of their own.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    has_recurrent_state: bool = False
    has_window_pool: bool = False


def check_drafter(drafter: DrafterShape, target: TargetShape) -> None:
    """Refuse a drafter that was not trained for a target of this shape.

    Raises:
        IncompatibleError: hidden size, taps, ``fc`` input, layer count or mask token do not fit.
    """
    where = f"Drafter {drafter.path}"
    if drafter.hidden_size != target.hidden_size:
        raise IncompatibleError(
            f"{where} has hidden_size {drafter.hidden_size}, the target {target.hidden_size}; they must be equal, because "
            "the drafter borrows the target's embedding and head. Use a drafter trained for this target."
        )
    _check_taps(where, drafter, target)
    if drafter.num_target_layers is not None and drafter.num_target_layers != target.num_layers:
        raise IncompatibleError(
            f"{where} was trained for a target of {drafter.num_target_layers} layers (num_target_layers); this target has "
            f"{target.num_layers}. Use a drafter trained for this target."
        )
    mask = drafter.mask_token_id
    if mask is not None and not 0 <= mask < target.vocab_size:
        raise IncompatibleError(
            f"{where} has mask_token_id {mask}; allowed are 0 to {target.vocab_size - 1}, the rows of the target's "
            "embedding. Correct dflash_config.mask_token_id to the id that the drafter was trained with."
        )


def _check_taps(where: str, drafter: DrafterShape, target: TargetShape) -> None:
    taps = drafter.target_layer_ids
    if not taps:
        raise IncompatibleError(
            f"{where} has no dflash_config.target_layer_ids. SGLang would guess them, and guesses wrong for most published "
            "drafters; write the layers that the drafter was trained with into its config.json."
        )
    if list(taps) != sorted(set(taps)):
        raise IncompatibleError(
            f"{where} has target_layer_ids {list(taps)}; they must be strictly ascending, because SGLang packs taps in "
            "layer order. Sort them only if the drafter's fc weight was trained in that order."
        )
    if taps[0] < 0 or taps[-1] > target.num_layers - 2:
        raise IncompatibleError(
            f"{where} has target_layer_ids {list(taps)}; allowed are 0 to {target.num_layers - 2} (0-based layers whose "
            f"output is tapped; the last of {target.num_layers} layers has nothing behind it that could capture it)."
        )
    if drafter.fc_inputs is not None and drafter.fc_inputs != len(taps) * target.hidden_size:
        raise IncompatibleError(
            f"{where} has an fc weight with {drafter.fc_inputs} inputs, but {len(taps)} taps of hidden size "
            f"{target.hidden_size} give {len(taps) * target.hidden_size}. Correct dflash_config.target_layer_ids."
        )


def check_memory(target: TargetShape) -> None:
    """Refuse a target whose memory our worker cannot keep right along a tree.

    Raises:
        IncompatibleError: recurrent state, or a sliding-window pool.
    """
    remedy = "Serve the chain with SGLang's own --speculative-algorithm DFLASH on CUDA."
    if target.has_recurrent_state:
        raise IncompatibleError(
            "The target keeps recurrent state (Mamba, GDN, KDA or linear attention). A branch of a tree needs its parent's "
            f"state, and this worker keeps one state a request. {remedy}"
        )
    if target.has_window_pool:
        raise IncompatibleError(
            "The target keeps its sliding-window layers in a pool of their own, where this worker does not move accepted "
            f"rows. {remedy}"
        )


def check_width(width: int) -> None:
    """Refuse a verify width (tree nodes + 1) that no tree has.

    Raises:
        IncompatibleError: the width is outside ``MIN_WIDTH`` to ``MAX_WIDTH``.
    """
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise IncompatibleError(
            f"--speculative-num-draft-tokens {width} is not a verify width of DDTREE; allowed are {MIN_WIDTH} to "
            f"{MAX_WIDTH} (tree nodes + 1; {DEFAULT_WIDTH} is the default)."
        )


def check_block(block: int | None) -> int:
    """The draft block size (anchor + mask rows), refused when unknown or without a draft position.

    Raises:
        IncompatibleError: no block size is given anywhere, or it is outside 2 to 64.
    """
    if block is None:
        raise IncompatibleError(
            "The drafter's config.json has no block_size. Give --speculative-dflash-block-size the size that it was "
            "trained with."
        )
    if not 2 <= block <= 64:
        raise IncompatibleError(
            f"A draft block of {block} rows is not supported; allowed are 2 to 64 (the anchor and at least one mask row)."
        )
    return block


def check_server(cfg: Any, *, backends: tuple[str | None, ...], allowed: tuple[str, ...]) -> None:
    """Refuse server flags that our worker cannot serve exactly.

    Args:
        cfg: has SGLang's resolved argument names.
        backends: the target's attention backends, for prefill and for decode.
        allowed: those that can verify a tree here.

    Raises:
        IncompatibleError: names the flag, its value, the reason and the remedy.
    """
    refusals = (
        (
            "speculative_draft_window_size",
            cfg.speculative_draft_window_size is not None,
            "the drafter reads its whole context",
            "remove the flag",
        ),
        ("pp_size", cfg.pp_size != 1, "taps would cross pipeline stages", "set --pp-size 1"),
        ("enable_dp_attention", bool(cfg.enable_dp_attention), "idle ranks are not handled", "remove the flag"),
        (
            "enable_mixed_chunk",
            bool(cfg.enable_mixed_chunk),
            "prefill and verify rows are not mixed",
            "remove the flag",
        ),
        (
            "enable_deterministic_inference",
            bool(cfg.enable_deterministic_inference),
            "draws along a tree do not follow the requests' seeds yet",
            "remove the flag; seeds are then ignored, as SGLang does without it",
        ),
        (
            "kv_cache_dtype",
            cfg.kv_cache_dtype not in ("auto", "bf16", "bfloat16"),
            "text was not yet compared with plain decoding over such a cache",
            "remove the flag",
        ),
        (
            "disaggregation_mode",
            cfg.disaggregation_mode not in (None, "null"),
            "the drafter's KV is not transferred",
            "serve prefill and decode in one server",
        ),
    )
    for backend in backends:
        if backend not in allowed:
            raise IncompatibleError(
                f"--attention-backend {backend} does not work with this worker: it has no tree mask. To go on: set "
                f"--attention-backend {' or '.join(allowed)}, for prefill and decode alike."
            )
    for field, refused, reason, remedy in refusals:
        if refused:
            flag = "--" + field.replace("_", "-")
            value = getattr(cfg, field)
            raise IncompatibleError(f"{flag} {value} does not work with this worker: {reason}. To go on: {remedy}.")


def refused_request(
    sampling: Any, *, custom_logit_processor: object | None = None, return_hidden_states: bool = False
) -> str | None:
    """Why a request cannot be served exactly, or None. ``sampling`` is SGLang's ``SamplingParams``.

    Greedy and sampled decoding with penalties, grammars, logit bias, stop conditions and log-probs are exact. What would change
    the target's choice along a path in ways that this worker does not follow yet is refused rather than approximated.
    """
    neutral = {
        "watermark": None,
        "beam_width": None,
    }
    given = [
        f"{name}={getattr(sampling, name)!r}" for name, value in neutral.items() if getattr(sampling, name) != value
    ]
    if custom_logit_processor is not None:
        given.append("custom_logit_processor")
    if return_hidden_states:
        given.append("return_hidden_states")
    if not given:
        return None
    return (
        f"{', '.join(given)} is not served with speculative decoding on this worker yet, because it would have to follow "
        "every drafted path; remove it, or serve without --speculative-algorithm."
    )
