"""Requests of a dump as training batches: padded rows, anchors, labels.

Anchors are drawn anew every step by a generator seeded with the step, so a resumed run draws what an uninterrupted one would.
An anchor is a generated token whose successor is known: when serving, the anchor is always the last token that the target
chose. Labels past the end of a request are ignored.

Shapes: B samples, T positions, F = taps x hidden, A anchors, S block size.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

IGNORE = -100


class Sample(Protocol):
    """One request of a dump (see ``sglang_dflash.dump.reader.Sample``)."""

    rid: str
    token_ids: torch.Tensor
    hidden: torch.Tensor
    prompt_len: int


class Reader(Protocol):
    """What training needs of a dump reader."""

    manifest: Any

    def samples(self) -> Sequence[Any]: ...

    def load(self, ref: Any) -> Any: ...


class DataError(ValueError):
    """The dump does not hold what the run needs."""


@dataclass(frozen=True)
class Batch:
    """One optimiser step's rows.

    Attributes:
        label_BAS: int64, the token at anchor + slot; ``IGNORE`` at slot 0, past the end, and for padding anchors.
    """

    taps_BTF: torch.Tensor
    token_BT: torch.Tensor
    anchor_BA: torch.Tensor
    label_BAS: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def load_samples(reader: Reader, *, max_length: int, max_missing_fraction: float) -> list[Sample]:
    """Every request with at least one anchor.

    Raises:
        DataError: there is none, or more than ``max_missing_fraction`` of the requests miss rows; names them.
    """
    refs = reader.samples()
    samples: list[Sample] = []
    missing: list[str] = []
    for ref in refs:
        try:
            sample = reader.load(ref)
        except ValueError as error:
            missing.append(str(error))
            continue
        if _num_anchors(sample, max_length) > 0:
            samples.append(sample)
    if len(missing) > max_missing_fraction * len(refs):
        raise DataError(
            f"{len(missing)} of {len(refs)} requests in the dump miss rows; data.max_missing_fraction allows "
            f"{max_missing_fraction:g} of them. The first: {missing[0]}"
        )
    if missing:
        logger.warning(
            "%s of %s requests miss rows and are left out. The first: %s", len(missing), len(refs), missing[0]
        )
    if not samples:
        raise DataError("The dump has no request with two generated tokens; nothing can be learnt from it.")
    return samples


def split(samples: list[Sample], holdout_fraction: float) -> tuple[list[Sample], list[Sample]]:
    """(training, held out), by a hash of the request id, so that a request stays on its side when the dump grows."""
    held = [s for s in samples if zlib.crc32(s.rid.encode()) / 2**32 < holdout_fraction]
    training = [s for s in samples if zlib.crc32(s.rid.encode()) / 2**32 >= holdout_fraction]
    return (training, held) if training else (held, [])


def _anchor_range(sample: Sample, max_length: int) -> tuple[int, int]:
    return sample.prompt_len, min(len(sample.token_ids), max_length) - 1


def _num_anchors(sample: Sample, max_length: int) -> int:
    first, stop = _anchor_range(sample, max_length)
    return max(0, stop - first)


def batches(
    samples: list[Sample],
    *,
    samples_per_batch: int,
    anchors_per_sample: int,
    block_size: int,
    max_length: int,
    seed: int,
    first_step: int = 0,
) -> Iterator[Batch]:
    """Batches without end, epoch after epoch, from ``first_step`` on. The order and the anchors depend on seed and step alone.

    Samples of similar length are put together, so that little is padded.
    """
    per_epoch = steps_per_epoch(len(samples), samples_per_batch)
    step = first_step
    while True:
        epoch = step // per_epoch
        groups = _groups(samples, samples_per_batch, seed=seed + epoch)
        for group in groups[step % per_epoch :]:
            generator = torch.Generator().manual_seed(hash((seed, step)) % 2**63)
            yield make_batch(group, anchors_per_sample, block_size, max_length, generator)
            step += 1


def steps_per_epoch(num_samples: int, samples_per_batch: int) -> int:
    return -(-num_samples // samples_per_batch)


def _groups(samples: list[Sample], size: int, *, seed: int) -> list[list[Sample]]:
    generator = torch.Generator().manual_seed(seed)
    shuffled = [samples[i] for i in torch.randperm(len(samples), generator=generator).tolist()]
    by_length = sorted(shuffled, key=lambda sample: len(sample.token_ids))
    groups = [by_length[i : i + size] for i in range(0, len(by_length), size)]
    return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]


def make_batch(
    samples: list[Sample],
    anchors_per_sample: int,
    block_size: int,
    max_length: int,
    generator: torch.Generator | None = None,
) -> Batch:
    """Pad samples and draw anchors without replacement; without a generator every anchor is taken, in order."""
    length = min(max(len(sample.token_ids) for sample in samples), max_length)
    counts = [min(_num_anchors(sample, max_length), anchors_per_sample) for sample in samples]
    features = samples[0].hidden.shape[1]
    taps_BTF = torch.zeros((len(samples), length, features), dtype=samples[0].hidden.dtype)
    token_BT = torch.zeros((len(samples), length), dtype=torch.int64)
    anchor_BA = torch.zeros((len(samples), max(counts)), dtype=torch.int64)
    label_BAS = torch.full((len(samples), max(counts), block_size), IGNORE, dtype=torch.int64)
    for index, (sample, count) in enumerate(zip(samples, counts, strict=True)):
        rows = min(len(sample.token_ids), length)
        taps_BTF[index, :rows] = sample.hidden[:rows]
        token_BT[index, :rows] = sample.token_ids[:rows]
        first, stop = _anchor_range(sample, max_length)
        order = torch.arange(stop - first) if generator is None else torch.randperm(stop - first, generator=generator)
        anchor_A = order[:count] + first
        anchor_BA[index, :count] = anchor_A
        position_AS = anchor_A[:, None] + torch.arange(block_size)
        known_AS = (position_AS < rows) & (torch.arange(block_size) > 0)
        token_AS = token_BT[index, position_AS.clamp_max(rows - 1)]
        label_BAS[index, :count] = torch.where(known_AS, token_AS, IGNORE)
    return Batch(taps_BTF, token_BT, anchor_BA, label_BAS)
