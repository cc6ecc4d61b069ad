"""Gives back what a dump holds: requests with their token ids and every row, or an error that names what is missing.

Opens a directory that is still being written. Damage is reported, never skipped in silence: requests whose rows are all
whole load, others raise. The index keeps one entry a row in memory; payloads are read from disk when a sample is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sglang_dflash.dump.record import UNKNOWN_HASH, DamagedError, DumpError, Kind, Record, prefix_hashes
from sglang_dflash.dump.store import Manifest, open_segment, read_manifest, read_record, scan, segments


def _torch_dtype(manifest: Manifest) -> torch.dtype:
    dtype = getattr(torch, manifest.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise DumpError(f"The manifest's dtype {manifest.dtype!r} is not one of torch's.")
    return dtype


class MissingRowsError(DumpError):
    """A request has positions for which the dump holds no row."""


@dataclass(frozen=True)
class SampleRef:
    """A request found in a dump: its id, how many rows lead to its last one, and where generated tokens begin."""

    rid: str
    length: int
    prompt_len: int
    record: int


@dataclass(frozen=True)
class Sample:
    """A request's rows, from position 0 on.

    Attributes:
        token_ids: int64 ``[T]``, the engine's own.
        hidden: ``[T, taps * hidden_size]`` in the stored dtype; row i is what the taps put out at position i.
        prompt_len: positions below it were given, the others generated; T where nothing was generated.
    """

    rid: str
    token_ids: torch.Tensor
    hidden: torch.Tensor
    prompt_len: int


@dataclass(frozen=True)
class _Place:
    """A record without its payload."""

    path: Path
    offset: int
    kind: Kind
    rid: str
    start: int
    parent: bytes
    token_ids: np.ndarray

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class VerifyReport:
    """What ``verify`` found; ``problems`` has one line for each damaged segment or incomplete request."""

    segments: int
    records: int
    rows: int
    samples: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


class DumpReader:
    """Reads a dump directory as it is when opened.

    Attributes:
        manifest: what the rows are.
        damage: one line per segment that could not be read to its end.

    Raises:
        DumpError: the directory is not a dump.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest: Manifest = read_manifest(self.path)
        self.damage: list[str] = []
        self._dtype: torch.dtype = _torch_dtype(self.manifest)
        self._row_features = len(self.manifest.layer_ids) * self.manifest.hidden_size
        self._places: list[_Place] = []
        self._row_of: dict[bytes, tuple[int, int]] = {}
        for segment in segments(self.path):
            self._index(segment)

    def _index(self, segment: Path) -> None:
        try:
            for offset, record in scan(segment, self.manifest.id):
                self._check_rows(record, f"{segment} at byte {offset}")
                number = len(self._places)
                self._places.append(
                    _Place(segment, offset, record.kind, record.rid, record.start, record.parent, record.token_ids)
                )
                if record.parent == UNKNOWN_HASH:
                    continue
                for row, digest in enumerate(prefix_hashes(record.parent, record.token_ids)):
                    self._row_of.setdefault(digest, (number, row))
        except DumpError as error:
            # The writer's unfinished tail is not damage.
            if segment.suffix == ".seg":
                self.damage.append(f"{segment.name} is unreadable from there on: {error}")

    def _check_rows(self, record: Record, where: str) -> None:
        if len(record.payload) != record.num_rows * self._row_features * self._dtype.itemsize:
            raise DamagedError(
                f"{where}: {len(record.payload)} bytes for {record.num_rows} rows; the manifest's are {self._row_features} "
                f"features of {self.manifest.dtype} each."
            )

    @property
    def num_rows(self) -> int:
        return sum(len(place.token_ids) for place in self._places)

    def samples(self) -> list[SampleRef]:
        """Every request in the dump, by id; whether all of its rows are there is found out by ``load``."""
        furthest: dict[str, int] = {}
        generated_from: dict[str, int] = {}
        for number, place in enumerate(self._places):
            if place.rid not in furthest or place.end >= self._places[furthest[place.rid]].end:
                furthest[place.rid] = number
            if place.kind == Kind.DECODE:
                generated_from[place.rid] = min(place.start, generated_from.get(place.rid, place.start))
        return [
            SampleRef(
                rid=rid,
                length=self._places[number].end,
                prompt_len=generated_from.get(rid, self._places[number].end),
                record=number,
            )
            for rid, number in sorted(furthest.items())
        ]

    def load(self, ref: SampleRef) -> Sample:
        """The rows of one request.

        Raises:
            MissingRowsError: names the request, the positions and the reason.
            DumpError: a record that it needs is damaged.
        """
        pieces = self._walk(ref)
        tokens = [self._places[number].token_ids[:count] for number, count in pieces]
        rows = [self._payload(self._places[number])[:count] for number, count in pieces]
        return Sample(
            rid=ref.rid,
            token_ids=torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
            hidden=torch.cat(rows),
            prompt_len=ref.prompt_len,
        )

    def _walk(self, ref: SampleRef) -> list[tuple[int, int]]:
        """(record, rows of it) from position 0 to the request's last row."""
        number, count = ref.record, len(self._places[ref.record].token_ids)
        pieces = [(number, count)]
        while (parent := self._places[number].parent) != self.manifest.id:
            start = self._places[number].start
            if parent == UNKNOWN_HASH:
                raise MissingRowsError(
                    f"Request {ref.rid}: positions 0 to {start - 1} were in the engine's cache before the dump began, so "
                    "their rows are not in it. Flush the server's cache and send the request again."
                )
            if parent not in self._row_of:
                because = f" ({'; '.join(self.damage)})" if self.damage else ""
                raise MissingRowsError(
                    f"Request {ref.rid}: no record holds position {start - 1}, so positions 0 to {start - 1} are missing"
                    f"{because}. Send the request again."
                )
            number, row = self._row_of[parent]
            self._check_position(ref, self._places[number].start + row + 1, start)
            pieces.append((number, row + 1))
        self._check_position(ref, 0, self._places[number].start)
        return pieces[::-1]

    @staticmethod
    def _check_position(ref: SampleRef, after_parent: int, start: int) -> None:
        if after_parent != start:
            raise DamagedError(
                f"Request {ref.rid}: a record claims to start at position {start}; by its prefix hash that is {after_parent}."
            )

    def _payload(self, place: _Place) -> torch.Tensor:
        with open_segment(place.path) as file:
            record = read_record(file, place.offset, str(place.path))
        if record is None:
            raise DamagedError(f"{place.path} at byte {place.offset}: the record is gone.")
        flat = torch.frombuffer(bytearray(record.payload), dtype=self._dtype)
        return flat.view(record.num_rows, self._row_features)

    def verify(self) -> VerifyReport:
        """Load every request, which re-reads and checks every checksum on its way."""
        problems = list(self.damage)
        refs = self.samples()
        for ref in refs:
            try:
                self.load(ref)
            except DumpError as error:
                problems.append(str(error))
        return VerifyReport(len(segments(self.path)), len(self._places), self.num_rows, len(refs), tuple(problems))
