from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.dump.record import (
    HEADER_BYTES,
    MAX_ROW_BYTES,
    MAX_ROWS,
    SEGMENT_HEADER_BYTES,
    UNKNOWN_HASH,
    AbsurdSizeError,
    DamagedError,
    DumpError,
    Kind,
    ManifestMismatchError,
    Record,
    TruncatedError,
    body_bytes,
    check_segment_header,
    decode,
    encode,
    prefix_hashes,
    segment_header,
)
from sglang_dflash.dump.store import Manifest

MakeRecord = Callable[..., Record]
ID = bytes(range(16))


def header(
    *, magic: bytes = b"DFR1", kind: int = 0, rid_bytes: int = 1, rows: int = 1, row_bytes: int = 16, crc: int = 0
) -> bytes:
    """A record header with a right checksum, whatever it says."""
    fixed = struct.pack("<4sBBHIII16sI", magic, kind, 1, rid_bytes, 0, rows, row_bytes, ID, crc)
    return fixed + struct.pack("<I", zlib.crc32(fixed))


def test_golden_record(make_record: MakeRecord) -> None:
    data = encode(make_record("ab", 3, [7, 100], ID, Kind.DECODE))
    assert HEADER_BYTES == 44
    fixed = "44465231" + "01" + "01" + "0200" + "03000000" + "02000000" + "10000000" + ID.hex()
    body = "6162" + "07000000" + "64000000" + "0000f040" * 4 + "0000c942" * 4
    fixed += struct.pack("<I", zlib.crc32(bytes.fromhex(body))).hex()
    assert data.hex() == fixed + struct.pack("<I", zlib.crc32(bytes.fromhex(fixed))).hex() + body


def test_golden_segment_header_and_hashes() -> None:
    assert segment_header(ID).hex() == "444644554d503031" + ID.hex()
    assert SEGMENT_HEADER_BYTES == 24
    first, second = prefix_hashes(ID, np.array([7, -1]))
    assert first == xxhash.xxh3_128_digest(ID + bytes.fromhex("07000000"))
    assert second == xxhash.xxh3_128_digest(first + bytes.fromhex("ffffffff"))


def test_an_unknown_parent_is_flagged(make_record: MakeRecord) -> None:
    data = encode(make_record("r", 3, [7], UNKNOWN_HASH))
    assert (data[5], data[20:36]) == (0, bytes(16))
    assert decode(data[:HEADER_BYTES], data[HEADER_BYTES:], "here").parent == UNKNOWN_HASH


@settings(max_examples=100, deadline=None)
@given(
    rid=st.text(max_size=30),
    start=st.integers(0, 2**32 - 1),
    tokens=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=9),
    row_bytes=st.integers(1, 20),
    kind=st.sampled_from(Kind),
)
def test_round_trip(rid: str, start: int, tokens: list[int], row_bytes: int, kind: Kind) -> None:
    payload = bytes(i % 251 for i in range(row_bytes * len(tokens)))
    data = encode(Record(kind, rid, start, ID, np.array(tokens, dtype="<i4"), payload))
    assert body_bytes(data[:HEADER_BYTES], "here") == len(data) - HEADER_BYTES
    back = decode(data[:HEADER_BYTES], data[HEADER_BYTES:], "here")
    assert (back.kind, back.rid, back.start, back.parent, back.payload) == (kind, rid, start, ID, payload)
    assert back.token_ids.tolist() == tokens and back.num_rows == len(tokens)


def test_every_truncation_is_told_apart(make_record: MakeRecord) -> None:
    data = encode(make_record("abc", 0, [1, 2]))
    for end in range(HEADER_BYTES):
        with pytest.raises(TruncatedError, match=f"{end} of a record header's 44 bytes"):
            body_bytes(data[:end], "here")
    for end in range(HEADER_BYTES, len(data)):
        with pytest.raises(TruncatedError, match=f"here: {end - HEADER_BYTES} of a record body's"):
            decode(data[:HEADER_BYTES], data[HEADER_BYTES:end], "here")


def test_every_flipped_bit_is_damage(make_record: MakeRecord) -> None:
    data = encode(make_record("abc", 0, [1, 2]))
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError):
            decode(bytes(flipped[:HEADER_BYTES]), bytes(flipped[HEADER_BYTES:]), "here")


def test_bytes_behind_a_body_are_damage(make_record: MakeRecord) -> None:
    data = encode(make_record("abc", 0, [1, 2]))
    with pytest.raises(DamagedError):
        decode(data[:HEADER_BYTES], data[HEADER_BYTES:] + b"x", "here")


def test_another_magic_is_named() -> None:
    with pytest.raises(DamagedError, match=r"no record starts here \(magic b'GGUF', expected b'DFR1'\)"):
        body_bytes(header(magic=b"GGUF"), "here")


@pytest.mark.parametrize(
    "sizes",
    [
        {"kind": 2},
        {"kind": 255},
        {"rows": 0},
        {"rows": MAX_ROWS + 1},
        {"rows": 2**32 - 1},
        {"row_bytes": 0},
        {"row_bytes": MAX_ROW_BYTES + 1},
        {"row_bytes": 2**32 - 1},
    ],
)
def test_sizes_that_no_writer_makes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(AbsurdSizeError, match="allowed are kinds 0 and 1, 1 to 1048576 rows"):
        body_bytes(header(**sizes), "here")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=120))
def test_noise_is_a_dump_error(data: bytes) -> None:
    with pytest.raises(DumpError):
        body_bytes(data, "here")
    with pytest.raises(DumpError):
        body_bytes(b"DFR1" + data, "here")


def test_every_damage_of_a_segment_header_has_its_error(manifest: Manifest) -> None:
    good = segment_header(manifest.id)
    check_segment_header(good, manifest.id, "here")
    for end in range(len(good)):
        with pytest.raises(TruncatedError):
            check_segment_header(good[:end], manifest.id, "here")
    for bit in range(8 * len(good)):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError if bit < 64 else ManifestMismatchError):
            check_segment_header(bytes(flipped), manifest.id, "here")
