"""The training loop: dump in, drafter out.

One step is one batch of whole requests. Everything random is drawn from the seed and the step, so on one CPU a resumed run has
the loss curve of an uninterrupted one, to the bit (a run that ``max_minutes`` ends has a schedule by the clock, which is not
repeatable). The first SIGTERM or SIGINT checkpoints, exports and leaves; the second ends the process as if there were no handler.

Weights and optimiser are fp32; on CUDA the matrix products are bf16. One device; sharding is left to a later form.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm

import sglang_dflash
from sglang_dflash.dump.reader import DumpReader
from sglang_dflash.train import checkpoint
from sglang_dflash.train.config import TrainConfig
from sglang_dflash.train.data import (
    Batch,
    Reader,
    Sample,
    batches,
    fingerprint,
    load_samples,
    made_ahead,
    plan,
    split,
    stream,
    tap_scale,
)
from sglang_dflash.train.export import export, load_drafter
from sglang_dflash.train.model import Drafter, DrafterConfig
from sglang_dflash.train.objective import CandidateSampler, block_accuracy, cross_entropy, slot_weights
from sglang_dflash.train.simulate import Simulated, simulate
from sglang_dflash.train.target import Target, copy_last_layers, open_target

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
DRAFTER = "drafter"
# Replaying every held-out request would cost more than training on a small machine.
MEASURED_SAMPLES = 16


class ConfigMismatchError(ValueError):
    """The dump was not made from the target that the run names."""


class DivergedError(RuntimeError):
    """The loss is no longer a finite number."""


@dataclass(frozen=True)
class TrainResult:
    """What a run made.

    Attributes:
        drafter: exported folder.
        steps: optimiser steps behind the drafter, those before a resumption included.
        seconds: of this call, reading and measuring included.
        final_loss: of the last step; NaN where none was left to do.
        seen, held_out: simulated acceptance of the exported weights on some training and held-out requests (None where there
            are none).
        missing: ids of the requests that were left out because rows of theirs are missing.
        interrupted: a signal ended the run early; ``loop.resume=true`` goes on.
    """

    drafter: Path
    steps: int
    seconds: float
    final_loss: float
    seen: Simulated
    held_out: Simulated | None
    missing: tuple[str, ...]
    interrupted: bool


@dataclass(frozen=True)
class _Run:
    """The parts of a run."""

    config: TrainConfig
    device: torch.device
    drafter: Drafter
    optimizer: torch.optim.Optimizer
    embedding_VH: torch.Tensor
    head_VH: torch.Tensor
    candidates: CandidateSampler | None
    training: list[Sample]
    plan: list[list[int]]

    def identity(self) -> dict[str, Any]:
        """What must not change between a checkpoint and its resumption, flat."""
        left_out = {"resume", "max_minutes", "checkpoint_every", "device"}
        sections = self.config.model_dump(mode="json", exclude={"output": True, "data": {"dump"}, "loop": left_out})
        flat = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
        # The dump may have moved; what it holds may not have changed.
        return {**flat, "dump": fingerprint(self.training)}


def train(config: TrainConfig, *, reader: Reader | None = None, progress: bool = True) -> TrainResult:
    """Train a drafter and export it to ``config.output.folder / "drafter"``.

    Args:
        reader: the dump; opened from ``config.data.dump`` where None.
        progress: show a progress bar.

    Raises:
        ValueError: the dump, the target and the configuration do not fit; the message says which and what to do.
        DivergedError: the loss became infinite or NaN; the last checkpoint is from before.
    """
    started = time.monotonic()
    reader = DumpReader(config.data.dump) if reader is None else reader
    target = open_target(config.data.target)
    shape = drafter_config(config, reader.manifest, target)
    samples, missing = load_samples(
        reader, max_length=config.data.max_length, max_missing_fraction=config.data.max_missing_fraction
    )
    training, held_out = split(samples, config.data.holdout_fraction)
    run = _prepare(config, shape, target, training)
    first_step = _start(run)
    with _graceful_stop() as stop:
        step, loss = _steps(run, first_step, stop, progress)
    run.drafter.fold_tap_scale()
    folder = export(
        run.drafter,
        config.output.folder / DRAFTER,
        dtype=getattr(torch, config.output.dtype or reader.manifest.dtype),
        provenance=_provenance(config, reader.manifest, step),
    )
    # What was written, rounding included, is what will be served.
    exported = load_drafter(folder).float().to(run.device)
    result = TrainResult(
        drafter=folder,
        steps=step,
        seconds=time.monotonic() - started,
        final_loss=loss,
        seen=_measure(run, exported, training),
        held_out=_measure(run, exported, held_out) if held_out else None,
        missing=missing,
        interrupted=bool(stop),
    )
    logger.info("Trained %s steps in %.0f s; simulated tau %.2f.", step, result.seconds, result.seen.tau)
    return result


def drafter_config(config: TrainConfig, manifest: Any, target: Target) -> DrafterConfig:
    """The drafter's shape: the dump's taps, the run's choices, the target's sizes for the rest.

    Raises:
        ConfigMismatchError: the dump was made from a target of other sizes.
        ValueError: the choices do not go together, or the target lacks a size that the run does not give.
    """
    sizes, model = target.config, config.model
    for name, dumped in (
        ("hidden_size", manifest.hidden_size),
        ("num_hidden_layers", manifest.num_layers),
        ("vocab_size", manifest.vocab_size),
    ):
        if dumped != sizes[name]:
            raise ConfigMismatchError(
                f"The dump's target has {name} {dumped}, {target.folder} has {sizes[name]}. Give data.target the model that "
                "made the dump."
            )
    heads = int(model.num_attention_heads or sizes["num_attention_heads"])
    return DrafterConfig(
        hidden_size=int(sizes["hidden_size"]),
        intermediate_size=int(model.intermediate_size or sizes["intermediate_size"]),
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=int(model.num_key_value_heads or sizes.get("num_key_value_heads") or heads),
        head_dim=int(model.head_dim or sizes.get("head_dim") or sizes["hidden_size"] // heads),
        rms_norm_eps=float(sizes["rms_norm_eps"]),
        rope_theta=target.rope_theta if model.rope_theta is None else model.rope_theta,
        max_position_embeddings=int(sizes["max_position_embeddings"]),
        vocab_size=int(sizes["vocab_size"]),
        num_target_layers=int(sizes["num_hidden_layers"]),
        target_layer_ids=tuple(manifest.layer_ids),
        block_size=model.block_size,
        mask_token_id=model.mask_token_id,
        is_causal=model.is_causal,
        yarn=model.yarn,
    )


def _prepare(config: TrainConfig, shape: DrafterConfig, target: Target, training: list[Sample]) -> _Run:
    cuda = config.loop.device == "cuda" or (config.loop.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if cuda else "cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.loop.seed)
        drafter = Drafter(shape)
    if config.model.init == "target":
        copy_last_layers(drafter, target)
    drafter.set_tap_scale(tap_scale(training))
    drafter.to(device)
    # Matrix products on CUDA are bf16: the frozen head need not be rounded anew every step.
    embedding_VH, head_VH = (
        tensor.to(device, torch.bfloat16 if cuda else torch.float32) for tensor in target.embedding_and_head()
    )
    candidates = None
    if config.objective.sampled_vocab is not None:
        labels = torch.cat([sample.token_ids[sample.prompt_len :] for sample in training])
        candidates = CandidateSampler(head_VH, labels, config.objective.sampled_vocab)
    return _Run(
        config=config,
        device=device,
        drafter=drafter,
        optimizer=torch.optim.AdamW(
            drafter.parameters(), lr=config.optim.lr, weight_decay=config.optim.weight_decay, fused=True
        ),
        embedding_VH=embedding_VH,
        head_VH=head_VH,
        candidates=candidates,
        training=training,
        plan=plan(
            training,
            epochs=config.loop.epochs,
            max_length=config.data.max_length,
            samples_per_batch=config.loop.samples_per_batch,
            tokens_per_batch=config.loop.tokens_per_batch,
            seed=config.loop.seed,
        ),
    )


def _start(run: _Run) -> int:
    """Make the output folder ready; returns the first step to do."""
    folder = run.config.output.folder
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / METRICS
    if run.config.loop.resume:
        step = checkpoint.load(folder, model=run.drafter, optimizer=run.optimizer, config=run.identity())
        # What was measured behind the checkpoint will be measured again.
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        metrics.write_text("".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step))
        return step
    earlier = checkpoint.find(folder)
    if earlier is not None:
        logger.warning(
            "Starting anew: %s of an earlier run is removed (loop.resume=true would go on from it).", earlier
        )
    checkpoint.clear(folder)
    metrics.unlink(missing_ok=True)
    return 0


def _steps(run: _Run, first_step: int, stop: list[int], show: bool) -> tuple[int, float]:
    """Train until the plan, the time or the process ends; returns the steps behind and the last loss."""
    config = run.config
    stream_of_batches = batches(
        run.training,
        run.plan,
        anchors_per_sample=config.data.anchors_per_sample,
        block_size=config.model.block_size,
        max_length=config.data.max_length,
        seed=config.loop.seed,
        first_step=first_step,
    )
    total, seconds = len(run.plan), 60 * (config.loop.max_minutes or math.inf)
    step, loss, started = first_step, math.nan, time.monotonic()
    bar = tqdm(total=total, initial=first_step, unit="step", desc="train", disable=not show, dynamic_ncols=True)
    # Line by line, so that a killed run has the lines of its last checkpoint.
    with (config.output.folder / METRICS).open("a", buffering=1) as metrics, bar:
        for batch in made_ahead(stream_of_batches) if run.device.type == "cuda" else stream_of_batches:
            elapsed = time.monotonic() - started
            if elapsed >= seconds or stop:
                break
            values = _step(run, batch, step, share=max(step / total, elapsed / seconds))
            step, loss = step + 1, values["loss"]
            if not math.isfinite(loss):
                raise DivergedError(
                    f"The loss of step {step} is {loss}. Lower optim.lr ({config.optim.lr:g}), or look for damaged rows "
                    "with `sglang-dflash dump verify`."
                )
            metrics.write(json.dumps({"step": step, **values}) + "\n")
            speed = values["tokens"] / values["seconds"]
            bar.set_postfix_str(f"loss {loss:.3f}, tau {values['tau']:.2f}, {speed:.0f} tokens/s", refresh=False)
            bar.update()
            if step % config.loop.checkpoint_every == 0:
                _save(run, step)
    _save(run, step)
    return step, loss


def _save(run: _Run, step: int) -> None:
    checkpoint.save(
        run.config.output.folder, model=run.drafter, optimizer=run.optimizer, step=step, config=run.identity()
    )


def _step(run: _Run, batch: Batch, step: int, share: float) -> dict[str, Any]:
    """One optimiser step; ``share`` of the run is behind. Returns its line of metrics.

    ``tau`` there is 1 + the drafts that the blocks of this batch would have accepted, each anchor counted once. A server counts
    the anchors that it gets to, so its tau differs; ``simulate`` walks as it does.
    """
    begin = time.monotonic()
    optim, size = run.config.optim, run.config.model.block_size
    lr = optim.lr * learning_rate_factor(share, optim.warmup_fraction)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    batch = batch.to(run.device)
    head_VH, label_R = run.head_VH, batch.label_R
    if run.candidates is not None:
        drawn = run.candidates.draw(stream(run.config.loop.seed, step, "candidates"))
        head_VH, label_R = drawn.head_VH, drawn.index_of[label_R]
    slot_R = batch.row_R % size
    with torch.autocast(run.device.type, torch.bfloat16, enabled=run.device.type == "cuda"):
        context = run.drafter.context(batch.taps_BTF)
        hidden_BASH = run.drafter(context, batch.anchor_BA, batch.token_BA, run.embedding_VH)
        hidden_RH = hidden_BASH.flatten(0, 2)[batch.row_R].to(head_VH.dtype)
        loss, correct_R = cross_entropy(hidden_RH, head_VH, label_R, slot_weights(slot_R, run.config.objective.gamma))
    run.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(run.drafter.parameters(), optim.clip_norm)
    run.optimizer.step()
    accuracy_S, tau = block_accuracy(correct_R, batch.row_R, num_anchors=batch.anchor_BA.numel(), block_size=size)
    # One transfer for all of them.
    loss_value, norm_value, tau_value, *accuracy = torch.cat(
        [torch.stack([loss.detach(), norm, tau]), accuracy_S]
    ).tolist()
    return {
        "loss": loss_value,
        "lr": lr,
        "grad_norm": norm_value,
        "tau": round(tau_value, 4),
        "slot_accuracy": [round(value, 4) for value in accuracy[1:]],
        "labels": len(batch.row_R),
        "tokens": batch.taps_BTF.shape[0] * batch.taps_BTF.shape[1],
        "seconds": round(time.monotonic() - begin, 4),
    }


def learning_rate_factor(share: float, warmup_fraction: float) -> float:
    """Linear warm-up, then a cosine to zero, over the share of the run that is behind (0 to 1)."""
    if share < warmup_fraction:
        return max(share / warmup_fraction, 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (share - warmup_fraction) / (1 - warmup_fraction)))


def _measure(run: _Run, drafter: Drafter, samples: list[Sample]) -> Simulated:
    return simulate(
        drafter,
        samples[:MEASURED_SAMPLES],
        run.embedding_VH,
        run.head_VH,
        max_length=run.config.data.max_length,
    )


def _provenance(config: TrainConfig, manifest: Any, step: int) -> dict[str, str]:
    return {
        "trained_by": f"sglang-dflash {sglang_dflash.__version__}",
        "torch": torch.__version__,
        "steps": str(step),
        "recipe": json.dumps(config.model_dump(mode="json", exclude={"output", "data"})),
        "dump": manifest.id.hex(),
    }


@contextmanager
def _graceful_stop() -> Iterator[list[int]]:
    """Collects the first SIGTERM or SIGINT in the yielded list; a second one acts as it did before.

    Only the main thread may handle signals; elsewhere the list stays empty.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        restore()

    for number in previous:
        signal.signal(number, note)
    try:
        yield received
    finally:
        restore()
