from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_dflash.dump.record import (
    SEGMENT_HEADER_BYTES,
    DamagedError,
    DumpError,
    ManifestMismatchError,
    Record,
    TruncatedError,
    encode,
    segment_header,
    storable_rid,
)
from sglang_dflash.dump.store import MANIFEST, Manifest, SegmentWriter, read_manifest, recover, scan, segments

MakeRecord = Callable[..., Record]
WriteDump = Callable[..., Path]


def rids(folder: Path, manifest: Manifest) -> list[str]:
    """Request ids in the order of the segments; raises at the first damage."""
    return [record.rid for path in segments(folder) for _, record in scan(path, manifest.id)]


def test_segments_roll_at_their_size(tmp_path: Path, manifest: Manifest, make_record: MakeRecord) -> None:
    size = len(encode(make_record("0", 0, [1])))
    with SegmentWriter(tmp_path, manifest, segment_bytes=SEGMENT_HEADER_BYTES + 2 * size) as writer:
        for number in range(5):
            writer.append(make_record(f"{number}", 0, [1]))
            assert rids(tmp_path, manifest)[-1] == f"{number}", "a record can be read as soon as append returns"
        names = [path.name for path in segments(tmp_path)]
        assert names == ["segment-000000.seg", "segment-000001.seg", "segment-000002.open"]
    assert [path.suffix for path in segments(tmp_path)] == [".seg"] * 3
    assert [path.stat().st_size for path in segments(tmp_path)] == [24 + 2 * size] * 2 + [24 + size]


def test_a_directory_is_continued(tmp_path: Path, manifest: Manifest, make_record: MakeRecord) -> None:
    for number in range(3):
        with SegmentWriter(tmp_path / "new" / "dump", manifest, segment_bytes=1 << 20) as writer:
            writer.append(make_record(f"{number}", 0, [number]))
    assert [path.name for path in segments(tmp_path / "new" / "dump")] == [f"segment-00000{i}.seg" for i in range(3)]
    assert rids(tmp_path / "new" / "dump", manifest) == ["0", "1", "2"]


def test_nothing_written_is_no_segment(tmp_path: Path, manifest: Manifest) -> None:
    with SegmentWriter(tmp_path, manifest, segment_bytes=100) as writer:
        writer.seal()
    assert segments(tmp_path) == [] and read_manifest(tmp_path) == manifest


CHANGES: dict[str, Any] = {
    "architecture": "Other",
    "config_hash": "01",
    "vocab_size": 101,
    "num_layers": 5,
    "hidden_size": 3,
    "layer_ids": (0, 2),
    "dtype": "bfloat16",
    "quantization": "fp8",
    "kv_cache_dtype": "fp8_e4m3",
    "sglang_version": "0.5.24",
    "layer_id_convention": "1-based",
    "capture_point": "elsewhere",
}


@pytest.mark.parametrize("names", [*([name] for name in CHANGES), ["dtype", "layer_ids"]])
def test_another_manifest_is_refused_by_its_fields(names: list[str], tmp_path: Path, manifest: Manifest) -> None:
    assert set(CHANGES) == {field.name for field in fields(Manifest)} - {"format"}
    SegmentWriter(tmp_path, manifest, segment_bytes=100).close()
    other = replace(manifest, **{name: CHANGES[name] for name in names})
    with pytest.raises(ManifestMismatchError) as caught:
        SegmentWriter(tmp_path, other, segment_bytes=100)
    for name in CHANGES:
        told = f"{name}: {getattr(manifest, name)!r} there, {CHANGES[name]!r} here" in str(caught.value)
        assert told == (name in names)
    SegmentWriter(tmp_path, manifest, segment_bytes=100).close()


def test_a_second_writer_waits_for_the_first_to_go(tmp_path: Path, manifest: Manifest) -> None:
    first = SegmentWriter(tmp_path, manifest, segment_bytes=100)
    with pytest.raises(DumpError, match="is being written by another process"):
        SegmentWriter(tmp_path, manifest, segment_bytes=100)
    first.close()
    SegmentWriter(tmp_path, manifest, segment_bytes=100).close()


def test_a_manifest_reads_back(manifest: Manifest) -> None:
    text = manifest.to_json()
    assert Manifest.from_json(text, "here") == manifest
    assert json.loads(text)["id"] == manifest.id.hex() and len(manifest.id) == 16
    assert json.loads(text)["layer_id_convention"] == "0-based layer whose output is tapped"


@pytest.mark.parametrize("name", [*CHANGES, "id", "format"])
def test_a_tampered_manifest_is_refused(name: str, tmp_path: Path, manifest: Manifest) -> None:
    data = json.loads(manifest.to_json())
    value = {"id": "0" * 32, "format": 2}.get(name, CHANGES.get(name))
    (tmp_path / MANIFEST).write_text(json.dumps({**data, name: value}))
    with pytest.raises(DumpError, match="has format 2" if name == "format" else "was changed after it was written"):
        read_manifest(tmp_path)
    for broken in ({key: data[key] for key in data if key != name}, {**data, "extra": 1}):
        if name in ("layer_id_convention", "capture_point", "format") and "extra" not in broken:
            continue  # has a default
        (tmp_path / MANIFEST).write_text(json.dumps(broken))
        with pytest.raises(DumpError, match="is not a dump manifest of format 1"):
            SegmentWriter(tmp_path, manifest, segment_bytes=100)
    # A refused directory is not left locked.
    (tmp_path / MANIFEST).write_text(manifest.to_json())
    SegmentWriter(tmp_path, manifest, segment_bytes=100).close()


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"id": 1}', '{"id": 1, "layer_ids": 3}'])
def test_what_is_no_manifest_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(DumpError, match="is not a dump manifest"):
        read_manifest(tmp_path)


def test_every_flipped_bit_of_a_manifest_is_refused_or_changes_nothing(manifest: Manifest) -> None:
    data = manifest.to_json().encode()
    for bit in range(8 * len(data)):
        if bit % 8 == 7:
            continue  # no longer text
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert Manifest.from_json(flipped.decode(), "here") == manifest
        except DumpError:
            continue


def test_a_manifest_that_is_no_text_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / MANIFEST).write_bytes(manifest.to_json().encode().replace(b"Toy", b"T\xffy"))
    with pytest.raises(DumpError):
        read_manifest(tmp_path)


def test_a_folder_without_manifest_is_no_dump(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="is not a dump: it has no manifest"):
        read_manifest(tmp_path)


def test_scan_stops_at_every_truncation(write_dump: WriteDump, manifest: Manifest, make_record: MakeRecord) -> None:
    records = [make_record("a", 0, [1]), make_record("bc", 0, [2, 3])]
    (path,) = segments(write_dump(records))
    data = path.read_bytes()
    second = SEGMENT_HEADER_BYTES + len(encode(records[0]))
    for end in range(len(data)):
        path.write_bytes(data[:end])
        found = []
        if end in (SEGMENT_HEADER_BYTES, second):
            found = [record.rid for _, record in scan(path, manifest.id)]
        else:
            with pytest.raises(TruncatedError):
                for _, record in scan(path, manifest.id):
                    found.append(record.rid)
        assert found == (["a"] if end >= second else [])


def test_scan_meets_every_flipped_byte(write_dump: WriteDump, manifest: Manifest, make_record: MakeRecord) -> None:
    (path,) = segments(write_dump([make_record("a", 0, [1]), make_record("bc", 0, [2, 3])]))
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x55]) + data[position + 1 :])
        with pytest.raises(DumpError):
            list(scan(path, manifest.id))


def test_a_foreign_segment_is_refused(write_dump: WriteDump, manifest: Manifest, make_record: MakeRecord) -> None:
    (path,) = segments(write_dump([make_record("a", 0, [1])]))
    with pytest.raises(ManifestMismatchError, match=manifest.id.hex()):
        list(scan(path, bytes(16)))
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(DamagedError, match="not a dump segment of version 1"):
        list(scan(path, manifest.id))


def test_recovery_cuts_a_torn_tail_wherever_it_is_torn(
    tmp_path: Path, manifest: Manifest, make_record: MakeRecord
) -> None:
    first, second = encode(make_record("a", 0, [1])), encode(make_record("b", 0, [2]))
    whole = segment_header(manifest.id) + first + second
    for end in range(len(whole) + 1):
        path = tmp_path / "segment-000000.open"
        path.write_bytes(whole[:end])
        recover(path, manifest.id)
        kept = (end >= 24 + len(first)) + (end >= len(whole))
        assert not path.exists()
        if kept == 0:
            assert segments(tmp_path) == [], "a segment without a record is not kept"
            continue
        assert path.with_suffix(".seg").read_bytes() == whole[: 24 + kept * len(first)]
        path.with_suffix(".seg").unlink()


def test_a_writer_recovers_what_another_left(
    tmp_path: Path, manifest: Manifest, make_record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    SegmentWriter(tmp_path, manifest, segment_bytes=100).close()
    data = segment_header(manifest.id) + encode(make_record("a", 0, [1])) + encode(make_record("b", 0, [2]))[:-1]
    (tmp_path / "segment-000007.open").write_bytes(data)
    with SegmentWriter(tmp_path, manifest, segment_bytes=1 << 20) as writer:
        writer.append(make_record("c", 0, [3]))
    assert "Recovering" in caplog.text and "Keeping the 1 records before it" in caplog.text
    assert [path.name for path in segments(tmp_path)] == ["segment-000007.seg", "segment-000008.seg"]
    assert rids(tmp_path, manifest) == ["a", "c"]


def test_a_foreign_open_segment_is_left_alone(tmp_path: Path, manifest: Manifest, make_record: MakeRecord) -> None:
    SegmentWriter(tmp_path, manifest, segment_bytes=100).close()
    path = tmp_path / "segment-000000.open"
    path.write_bytes(segment_header(bytes(16)) + encode(make_record("a", 0, [1])))
    with pytest.raises(ManifestMismatchError):
        SegmentWriter(tmp_path, manifest, segment_bytes=100)
    assert path.exists()


def damaged_open_segment(tmp_path: Path, manifest: Manifest, make_record: MakeRecord, position: int) -> Path:
    """Three whole records and one flipped bit, not at the end: no kill leaves this, a bad disk does."""
    SegmentWriter(tmp_path, manifest, segment_bytes=100).close()
    data = bytearray(segment_header(manifest.id) + b"".join(encode(make_record(rid, 0, [1])) for rid in "abc"))
    data[position] ^= 1
    path = tmp_path / "segment-000000.open"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("position", [0, SEGMENT_HEADER_BYTES + 60])
def test_damage_that_is_no_torn_tail_deletes_nothing(
    position: int, tmp_path: Path, manifest: Manifest, make_record: MakeRecord
) -> None:
    path = damaged_open_segment(tmp_path, manifest, make_record, position)
    data = path.read_bytes()
    SegmentWriter(tmp_path, manifest, segment_bytes=100).close()
    assert any(other.read_bytes() == data for other in tmp_path.iterdir())


def test_any_request_id_can_be_written(tmp_path: Path, manifest: Manifest, make_record: MakeRecord) -> None:
    written = ["plain", "ä" * 1024, "ä" * 1023 + "b", "x" * 70_000, "\ud800", ""]
    with SegmentWriter(tmp_path, manifest, segment_bytes=1 << 20) as writer:
        for rid in written:
            writer.append(make_record(rid, 0, [1]))
    stored = rids(tmp_path, manifest)
    assert stored == [storable_rid(rid) for rid in written]
    assert (stored[0], stored[4], stored[5]) == ("plain", "\\ud800", "")
    assert len(set(stored)) == len(written) and max(len(rid.encode()) for rid in stored) <= 1024


def test_a_seal_that_fails_frees_the_directory(
    tmp_path: Path, manifest: Manifest, make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SegmentWriter(tmp_path, manifest, segment_bytes=1 << 20)
    writer.append(make_record("a", 0, [1]))

    def full(descriptor: int) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="disk full"):
            writer.close()
    with SegmentWriter(tmp_path, manifest, segment_bytes=1 << 20) as following:
        following.append(make_record("b", 0, [2]))
    assert rids(tmp_path, manifest) == ["a", "b"]


# Imports no torch: a child starts in a fraction of a second.
CHILD = """
import sys
from pathlib import Path
import numpy as np
from sglang_dflash.dump.record import Kind, Record
from sglang_dflash.dump.store import SegmentWriter, read_manifest
folder = Path(sys.argv[1])
manifest = read_manifest(folder)
with SegmentWriter(folder, manifest, segment_bytes=3000) as writer:
    for number in range(10**9):
        tokens = np.arange(number % 50 + 1, dtype="<i4") + number
        payload = np.repeat(tokens.astype("<f4") + 0.5, 4).tobytes()
        writer.append(Record(Kind.PREFILL, f"{sys.argv[2]}-{number}", 0, manifest.id, tokens, payload))
        print(number, flush=True)
"""


def check_content(folder: Path, manifest: Manifest) -> dict[str, int]:
    """{attempt: records of it}; every record of a sealed segment is whole and what its writer meant."""
    counts: dict[str, int] = {}
    for path in segments(folder):
        records = scan(path, manifest.id)
        while True:
            try:
                _, record = next(records)
            except StopIteration:
                break
            except TruncatedError:
                assert path.suffix == ".open", "only the segment being written can be torn"
                break
            attempt, number = record.rid.split("-")
            assert int(number) == counts.get(attempt, 0), "no record is lost or twice there"
            counts[attempt] = int(number) + 1
            tokens = np.arange(int(number) % 50 + 1) + int(number)
            assert record.token_ids.tolist() == tokens.tolist()
            assert record.payload == np.repeat(tokens.astype("<f4") + 0.5, 4).tobytes()
    return counts


def test_sigkill_at_any_moment_loses_at_most_the_record_in_hand(tmp_path: Path, manifest: Manifest) -> None:
    SegmentWriter(tmp_path, manifest, segment_bytes=100).close()
    wait = np.random.default_rng(0)
    for attempt in range(6):
        command = [sys.executable, "-c", CHILD, str(tmp_path), str(attempt)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(float(wait.uniform(0, 0.15)))
            os.kill(child.pid, signal.SIGKILL)
            acknowledged = 1 + child.stdout.read().count(b"\n")
        counts = check_content(tmp_path, manifest)
        assert len(counts) == attempt + 1
        # What append returned for is there; the record after it may be.
        assert acknowledged <= counts[str(attempt)] <= acknowledged + 1
    SegmentWriter(tmp_path, manifest, segment_bytes=100).close()
    assert check_content(tmp_path, manifest) == counts
    assert all(path.suffix == ".seg" for path in segments(tmp_path))
