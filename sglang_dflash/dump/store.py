"""A dump directory: its manifest, its lock, and the segments that a writer appends to.

One process writes at a time. A record is visible to readers once it is in the file and verifies; a segment is sealed by
flush, fsync and rename, so that a kill at any moment leaves sealed segments whole and at most a torn tail in one ``.open``
file, which the next writer cuts.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import xxhash

from sglang_dflash.dump.record import (
    FORMAT_VERSION,
    HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    AbsurdSizeError,
    DamagedError,
    DumpError,
    ManifestMismatchError,
    Record,
    TruncatedError,
    body_bytes,
    check_segment_header,
    decode,
    encode,
    segment_header,
)
from sglang_dflash.files import sync, write_text

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LAYER_ID_CONVENTION = "0-based layer whose output is tapped"
CAPTURE_POINT = "residual stream leaving the layer, before the next norm"


@dataclass(frozen=True)
class Manifest:
    """What the rows of a dump are. Two dumps with equal manifests are interchangeable.

    Attributes:
        architecture: class name of the target.
        config_hash: XXH3-128 of the target's config as sorted JSON; paths are left out, so that a dump can be moved.
        layer_ids: tapped layers, ascending, in ``layer_id_convention``.
        hidden_size: features of one tap.
        dtype: torch dtype name of the stored taps.
        kv_cache_dtype: dtype name of the KV cache that attention read.
    """

    architecture: str
    config_hash: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    layer_ids: tuple[int, ...]
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    sglang_version: str
    layer_id_convention: str = LAYER_ID_CONVENTION
    capture_point: str = CAPTURE_POINT
    format: int = FORMAT_VERSION

    @cached_property
    def id(self) -> bytes:
        """16 bytes that stand for the manifest in every segment and prefix hash."""
        return xxhash.xxh3_128_digest(_canonical(self._as_dict()))

    def _as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "layer_ids": list(self.layer_ids)}

    def to_json(self) -> str:
        return json.dumps({"id": self.id.hex(), **self._as_dict()}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Manifest:
        """Parse a manifest file's content.

        Raises:
            DumpError: not JSON, unknown or missing keys, another format version, or an id that does not match.
        """
        try:
            data = json.loads(text)
            claimed = data.pop("id")
            data["layer_ids"] = tuple(data["layer_ids"])
            manifest = cls(**data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DumpError(f"{where} is not a dump manifest of format {FORMAT_VERSION}: {error}") from error
        if manifest.format != FORMAT_VERSION:
            raise DumpError(f"{where} has format {manifest.format}; this version reads {FORMAT_VERSION}.")
        if manifest.id.hex() != claimed:
            raise DumpError(f"{where} was changed after it was written: its id does not match its content.")
        return manifest


def _canonical(data: dict[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a dump directory.

    Raises:
        DumpError: there is none, or it is not one.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise DumpError(f"{directory} is not a dump: it has no {MANIFEST}.")
    return Manifest.from_json(path.read_bytes(), str(path))


def segments(directory: Path) -> list[Path]:
    """Segment files, sealed and open, in the order in which they were begun."""
    # Open ones first: one that is sealed in between is listed under both names, not under none.
    found = {path.stem: path for suffix in ("open", "seg") for path in directory.glob(f"segment-*.{suffix}")}
    return [found[stem] for stem in sorted(found)]


def open_segment(path: Path) -> IO[bytes]:
    """Open a listed segment for reading, also when it has been sealed since it was listed."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        return path.with_suffix(".seg").open("rb")


def scan(path: Path, manifest_id: bytes) -> Iterator[tuple[int, Record]]:
    """Yield (offset, record) of one segment until its end.

    Raises:
        DumpError: at the first byte that is not a whole, undamaged record.
    """
    with open_segment(path) as file:
        check_segment_header(file.read(SEGMENT_HEADER_BYTES), manifest_id, str(path))
        offset = SEGMENT_HEADER_BYTES
        while record := read_record(file, offset, str(path)):
            yield offset, record
            offset = file.tell()


def read_record(file: IO[bytes], offset: int, where: str) -> Record | None:
    """The record at a byte of an open segment; None at its end. No more is read than the file has.

    Raises:
        DumpError: there is no whole, undamaged record.
    """
    where = f"{where} at byte {offset}"
    file.seek(offset)
    if not (header := file.read(HEADER_BYTES)):
        return None
    size = body_bytes(header, where)
    there = os.fstat(file.fileno()).st_size - file.tell()
    if size > there:
        raise TruncatedError(f"{where}: {there} of a record body's {size} bytes.")
    return decode(header, file.read(size), where)


class DirectoryLock:
    """An exclusive lock on a dump directory, freed by the system when its process ends."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = (directory / "lock").open("a")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise DumpError(
                f"{directory} is being written by another process; stop it, or give this one another directory."
            ) from error

    def release(self) -> None:
        self._file.close()


class SegmentWriter:
    """Appends records to a dump directory, continuing one that exists.

    Raises:
        ManifestMismatchError: the directory holds rows of something else; the message names each field that differs.
        DumpError: the directory is locked or its manifest unreadable.
    """

    def __init__(self, directory: Path, manifest: Manifest, *, segment_bytes: int) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._lock = DirectoryLock(directory)
        self._file: IO[bytes] | None = None
        try:
            self._adopt_manifest(manifest)
            self._manifest_id = manifest.id
            for path in directory.glob("segment-*.open"):
                recover(path, self._manifest_id)
        except BaseException:
            self._lock.release()
            raise

    def _adopt_manifest(self, manifest: Manifest) -> None:
        path = self._directory / MANIFEST
        if not path.exists():
            write_text(path, manifest.to_json())
            return
        existing = read_manifest(self._directory)
        differing = [
            f"{f.name}: {getattr(existing, f.name)!r} there, {getattr(manifest, f.name)!r} here"
            for f in fields(Manifest)
            if getattr(existing, f.name) != getattr(manifest, f.name)
        ]
        if differing:
            raise ManifestMismatchError(
                f"{self._directory} holds a dump of something else ({'; '.join(differing)}). Give another directory."
            )

    def append(self, record: Record) -> None:
        """Write one record; it is in the file when this returns (not yet on stable storage)."""
        if self._file is None:
            self._file = self._open_next()
        self._file.write(encode(record))
        self._file.flush()
        if self._file.tell() >= self._segment_bytes:
            self.seal()

    def _open_next(self) -> IO[bytes]:
        numbers = [int(path.stem.removeprefix("segment-")) for path in segments(self._directory)]
        path = self._directory / f"segment-{max(numbers, default=-1) + 1:06d}.open"
        file = path.open("xb")
        file.write(segment_header(self._manifest_id))
        return file

    def seal(self) -> None:
        """Close the current segment for good, on stable storage."""
        if self._file is None:
            return
        file, self._file = self._file, None
        file.flush()
        os.fsync(file.fileno())
        file.close()
        _rename_sealed(Path(file.name))

    def close(self) -> None:
        try:
            self.seal()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def recover(path: Path, manifest_id: bytes) -> None:
    """Seal an ``.open`` segment that a killed writer left: its whole records stay, a torn one at the end is cut.

    Damage is not cut, since no kill leaves it and whole records may follow it: the segment is sealed as it is, and readers
    name the damage.
    """
    end = SEGMENT_HEADER_BYTES
    kept = 0
    try:
        for offset, record in scan(path, manifest_id):
            end = offset + len(encode(record))
            kept += 1
    except TruncatedError as error:
        logger.warning("Recovering %s: %s Keeping the %s records before it.", path, error, kept)
    except (DamagedError, AbsurdSizeError) as error:
        logger.error("Sealing %s as it is, with damage after %s whole records: %s", path, kept, error)
        _rename_sealed(path)
        return
    if kept == 0:
        path.unlink()
        return
    with path.open("r+b") as file:
        file.truncate(end)
        os.fsync(file.fileno())
    _rename_sealed(path)


def _rename_sealed(path: Path) -> None:
    path.rename(path.with_suffix(".seg"))
    sync(path.parent)
