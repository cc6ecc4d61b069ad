"""Bytes of a dump: records, segment headers and prefix hashes, as ``format.md`` specifies. No files and no threads here.

Decoding trusts nothing: every size is bounded and every checksum compared before a byte is used, and each kind of damage has
its own error.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import xxhash

FORMAT_VERSION = 1
SEGMENT_MAGIC = b"DFDUMP01"
RECORD_MAGIC = b"DFR1"
HASH_BYTES = 16
UNKNOWN_HASH = bytes(HASH_BYTES)
MAX_ROWS = 1 << 20
MAX_ROW_BYTES = 1 << 24
MAX_RID_BYTES = 1024

_FIXED = struct.Struct("<4sBBHIII16sI")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIXED.size + _CRC.size
SEGMENT_HEADER_BYTES = len(SEGMENT_MAGIC) + HASH_BYTES


class DumpError(ValueError):
    """Root of everything that can be wrong with a dump."""


class TruncatedError(DumpError):
    """The bytes end before the record does, as after a kill in mid-write."""


class DamagedError(DumpError):
    """A magic or checksum does not match: the bytes changed after they were written."""


class AbsurdSizeError(DumpError):
    """A size field is outside what a writer can produce."""


class ManifestMismatchError(DumpError):
    """The directory holds rows of another target, tap set or dtype."""


class Kind(IntEnum):
    """Which forward computed a record's rows."""

    PREFILL = 0
    DECODE = 1


@dataclass(frozen=True)
class Record:
    """A run of consecutive rows of one request.

    Attributes:
        start: position of the first row.
        parent: prefix hash of the token before it, or ``UNKNOWN_HASH``.
        token_ids: int32 ``[rows]``.
        payload: ``rows * row_bytes`` bytes.
    """

    kind: Kind
    rid: str
    start: int
    parent: bytes
    token_ids: np.ndarray
    payload: bytes

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


def prefix_hashes(parent: bytes, token_ids: np.ndarray) -> Iterator[bytes]:
    """The prefix hash after each token, given the hash before the first."""
    for token in np.asarray(token_ids, dtype="<i4"):
        parent = xxhash.xxh3_128_digest(parent + token.tobytes())
        yield parent


def segment_header(manifest_id: bytes) -> bytes:
    """The 24 bytes at the start of a segment."""
    return SEGMENT_MAGIC + manifest_id


def check_segment_header(data: bytes, manifest_id: bytes, where: str) -> None:
    """Raise unless ``data`` starts a segment of this dump.

    Raises:
        TruncatedError, DamagedError, ManifestMismatchError
    """
    if len(data) < SEGMENT_HEADER_BYTES:
        raise TruncatedError(f"{where} has {len(data)} bytes; a segment header takes {SEGMENT_HEADER_BYTES}.")
    if data[: len(SEGMENT_MAGIC)] != SEGMENT_MAGIC:
        raise DamagedError(f"{where} does not begin with {SEGMENT_MAGIC!r}; it is not a dump segment of version 1.")
    found = data[len(SEGMENT_MAGIC) : SEGMENT_HEADER_BYTES]
    if found != manifest_id:
        raise ManifestMismatchError(
            f"{where} belongs to manifest {found.hex()}, the directory's is {manifest_id.hex()}; move the segment back to "
            "the directory that it came from."
        )


def storable_rid(rid: str) -> str:
    """The request id as it is stored: itself, unless a client chose one that is too long or that UTF-8 cannot hold.

    Lone surrogates are escaped; an id of more than ``MAX_RID_BYTES`` bytes keeps its beginning and ends in its hash.
    """
    data = rid.encode(errors="backslashreplace")
    if len(data) > MAX_RID_BYTES:
        suffix = f"...{xxhash.xxh3_128_hexdigest(data)}".encode()
        data = data[: MAX_RID_BYTES - len(suffix)] + suffix
    return data.decode(errors="ignore")


def encode(record: Record) -> bytes:
    """A record's bytes."""
    rid = storable_rid(record.rid).encode()
    body = rid + record.token_ids.astype("<i4").tobytes() + record.payload
    row_bytes = len(record.payload) // record.num_rows
    fixed = _FIXED.pack(
        RECORD_MAGIC,
        record.kind,
        record.parent != UNKNOWN_HASH,
        len(rid),
        record.start,
        record.num_rows,
        row_bytes,
        record.parent,
        zlib.crc32(body),
    )
    return fixed + _CRC.pack(zlib.crc32(fixed)) + body


def body_bytes(header: bytes, where: str) -> int:
    """Bytes of the body that follows a record header.

    Raises:
        TruncatedError, DamagedError, AbsurdSizeError
    """
    if len(header) < HEADER_BYTES:
        raise TruncatedError(f"{where}: {len(header)} of a record header's {HEADER_BYTES} bytes.")
    fixed = header[: _FIXED.size]
    if fixed[:4] != RECORD_MAGIC:
        raise DamagedError(f"{where}: no record starts here (magic {fixed[:4]!r}, expected {RECORD_MAGIC!r}).")
    if _CRC.unpack_from(header, _FIXED.size)[0] != zlib.crc32(fixed):
        raise DamagedError(f"{where}: the record header's checksum does not match.")
    _, kind, _, rid_bytes, _, rows, row_bytes, _, _ = _FIXED.unpack(fixed)
    if kind not in tuple(Kind) or not 1 <= rows <= MAX_ROWS or not 1 <= row_bytes <= MAX_ROW_BYTES:
        raise AbsurdSizeError(
            f"{where}: kind {kind}, {rows} rows of {row_bytes} bytes; allowed are kinds 0 and 1, 1 to {MAX_ROWS} rows of 1 to "
            f"{MAX_ROW_BYTES} bytes."
        )
    return int(rid_bytes + rows * (4 + row_bytes))


def decode(header: bytes, body: bytes, where: str) -> Record:
    """The record of a verified header (see ``body_bytes``) and its body.

    Raises:
        TruncatedError, DamagedError
    """
    _, kind, _, rid_bytes, start, rows, _, parent, crc = _FIXED.unpack(header[: _FIXED.size])
    expected = body_bytes(header, where)
    if len(body) < expected:
        raise TruncatedError(f"{where}: {len(body)} of a record body's {expected} bytes.")
    if zlib.crc32(body) != crc:
        raise DamagedError(f"{where}: the record's checksum does not match.")
    tokens_end = rid_bytes + 4 * rows
    try:
        rid = body[:rid_bytes].decode()
    except UnicodeDecodeError as error:
        raise DamagedError(f"{where}: the request id is not UTF-8: {error}.") from error
    return Record(
        kind=Kind(kind),
        rid=rid,
        start=start,
        parent=parent,
        token_ids=np.frombuffer(body[rid_bytes:tokens_end], dtype="<i4"),
        payload=body[tokens_end:],
    )
