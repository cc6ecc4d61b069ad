"""Bytes of records and segments: golden values, hostile files, recovery after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sglang_dflash.dump.reader import DumpReader, MissingRowsError
from sglang_dflash.dump.record import (
    HEADER_BYTES,
    UNKNOWN_HASH,
    AbsurdSizeError,
    DamagedError,
    DumpError,
    Kind,
    ManifestMismatchError,
    TruncatedError,
    body_bytes,
    decode,
    encode,
    prefix_hashes,
    segment_header,
)
from sglang_dflash.dump.store import Manifest, SegmentWriter, scan, segments

from .conftest import TOY as MANIFEST
from .conftest import toy_record as record


def test_golden_bytes() -> None:
    data = encode(record("r", 3, bytes(range(16)), [7]))
    assert data[:HEADER_BYTES].hex() == (
        "4446523100010100030000000100000010000000000102030405060708090a0b0c0d0e0f4fbb07592ce45888"
    )
    assert data[HEADER_BYTES:].hex() == "7207000000" + "0000f040" * 4


def test_round_trip() -> None:
    original = record("über", 5, UNKNOWN_HASH, [1, 2, 3], Kind.DECODE)
    data = encode(original)
    back = decode(data[:HEADER_BYTES], data[HEADER_BYTES:], "here")
    assert (back.kind, back.rid, back.start, back.parent) == (Kind.DECODE, "über", 5, UNKNOWN_HASH)
    assert back.token_ids.tolist() == [1, 2, 3]
    assert back.payload == original.payload


def test_every_truncation_and_every_flipped_bit_is_an_error() -> None:
    data = encode(record("abc", 0, MANIFEST.id, [1, 2]))
    for end in range(len(data)):
        with pytest.raises(TruncatedError):
            decode(data[:HEADER_BYTES], data[HEADER_BYTES:end], "here") if end >= HEADER_BYTES else body_bytes(
                data[:end], "here"
            )
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DumpError):
            decode(bytes(flipped[:HEADER_BYTES]), bytes(flipped[HEADER_BYTES:]), "here")


def test_absurd_sizes_are_refused_before_anything_is_read() -> None:
    import struct
    import zlib

    fixed = struct.pack("<4sBBHIII16sI", b"DFR1", 0, 1, 1, 0, 1 << 31, 1 << 31, bytes(16), 0)
    with pytest.raises(AbsurdSizeError, match="allowed are"):
        body_bytes(fixed + struct.pack("<I", zlib.crc32(fixed)), "here")


def test_segments_roll_and_continue(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, MANIFEST, segment_bytes=100) as writer:
        for number in range(5):
            writer.append(record(f"r{number}", 0, MANIFEST.id, [number]))
    names = [path.name for path in segments(tmp_path)]
    assert len(names) > 1
    assert all(name.endswith(".seg") for name in names)
    with SegmentWriter(tmp_path, MANIFEST, segment_bytes=100) as writer:
        writer.append(record("r5", 0, MANIFEST.id, [5]))
    reader = DumpReader(tmp_path)
    assert [ref.rid for ref in reader.samples()] == [f"r{number}" for number in range(6)]
    assert reader.load(reader.samples()[5]).hidden.tolist() == [[5.5] * 4]


def test_another_manifest_is_refused_by_name(tmp_path: Path) -> None:
    SegmentWriter(tmp_path, MANIFEST, segment_bytes=100).close()
    other = Manifest("Toy", "00", 100, 4, 2, (0, 2), "float32", None, "float32", "0.5.23")
    with pytest.raises(ManifestMismatchError, match=r"layer_ids: \(0, 1\) there, \(0, 2\) here"):
        SegmentWriter(tmp_path, other, segment_bytes=100)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with (
        SegmentWriter(tmp_path, MANIFEST, segment_bytes=100),
        pytest.raises(DumpError, match="being written by another process"),
    ):
        SegmentWriter(tmp_path, MANIFEST, segment_bytes=100)


def test_damage_in_a_sealed_segment_is_reported(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, MANIFEST, segment_bytes=1 << 20) as writer:
        writer.append(record("whole", 0, MANIFEST.id, [1]))
        writer.append(record("broken", 0, MANIFEST.id, [2]))
    (segment,) = segments(tmp_path)
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    reader = DumpReader(tmp_path)
    assert [ref.rid for ref in reader.samples()] == ["whole"]
    assert not reader.verify().ok
    with pytest.raises(DamagedError):
        list(scan(segment, MANIFEST.id))


def test_missing_rows_are_named(tmp_path: Path) -> None:
    first, *_ = prefix_hashes(MANIFEST.id, np.array([1]))
    with SegmentWriter(tmp_path, MANIFEST, segment_bytes=1 << 20) as writer:
        writer.append(record("orphan", 1, first, [2]))
        writer.append(record("cached", 4, UNKNOWN_HASH, [3]))
    reader = DumpReader(tmp_path)
    by_rid = {ref.rid: ref for ref in reader.samples()}
    with pytest.raises(MissingRowsError, match="Request orphan: no record holds position 0"):
        reader.load(by_rid["orphan"])
    with pytest.raises(MissingRowsError, match="Request cached: positions 0 to 3"):
        reader.load(by_rid["cached"])


def test_a_shared_prefix_is_found_in_another_request(tmp_path: Path) -> None:
    hashes = list(prefix_hashes(MANIFEST.id, np.array([1, 2, 3])))
    with SegmentWriter(tmp_path, MANIFEST, segment_bytes=1 << 20) as writer:
        writer.append(record("a", 0, MANIFEST.id, [1, 2, 3]))
        writer.append(record("b", 2, hashes[1], [9]))
        writer.append(record("b", 3, next(prefix_hashes(hashes[1], np.array([9]))), [8], Kind.DECODE))
    reader = DumpReader(tmp_path)
    sample = reader.load({ref.rid: ref for ref in reader.samples()}["b"])
    assert sample.token_ids.tolist() == [1, 2, 9, 8]
    assert sample.hidden[:, 0].tolist() == [1.5, 2.5, 9.5, 8.5]
    assert sample.prompt_len == 3


CHILD = """
import sys
from pathlib import Path
from tests.unit.dump.conftest import TOY as MANIFEST, toy_record as record
from sglang_dflash.dump.store import SegmentWriter
with SegmentWriter(Path(sys.argv[1]), MANIFEST, segment_bytes=4000) as writer:
    number = 0
    while True:
        writer.append(record(f"{sys.argv[2]}-{number}", 0, MANIFEST.id, list(range(number % 50 + 1))))
        number += 1
        print(number, flush=True)
"""


def test_sigkill_leaves_a_directory_that_opens_and_continues(tmp_path: Path) -> None:
    written = 0
    for attempt in range(5):
        command = [sys.executable, "-c", CHILD, str(tmp_path), str(attempt)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(0.03 * attempt)
            os.kill(child.pid, signal.SIGKILL)
            written += 1 + len(child.stdout.read().splitlines())
        report = DumpReader(tmp_path).verify()
        assert report.ok, report.problems
        assert report.samples >= written
    whole = encode(record("whole", 0, MANIFEST.id, [1]))
    (tmp_path / "segment-999999.open").write_bytes(segment_header(MANIFEST.id) + whole + whole[:-3])
    SegmentWriter(tmp_path, MANIFEST, segment_bytes=4000).close()
    assert not list(tmp_path.glob("*.open"))
    report = DumpReader(tmp_path).verify()
    assert report.ok
    assert report.samples >= written + 1
