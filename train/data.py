"""Requests of a dump as training batches: padded rows, anchors, labels.

An anchor is a generated token whose successor is known, at position P from ``prompt_len`` to the request's last row but one.
When serving, the anchor is always the last token that the target chose, so the last prompt token (P = prompt_len - 1) never is
one, and the first generated token (P = prompt_len) always is. Slot j of its block is labelled with the token at P + j; labels
past the end of a request are left out.

Order and anchors are drawn anew every epoch, from the seed and the step alone, so that a resumed run draws what an uninterrupted
one would. All requests are held in memory: a dump larger than that has to be trained on in parts.

Shapes: B samples, T positions, F = taps x hidden, A anchors, S block size, R labelled block rows.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from sglang_dflash.dump.record import DumpError

logger = logging.getLogger(__name__)

# Batches are made of requests of similar length, for little padding; this share of noise gives other neighbours every epoch.
LENGTH_NOISE = 0.25
NAMED_IN_ERROR = 5
SCALE_SAMPLES = 512


class Sample(Protocol):
    """One request of a dump (see ``sglang_dflash.dump.reader.Sample``)."""

    @property
    def rid(self) -> str: ...

    @property
    def token_ids(self) -> torch.Tensor: ...

    @property
    def hidden(self) -> torch.Tensor: ...

    @property
    def prompt_len(self) -> int: ...


class Reader(Protocol):
    """What training needs of a dump reader: ``load`` raises DumpError for a request whose rows are not all there."""

    @property
    def manifest(self) -> Any: ...

    def samples(self) -> Sequence[Any]: ...

    def load(self, ref: Any) -> Sample: ...


class DataError(ValueError):
    """The dump does not hold what the run needs."""


@dataclass(frozen=True)
class Batch:
    """One optimiser step's rows.

    Attributes:
        taps_BTF: packed taps, zeros past a request's end.
        anchor_BA: int64 positions of the anchors; 0 for padding, none of whose rows is labelled.
        token_BA: int64, the anchors' tokens.
        row_R: int64, which of the B * A * S block rows have a label, ascending.
        label_R: int64, their labels.
    """

    taps_BTF: torch.Tensor
    anchor_BA: torch.Tensor
    token_BA: torch.Tensor
    row_R: torch.Tensor
    label_R: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))


def load_samples(
    reader: Reader, *, max_length: int, max_missing_fraction: float
) -> tuple[list[Sample], tuple[str, ...]]:
    """(every request with at least one anchor, ids of the requests whose rows are not all there).

    Raises:
        DataError: there is no request to learn from, or more than ``max_missing_fraction`` of them miss rows; names them.
    """
    refs = reader.samples()
    samples: list[Sample] = []
    missing: dict[str, str] = {}
    for ref in refs:
        try:
            sample = reader.load(ref)
        except DumpError as error:
            missing[ref.rid] = str(error)
            logger.warning("Left out of training: %s", error)
            continue
        if num_anchors(sample, max_length) > 0:
            samples.append(sample)
    if len(missing) > max_missing_fraction * len(refs):
        named = list(missing.values())[:NAMED_IN_ERROR]
        more = f"\n  and {len(missing) - len(named)} more" if len(missing) > len(named) else ""
        raise DataError(
            f"{len(missing)} of {len(refs)} requests in the dump miss rows, and data.max_missing_fraction allows "
            f"{max_missing_fraction:g} of them. Dump them again, or allow more.\n  " + "\n  ".join(named) + more
        )
    if not samples:
        raise DataError(
            f"None of the dump's {len(refs)} requests has two generated tokens within data.max_length {max_length} rows; "
            "there is nothing to learn from."
        )
    return samples, tuple(missing)


def split(samples: list[Sample], holdout_fraction: float) -> tuple[list[Sample], list[Sample]]:
    """(training, held out), by a hash of the request id, so that a request stays on its side when the dump grows."""
    held = [s for s in samples if zlib.crc32(s.rid.encode()) / 2**32 < holdout_fraction]
    training = [s for s in samples if zlib.crc32(s.rid.encode()) / 2**32 >= holdout_fraction]
    return (training, held) if training else (held, [])


def fingerprint(samples: list[Sample]) -> str:
    """Stands for what a run trains on: ids, prompt lengths and tokens of the requests, in order."""
    crc = 0
    for sample in samples:
        crc = zlib.crc32(f"{sample.rid} {sample.prompt_len} ".encode(), crc)
        crc = zlib.crc32(sample.token_ids.numpy().tobytes(), crc)
    return f"{len(samples)} requests, {crc:08x}"


def tap_scale(samples: list[Sample]) -> torch.Tensor:
    """1 / root mean square of every tap feature over the rows, but each request's first, of up to ``SCALE_SAMPLES`` requests:
    fp32 ``[F]``.

    Residual streams have a few features a thousand times larger than the rest, and an attention sink at the first token that
    is larger still; unscaled, they are all that ``fc`` sees. A feature that is next to nothing is not blown up without bound.
    """
    square_F = torch.zeros(samples[0].hidden.shape[1], dtype=torch.float64)
    rows = 0
    for sample in samples[:: -(-len(samples) // SCALE_SAMPLES)]:
        square_F += sample.hidden[1:].float().square().sum(dim=0)
        rows += len(sample.hidden) - 1
    size_F = (square_F / rows).sqrt()
    return size_F.clamp_min(1e-3 * float(size_F.median()) + 1e-6).reciprocal().float()


def num_anchors(sample: Sample, max_length: int) -> int:
    """Anchors of a request within its first ``max_length`` rows."""
    return max(0, min(len(sample.token_ids), max_length) - 1 - sample.prompt_len)


def epoch_groups(
    lengths: Sequence[int], *, samples_per_batch: int, tokens_per_batch: int, seed: int, epoch: int
) -> list[list[int]]:
    """One epoch's batches as indices into ``lengths``; each index occurs once.

    Args:
        lengths: rows of each request.
        tokens_per_batch: bound on rows times requests of a batch, padding included; a longer request is a batch of its own.
    """
    generator = stream(seed, epoch, "order")
    noise = torch.rand(len(lengths), generator=generator).tolist()
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i] * (1 + LENGTH_NOISE * noise[i])):
        longest = max(longest, lengths[index])
        if not groups or len(groups[-1]) == samples_per_batch or longest * (len(groups[-1]) + 1) > tokens_per_batch:
            groups.append([])
            longest = lengths[index]
        groups[-1].append(index)
    return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]


def plan(
    samples: list[Sample], *, epochs: int, max_length: int, samples_per_batch: int, tokens_per_batch: int, seed: int
) -> list[list[int]]:
    """Every step of a run, as indices into ``samples``."""
    lengths = [min(len(sample.token_ids), max_length) for sample in samples]
    options = {"samples_per_batch": samples_per_batch, "tokens_per_batch": tokens_per_batch, "seed": seed}
    return [group for epoch in range(epochs) for group in epoch_groups(lengths, **options, epoch=epoch)]


def batches(
    samples: list[Sample],
    steps: Sequence[list[int]],
    *,
    anchors_per_sample: int,
    block_size: int,
    max_length: int,
    seed: int,
    first_step: int = 0,
) -> Iterator[Batch]:
    """The batches of a plan from ``first_step`` on."""
    for step in range(first_step, len(steps)):
        group = [samples[index] for index in steps[step]]
        yield make_batch(group, anchors_per_sample, block_size, max_length, stream(seed, step, "anchors"))


def made_ahead(made: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches; the next one is made in a thread while this one is used."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, made, None)
        while (batch := following.result()) is not None:
            following = pool.submit(next, made, None)
            yield batch


def pad_taps(samples: Sequence[Sample], max_length: int) -> torch.Tensor:
    """Packed taps ``[B, T, F]`` of each request's first ``max_length`` rows, zeros past its end."""
    length = min(max(len(sample.token_ids) for sample in samples), max_length)
    taps_BTF = torch.zeros((len(samples), length, samples[0].hidden.shape[1]), dtype=samples[0].hidden.dtype)
    for index, sample in enumerate(samples):
        rows = min(len(sample.token_ids), length)
        taps_BTF[index, :rows] = sample.hidden[:rows]
    return taps_BTF


def make_batch(
    samples: Sequence[Sample],
    anchors_per_sample: int,
    block_size: int,
    max_length: int,
    generator: torch.Generator | None = None,
) -> Batch:
    """Pad samples and draw anchors without replacement, ascending; without a generator the first ones are taken.

    Every sample must have an anchor.
    """
    counts = [min(num_anchors(sample, max_length), anchors_per_sample) for sample in samples]
    assert min(counts) > 0, "a request without an anchor; load_samples leaves them out"
    anchor_BA = torch.zeros((len(samples), max(counts)), dtype=torch.int64)
    token_BA = torch.zeros_like(anchor_BA)
    label_BAS = torch.zeros((*anchor_BA.shape, block_size), dtype=torch.int64)
    known_BAS = torch.zeros_like(label_BAS, dtype=torch.bool)
    slot_S = torch.arange(block_size)
    for index, (sample, count) in enumerate(zip(samples, counts, strict=True)):
        rows = min(len(sample.token_ids), max_length)
        choice = num_anchors(sample, max_length)
        order = torch.arange(choice) if generator is None else torch.randperm(choice, generator=generator)
        anchor_A = order[:count].sort().values + sample.prompt_len
        anchor_BA[index, :count] = anchor_A
        token_BA[index, :count] = sample.token_ids[anchor_A]
        position_AS = anchor_A[:, None] + slot_S
        known_BAS[index, :count] = (position_AS < rows) & (slot_S > 0)
        label_BAS[index, :count] = sample.token_ids[position_AS.clamp_max(rows - 1)]
    row_R = known_BAS.flatten().nonzero()[:, 0]
    return Batch(pad_taps(samples, max_length), anchor_BA, token_BA, row_R, label_BAS.flatten()[row_R])


def stream(seed: int, index: int, purpose: str) -> torch.Generator:
    """A random stream of its own for every (seed, index, purpose)."""
    # torch's CPU generator uses 32 bits of a seed.
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {index} {purpose}".encode()))
