"""The training loop: dump in, drafter out.

One step is one batch of whole requests. Everything random is drawn from the seed and the step, so on one device a resumed run
has the loss curve of an uninterrupted one. The first SIGTERM or SIGINT checkpoints and leaves; the second kills.
"""

from __future__ import annotations

import json
import logging
import math
import signal
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
from sglang_dflash.train.data import IGNORE, Batch, Reader, Sample, batches, load_samples, split, steps_per_epoch
from sglang_dflash.train.export import export
from sglang_dflash.train.model import Drafter, DrafterConfig
from sglang_dflash.train.objective import CandidateSampler, cross_entropy, slot_weights
from sglang_dflash.train.simulate import Simulated, draft_hidden, simulate
from sglang_dflash.train.target import Target, copy_last_layers, open_target

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
DRAFTER = "drafter"
# Replaying every held-out request would cost more than training on a small machine.
MEASURED_SAMPLES = 16


class ConfigMismatchError(ValueError):
    """The dump was not made from the target that the run names."""


@dataclass(frozen=True)
class TrainResult:
    """What a run made.

    Attributes:
        drafter: exported folder.
        seen, held_out: simulated acceptance on some training and held-out requests (None where there are none).
        interrupted: a signal ended the run early; ``loop.resume=true`` goes on.
    """

    drafter: Path
    steps: int
    seconds: float
    final_loss: float
    seen: Simulated
    held_out: Simulated | None
    interrupted: bool


@dataclass
class _Run:
    """The moving parts of a run."""

    config: TrainConfig
    device: torch.device
    drafter: Drafter
    optimizer: torch.optim.Optimizer
    embedding_VH: torch.Tensor
    head_VH: torch.Tensor
    candidates: CandidateSampler | None
    total_steps: int
    deadline: float

    def progress(self, step: int, now: float, started: float) -> float:
        """Share of the run that is behind, 0 to 1: by steps, or by time where that is further."""
        by_time = (now - started) / (self.deadline - started) if math.isfinite(self.deadline) else 0.0
        return min(1.0, max(step / self.total_steps, by_time))


def train(config: TrainConfig, *, reader: Reader | None = None, progress: bool = True) -> TrainResult:
    """Train a drafter and export it to ``config.output / "drafter"``.

    Args:
        reader: the dump; opened from ``config.data.dump`` where None.
        progress: show a progress bar.

    Raises:
        ValueError: the dump, the target and the configuration do not fit; the message says which and what to do.
    """
    reader = DumpReader(config.data.dump) if reader is None else reader
    target = open_target(config.data.target)
    samples = load_samples(
        reader, max_length=config.data.max_length, max_missing_fraction=config.data.max_missing_fraction
    )
    training, held_out = split(samples, config.data.holdout_fraction)
    run = _prepare(config, reader.manifest, target, training)
    config.output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    first_step = 0
    if config.loop.resume:
        first_step = checkpoint.load(
            config.output, model=run.drafter, optimizer=run.optimizer, config=_identity(config)
        )
    with _graceful_stop() as stop:
        step, loss = _steps(run, training, first_step, started, stop, progress)
    run.drafter.eval()
    result = TrainResult(
        drafter=export(run.drafter, config.output / DRAFTER, provenance=_provenance(config, reader.manifest, step)),
        steps=step,
        seconds=time.monotonic() - started,
        final_loss=loss,
        seen=_measure(run, training),
        held_out=_measure(run, held_out) if held_out else None,
        interrupted=bool(stop),
    )
    logger.info("Trained %s steps in %.0f s; simulated tau %.2f.", step, result.seconds, result.seen.tau)
    return result


def _prepare(config: TrainConfig, manifest: Any, target: Target, training: list[Sample]) -> _Run:
    cuda = config.loop.device == "cuda" or (config.loop.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(config.loop.seed)
    drafter = Drafter(drafter_config(config, manifest, target))
    if config.model.init == "target":
        copy_last_layers(drafter, target)
    drafter.to(device)
    embedding_VH, head_VH = (tensor.to(device) for tensor in target.embedding_and_head())
    candidates = None
    if config.objective.sampled_vocab is not None:
        labels = torch.cat([sample.token_ids[sample.prompt_len :] for sample in training])
        candidates = CandidateSampler(head_VH, labels, config.objective.sampled_vocab)
    minutes = config.loop.max_minutes
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
        total_steps=config.loop.epochs * steps_per_epoch(len(training), config.loop.samples_per_batch),
        deadline=math.inf if minutes is None else time.monotonic() + 60 * minutes,
    )


def drafter_config(config: TrainConfig, manifest: Any, target: Target) -> DrafterConfig:
    """The drafter's shape: the target's sizes, the dump's taps, the run's choices.

    Raises:
        ConfigMismatchError: the dump was made from a target of other sizes.
    """
    sizes = target.config
    for name, dumped, given in (
        ("hidden_size", manifest.hidden_size, sizes["hidden_size"]),
        ("num_hidden_layers", manifest.num_layers, sizes["num_hidden_layers"]),
        ("vocab_size", manifest.vocab_size, sizes["vocab_size"]),
    ):
        if dumped != given:
            raise ConfigMismatchError(
                f"The dump's target has {name} {dumped}, {target.folder} has {given}. Give data.target the model that made "
                "the dump."
            )
    heads = int(sizes["num_attention_heads"])
    return DrafterConfig(
        hidden_size=int(sizes["hidden_size"]),
        intermediate_size=int(config.model.intermediate_size or sizes["intermediate_size"]),
        num_hidden_layers=config.model.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=int(sizes.get("num_key_value_heads") or heads),
        head_dim=int(sizes.get("head_dim") or sizes["hidden_size"] // heads),
        rms_norm_eps=float(sizes["rms_norm_eps"]),
        rope_theta=target.rope_theta,
        max_position_embeddings=int(sizes["max_position_embeddings"]),
        vocab_size=int(sizes["vocab_size"]),
        num_target_layers=int(sizes["num_hidden_layers"]),
        target_layer_ids=tuple(manifest.layer_ids),
        block_size=config.model.block_size,
        mask_token_id=config.model.mask_token_id,
        is_causal=config.model.is_causal,
    )


def _steps(
    run: _Run, training: list[Sample], first_step: int, started: float, stop: list[int], show: bool
) -> tuple[int, float]:
    config = run.config
    stream = batches(
        training,
        samples_per_batch=config.loop.samples_per_batch,
        anchors_per_sample=config.data.anchors_per_sample,
        block_size=config.model.block_size,
        max_length=config.data.max_length,
        seed=config.loop.seed,
        first_step=first_step,
    )
    step, loss = first_step, math.nan
    bar = tqdm(
        total=run.total_steps, initial=first_step, unit="step", desc="train", disable=not show, dynamic_ncols=True
    )
    with (config.output / METRICS).open("a") as metrics, bar:
        while step < run.total_steps and time.monotonic() < run.deadline and not stop:
            share = run.progress(step, time.monotonic(), started)
            values = _step(run, next(stream), step, share)
            step += 1
            loss = values["loss"]
            metrics.write(json.dumps({"step": step, **values}) + "\n")
            bar.set_postfix(loss=f"{loss:.3f}", slot1=f"{values['slot_accuracy'][0]:.2f}", lr=f"{values['lr']:.1e}")
            bar.update()
            if step % config.loop.checkpoint_every == 0:
                _save(run, step)
    _save(run, step)
    return step, loss


def _save(run: _Run, step: int) -> None:
    checkpoint.save(
        run.config.output, model=run.drafter, optimizer=run.optimizer, step=step, config=_identity(run.config)
    )


def _step(run: _Run, batch: Batch, step: int, share: float) -> dict[str, Any]:
    begin = time.monotonic()
    optim = run.config.optim
    lr = optim.lr * learning_rate_factor(share, optim.warmup_fraction)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    batch = batch.to(run.device)
    with torch.autocast(run.device.type, torch.bfloat16, enabled=run.device.type == "cuda"):
        hidden_BASH = draft_hidden(run.drafter, batch, run.embedding_VH)
        supervised_BAS = batch.label_BAS != IGNORE
        slot_R = supervised_BAS.nonzero()[:, 2]
        label_R = batch.label_BAS[supervised_BAS]
        head_VH = run.head_VH
        if run.candidates is not None:
            drawn = run.candidates.draw(seed=step)
            head_VH, label_R = drawn.head_VH, drawn.index_of[label_R]
        weight_R = slot_weights(slot_R, run.config.objective.gamma)
        hidden_RH = hidden_BASH[supervised_BAS].to(head_VH.dtype)
        loss, correct_R = cross_entropy(hidden_RH, head_VH, label_R, weight_R)
    run.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(run.drafter.parameters(), optim.clip_norm)
    run.optimizer.step()
    slots = run.config.model.block_size
    correct = torch.zeros(slots, device=run.device).index_add_(0, slot_R, correct_R.float())
    count = torch.zeros(slots, device=run.device).index_add_(0, slot_R, torch.ones_like(correct_R, dtype=torch.float32))
    return {
        "loss": float(loss.detach()),
        "lr": lr,
        "grad_norm": float(norm),
        "slot_accuracy": [round(value, 4) for value in (correct / count.clamp_min(1))[1:].tolist()],
        "rows": len(label_R),
        "seconds": round(time.monotonic() - begin, 4),
    }


def learning_rate_factor(share: float, warmup_fraction: float) -> float:
    """Linear warm-up, then a cosine to zero, over the share of the run that is behind (0 to 1)."""
    if share < warmup_fraction:
        return max(share / warmup_fraction, 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (share - warmup_fraction) / (1 - warmup_fraction)))


def _measure(run: _Run, samples: list[Sample]) -> Simulated:
    return simulate(
        run.drafter,
        samples[:MEASURED_SAMPLES],
        run.embedding_VH,
        run.head_VH,
        max_length=run.config.data.max_length,
    )


def _identity(config: TrainConfig) -> dict[str, Any]:
    """What must not change between a checkpoint and its resumption, flat."""
    sections = config.model_dump(mode="json", exclude={"output": True, "loop": {"resume", "max_minutes"}})
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


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
    """Collects the first SIGTERM or SIGINT in the yielded list; a second one acts as it did before."""
    received: list[int] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for each, handler in previous.items():
            signal.signal(each, handler)

    for number in previous:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
