from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_dflash.dump import reader as reader_module
from sglang_dflash.dump.reader import DumpReader, MissingRowsError, Sample
from sglang_dflash.dump.record import UNKNOWN_HASH, DamagedError, DumpError, Kind, Record, encode, prefix_hashes
from sglang_dflash.dump.store import Manifest, SegmentWriter, segments

from .conftest import TOY

MakeRecord = Callable[..., Record]
WriteDump = Callable[..., Path]


def after(parent: bytes, *tokens: int) -> bytes:
    """Prefix hash behind ``tokens``."""
    *_, last = prefix_hashes(parent, np.array(tokens))
    return last


def load(reader: DumpReader, rid: str) -> Sample:
    return reader.load({ref.rid: ref for ref in reader.samples()}[rid])


def conversation(make_record: MakeRecord, manifest: Manifest, rid: str = "a") -> list[Record]:
    """A prompt 1 2 3 | 4 in two chunks, then 5 6 generated."""
    return [
        make_record(rid, 0, [1, 2, 3]),
        make_record(rid, 3, [4], after(manifest.id, 1, 2, 3)),
        make_record(rid, 4, [5, 6], after(manifest.id, 1, 2, 3, 4), Kind.DECODE),
    ]


def test_a_request_is_put_together_from_its_records(
    write_dump: WriteDump, make_record: MakeRecord, manifest: Manifest
) -> None:
    reader = DumpReader(write_dump(conversation(make_record, manifest)))
    (ref,) = reader.samples()
    assert (ref.rid, ref.length, ref.prompt_len) == ("a", 6, 4)
    sample = reader.load(ref)
    assert sample.token_ids.dtype == torch.int64 and sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.hidden.dtype == torch.float32
    assert torch.equal(sample.hidden, (torch.arange(1, 7) + 0.5)[:, None].expand(6, 4))
    assert (sample.rid, sample.prompt_len, reader.num_rows) == ("a", 4, 6)


def test_a_prompt_without_answer_is_all_prompt(write_dump: WriteDump, make_record: MakeRecord) -> None:
    assert DumpReader(write_dump([make_record("a", 0, [1, 2])])).samples()[0].prompt_len == 2


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_segments_may_be_in_any_order(
    order: tuple[int, ...], write_dump: WriteDump, make_record: MakeRecord, manifest: Manifest
) -> None:
    records = conversation(make_record, manifest)
    reader = DumpReader(write_dump(*([records[i]] for i in order)))
    sample = load(reader, "a")
    assert (sample.token_ids.tolist(), sample.prompt_len) == ([1, 2, 3, 4, 5, 6], 4)
    assert reader.verify().ok


def test_duplicates_change_nothing(write_dump: WriteDump, make_record: MakeRecord, manifest: Manifest) -> None:
    records = conversation(make_record, manifest)
    reader = DumpReader(write_dump(records, records, records[::-1]))
    sample = load(reader, "a")
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6] and len(sample.hidden) == 6
    report = reader.verify()
    assert (report.ok, report.segments, report.records, report.rows, report.samples) == (True, 3, 9, 18, 1)


def test_a_shared_prefix_ends_inside_another_requests_record(
    write_dump: WriteDump, make_record: MakeRecord, manifest: Manifest
) -> None:
    records = [*conversation(make_record, manifest), make_record("b", 2, [9, 8], after(manifest.id, 1, 2))]
    # From a generated row of a, whose prompt ended before it.
    records.append(make_record("c", 5, [7], after(manifest.id, 1, 2, 3, 4, 5), Kind.DECODE))
    reader = DumpReader(write_dump(records))
    assert load(reader, "b").token_ids.tolist() == [1, 2, 9, 8]
    sample = load(reader, "c")
    assert (sample.token_ids.tolist(), sample.prompt_len) == ([1, 2, 3, 4, 5, 7], 5)
    assert sample.hidden[:, 3].tolist() == [1.5, 2.5, 3.5, 4.5, 5.5, 7.5]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_have_the_stored_dtype(dtype: str, tmp_path: Path, manifest: Manifest) -> None:
    stored = replace(manifest, dtype=dtype)
    rows = torch.randn(3, 4).to(getattr(torch, dtype))
    payload = rows.view(torch.uint8).numpy().tobytes()
    with SegmentWriter(tmp_path, stored, segment_bytes=1 << 20) as writer:
        writer.append(Record(Kind.PREFILL, "a", 0, stored.id, np.array([1, 2, 3], dtype="<i4"), payload))
    hidden = load(DumpReader(tmp_path), "a").hidden
    assert hidden.dtype == getattr(torch, dtype) and torch.equal(hidden, rows)


def test_missing_rows_name_request_and_positions(
    write_dump: WriteDump, make_record: MakeRecord, manifest: Manifest
) -> None:
    prompt, chunk, answer = conversation(make_record, manifest)
    hole = conversation(make_record, manifest, "hole")
    cached = make_record("cached", 4, [3], UNKNOWN_HASH)
    reader = DumpReader(write_dump([prompt, answer, *hole[2:], cached]))
    for rid in ("a", "hole"):
        with pytest.raises(MissingRowsError, match=f"Request {rid}: no record holds position 3, so positions 0 to 3"):
            load(reader, rid)
    with pytest.raises(MissingRowsError, match="Request cached: positions 0 to 3 were in the engine's cache"):
        load(reader, "cached")
    report = reader.verify()
    assert not report.ok and len(report.problems) == report.samples == 3
    # Whoever brings the rows, they are found.
    again = DumpReader(shutil.copytree(reader.path, reader.path.with_name("again")))
    with SegmentWriter(again.path, manifest, segment_bytes=1 << 20) as writer:
        writer.append(replace(chunk, rid="other"))
    assert load(DumpReader(again.path), "hole").token_ids.tolist() == [1, 2, 3, 4, 5, 6]


def test_rows_behind_an_unknown_prefix_stand_for_nobody_else(write_dump: WriteDump, make_record: MakeRecord) -> None:
    records = [make_record("a", 1, [2], UNKNOWN_HASH), make_record("b", 2, [3], after(UNKNOWN_HASH, 2))]
    reader = DumpReader(write_dump(records))
    for rid in ("a", "b"):
        with pytest.raises(MissingRowsError):
            load(reader, rid)


def test_damage_is_reported_and_what_is_whole_is_read(
    write_dump: WriteDump, make_record: MakeRecord, manifest: Manifest
) -> None:
    records = conversation(make_record, manifest)
    broken = bytearray(encode(records[1]))
    broken[-1] ^= 1
    folder = write_dump([make_record("whole", 0, [1]), bytes(broken), records[0]], [records[2]])
    reader = DumpReader(folder)
    assert len(reader.damage) == 1 and "segment-000000.seg is unreadable from there on" in reader.damage[0]
    assert load(reader, "whole").token_ids.tolist() == [1]
    with pytest.raises(MissingRowsError, match="checksum does not match"):
        load(reader, "a")
    report = reader.verify()
    assert not report.ok and len(report.problems) == 2


def test_damage_after_opening_is_found_by_load_and_verify(
    write_dump: WriteDump, make_record: MakeRecord, manifest: Manifest
) -> None:
    reader = DumpReader(write_dump(conversation(make_record, manifest)))
    (path,) = segments(reader.path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError):
        load(reader, "a")
    assert not reader.verify().ok


def test_every_truncation_and_flip_of_a_segment_is_reported(
    write_dump: WriteDump, make_record: MakeRecord, manifest: Manifest
) -> None:
    (path,) = segments(folder := write_dump(conversation(make_record, manifest)))
    data = path.read_bytes()
    ends = [24, 24 + 44 + 1 + 3 * 20, 24 + 2 * 45 + 4 * 20, len(data)]
    for position in range(len(data)):
        path.write_bytes(data[:position])
        reader = DumpReader(folder)
        # A cut between two records leaves no trace in the segment itself.
        assert bool(reader.damage) == (position not in ends)
        path.write_bytes(data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :])
        assert not DumpReader(folder).verify().ok


def test_a_segment_of_another_dump_is_reported(
    write_dump: WriteDump, make_record: MakeRecord, manifest: Manifest
) -> None:
    folder = write_dump([make_record("a", 0, [1])])
    other = folder.with_name("other")
    with SegmentWriter(other, replace(manifest, vocab_size=101), segment_bytes=100) as writer:
        writer.append(make_record("b", 0, [1]))
    shutil.copy(segments(other)[0], folder / "segment-000001.seg")
    reader = DumpReader(folder)
    assert [ref.rid for ref in reader.samples()] == ["a"]
    assert "belongs to manifest" in reader.damage[0]


def test_a_dump_is_read_while_it_is_written(tmp_path: Path, manifest: Manifest, make_record: MakeRecord) -> None:
    records = conversation(make_record, manifest)
    with SegmentWriter(tmp_path, manifest, segment_bytes=1 << 20) as writer:
        assert DumpReader(tmp_path).samples() == []
        writer.append(records[0])
        (path,) = segments(tmp_path)
        with path.open("ab") as torn:
            torn.write(encode(records[1])[:-5])
        early = DumpReader(tmp_path)
        assert early.verify().ok and early.damage == [], "the record being written is not damage"
        assert load(early, "a").token_ids.tolist() == [1, 2, 3]
    # Sealed meanwhile, under another name.
    assert load(early, "a").token_ids.tolist() == [1, 2, 3]


def test_what_is_no_dump(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DumpError, match="is not a dump"):
            DumpReader(folder)


def test_a_segment_sealed_while_opening_is_not_lost(
    tmp_path: Path, manifest: Manifest, make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SegmentWriter(tmp_path, manifest, segment_bytes=1 << 20)
    writer.append(make_record("a", 0, [1]))

    def listed_then_sealed(folder: Path) -> list[Path]:
        found = segments(folder)
        writer.seal()
        return found

    monkeypatch.setattr(reader_module, "segments", listed_then_sealed)
    assert [ref.rid for ref in DumpReader(tmp_path).samples()] == ["a"]
    writer.close()


def hostile(
    *, rid: bytes = b"r", rows: int = 1, row_bytes: int = 16, start: int = 0, body: bytes | None = None
) -> bytes:
    """A record whose checksums are right and whose content no writer makes."""
    if body is None:
        body = rid + np.arange(rows, dtype="<i4").tobytes() + bytes(rows * row_bytes)
    fixed = struct.pack("<4sBBHIII", b"DFR1", 0, 1, len(rid), start, rows, row_bytes) + TOY.id
    fixed += struct.pack("<I", zlib.crc32(body))
    return fixed + struct.pack("<I", zlib.crc32(fixed)) + body


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(
            hostile(rows=1 << 20, row_bytes=1 << 24, body=b"x"),
            id="16-tebibytes",
        ),
        pytest.param(
            hostile(rid=b"\xff"),
            id="id-is-no-text",
        ),
        pytest.param(
            hostile(row_bytes=12),
            id="rows-of-another-size",
        ),
        pytest.param(
            hostile(row_bytes=3),
            id="rows-of-broken-size",
        ),
        pytest.param(
            hostile(start=7),
            id="position-without-prefix",
        ),
    ],
)
def test_records_that_lie_are_problems(record: bytes, write_dump: WriteDump) -> None:
    report = DumpReader(write_dump([record])).verify()
    assert not report.ok
