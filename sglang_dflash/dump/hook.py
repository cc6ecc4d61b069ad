"""Takes the target's taps out of the model runner.

An AFTER hook on ``ModelRunner.forward``: active for the target's runner on attention-TP rank 0, for prefill and decode. SGLang's
capture-only mode (``--enable-return-aux-hidden-states``) makes every forward return its packed taps, chunked prefill and the
radix cache stay on, and no request has to ask for anything. What identifies a row (token ids, positions, KV slots) is what the
engine itself computed with.
"""

from __future__ import annotations

import atexit
import json
import logging
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from sglang_dflash.dump.record import Kind
from sglang_dflash.dump.store import Manifest, SegmentWriter
from sglang_dflash.dump.writer import AsyncWriter, RequestRows, RowAssembler
from sglang_dflash.options import PREFIX, Options, read_options

logger = logging.getLogger(__name__)

WRITER_ATTRIBUTE = "dflash_dump_writer"

CAPTURE_FLAGS = (
    "--speculative-algorithm DFLASH --enable-return-aux-hidden-states --return-aux-hidden-state-layer-ids 1 8 15 ..."
)


class DumpOptionError(ValueError):
    """The server's flags do not fit a dump."""


def check_dump_flags(cfg: Any, options: Options) -> None:
    """Refuse flags under which rows would be wrong or lost. ``cfg`` has SGLang's resolved argument names.

    Raises:
        DumpOptionError: names the flag, the reason and the remedy.
    """
    if options.dump_dir is None:
        return
    variable = f"{PREFIX}DUMP_DIR={options.dump_dir}"
    if not cfg.enable_return_aux_hidden_states or cfg.aux_hidden_state_capture != "dflash":
        raise DumpOptionError(
            f"{variable} is set, but the target's taps are not captured. Start the server with {CAPTURE_FLAGS} and without a "
            "drafter, or unset the variable."
        )
    layer_ids = list(cfg.return_aux_hidden_state_layer_ids or ())
    if not layer_ids or layer_ids != sorted(set(layer_ids)):
        raise DumpOptionError(
            f"--return-aux-hidden-state-layer-ids {layer_ids} must be one or more layers, strictly ascending: taps are packed "
            "in layer order."
        )
    if cfg.enable_mixed_chunk:
        raise DumpOptionError(
            f"{variable} does not work with --enable-mixed-chunk: a mixed forward does not say which of its rows were decoded. "
            "Remove the flag."
        )
    if cfg.enable_hierarchical_cache:
        raise DumpOptionError(
            f"{variable} does not work with --enable-hierarchical-cache: rows that come back from the host have no known "
            "prefix. Remove the flag."
        )
    if cfg.dp_size != 1 or cfg.pp_size != 1:
        raise DumpOptionError(f"{variable} needs --dp-size 1 and --pp-size 1: a dump directory has one writer.")
    check_writable(options.dump_dir)


def check_writable(directory: Path) -> None:
    """Refuse a dump directory that cannot be written.

    Raises:
        DumpOptionError
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DumpOptionError(
            f"{PREFIX}DUMP_DIR={directory} cannot be written: {error}. Give another directory."
        ) from error


def after_init_attention_backends(result: Any, runner: Any) -> None:
    """Hook function: open the dump once the target's KV pool exists, before the first forward.

    Raises:
        DumpError: the directory holds another dump or is being written; the server does not start.
    """
    from sglang.srt.runtime_context import get_parallel

    options = read_options()
    if runner.is_draft_worker or options.dump_dir is None or get_parallel().attn_tp_rank != 0:
        return
    manifest = manifest_of(runner)
    segments = SegmentWriter(options.dump_dir, manifest, segment_bytes=options.dump_segment_mb << 20)
    num_slots = runner.token_to_kv_pool.size + runner.token_to_kv_pool.page_size
    writer = AsyncWriter(RowAssembler(segments, manifest.id, num_slots), queue_bytes=options.dump_queue_mb << 20)
    atexit.register(writer.close)
    setattr(runner, WRITER_ATTRIBUTE, writer)
    logger.info("Dumping taps %s as %s to %s.", list(manifest.layer_ids), manifest.dtype, options.dump_dir)


def after_model_runner_forward(output: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    """Hook function; ``output`` is SGLang's ``ModelRunnerOutput``."""
    if runner.is_draft_worker or forward_batch.rids is None:
        return
    mode = forward_batch.forward_mode
    if mode.is_idle() or not (mode.is_decode() or mode.is_extend()) or mode.is_target_verify():
        return
    writer: AsyncWriter | None = getattr(runner, WRITER_ATTRIBUTE, None)
    if writer is not None:
        hidden_TF = output.logits_output.hidden_states
        writer.put(request_rows(forward_batch, hidden_TF, runner.req_to_token_pool.req_to_token))


def request_rows(forward_batch: Any, hidden_TF: torch.Tensor, req_to_token: torch.Tensor) -> list[RequestRows]:
    """Split one forward into its requests' rows, on the host.

    Args:
        forward_batch: SGLang's ``ForwardBatch``, after an extend or decode forward.
        hidden_TF: packed taps ``[tokens, taps * hidden_size]``; rows past the batch's tokens are padding.
        req_to_token: the request table, ``[requests, context]`` KV slots.
    """
    if forward_batch.forward_mode.is_decode():
        kind, counts = Kind.DECODE, [1] * len(forward_batch.rids)
        starts = [int(length) - 1 for length in forward_batch.seq_lens.tolist()]
    else:
        kind, counts = Kind.PREFILL, list(forward_batch.extend_seq_lens_cpu)
        starts = list(forward_batch.extend_prefix_lens_cpu)
    total = sum(counts)
    token_ids = forward_batch.input_ids[:total].to("cpu", torch.int32, copy=True).numpy()
    slots = forward_batch.out_cache_loc[:total].to("cpu", torch.int64, copy=True).numpy()
    before = torch.tensor([max(start - 1, 0) for start in starts], device=req_to_token.device)
    previous = req_to_token[forward_batch.req_pool_indices[: len(starts)], before].tolist()
    hidden_TF = hidden_TF[:total].detach().to("cpu", copy=True)
    rows = []
    first = 0
    for rid, count, start, slot in zip(forward_batch.rids, counts, starts, previous, strict=True):
        span = slice(first, first + count)
        first += count
        if count:
            rows.append(
                RequestRows(
                    rid=str(rid),
                    kind=kind,
                    start=start,
                    previous_slot=int(slot) if start else None,
                    token_ids=np.ascontiguousarray(token_ids[span]),
                    slots=slots[span],
                    hidden_RF=hidden_TF[span],
                )
            )
    return rows


def manifest_of(runner: Any) -> Manifest:
    """The manifest of what this runner computes."""
    from sglang.srt.runtime_context import get_exec

    config = runner.model_config
    fields = {key: value for key, value in config.hf_config.to_dict().items() if not key.startswith("_")}
    return Manifest(
        architecture=str((config.hf_config.architectures or [type(runner.model).__name__])[0]),
        config_hash=xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True, default=str).encode()),
        vocab_size=int(config.vocab_size),
        num_layers=int(config.hf_text_config.num_hidden_layers),
        hidden_size=int(config.hf_text_config.hidden_size),
        layer_ids=tuple(int(layer) for layer in get_exec().features.return_aux_hidden_state_layer_ids),
        dtype=str(runner.dtype).removeprefix("torch."),
        quantization=config.quantization,
        kv_cache_dtype=str(runner.kv_cache_dtype).removeprefix("torch."),
        sglang_version=metadata.version("sglang"),
    )
