from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_dflash.dump import writer as writer_module
from sglang_dflash.dump.reader import DumpReader, MissingRowsError
from sglang_dflash.dump.record import Kind, Record
from sglang_dflash.dump.store import Manifest, SegmentWriter, scan, segments
from sglang_dflash.dump.writer import RUN_ROWS, AsyncWriter, RequestRows, RowAssembler

FEATURES = 4


def rows(
    rid: str,
    start: int,
    tokens: list[int],
    slots: list[int],
    previous: int | None = None,
    kind: Kind = Kind.PREFILL,
) -> RequestRows:
    """Rows whose taps are their token ids."""
    hidden_RF = torch.tensor(tokens, dtype=torch.float32)[:, None].repeat(1, FEATURES)
    return RequestRows(rid, kind, start, previous, np.array(tokens, dtype=np.int32), np.array(slots), hidden_RF)


def token(rid: str, position: int, token_id: int, slot: int, previous: int | None) -> RequestRows:
    return rows(rid, position, [token_id], [slot], previous, Kind.DECODE)


@pytest.fixture
def assembler(tmp_path: Path, manifest: Manifest) -> RowAssembler:
    return RowAssembler(SegmentWriter(tmp_path, manifest, segment_bytes=1 << 20), manifest.id, num_slots=300)


def stored(folder: Path, manifest: Manifest) -> list[Record]:
    return [record for path in segments(folder) for _, record in scan(path, manifest.id)]


def spans(records: list[Record]) -> list[tuple[str, int, int, str]]:
    return [(record.rid, record.start, record.num_rows, record.kind.name) for record in records]


def test_decoded_rows_are_merged(assembler: RowAssembler, tmp_path: Path, manifest: Manifest) -> None:
    assembler.add(rows("a", 0, [5, 6], [0, 1]))
    for step in range(150):
        assembler.add(token("a", 2 + step, step, 2 + step, 1 + step))
        if step == RUN_ROWS - 2:
            assert len(stored(tmp_path, manifest)) == 1, "a run is not written before it is full"
    assembler.close()
    assert spans(stored(tmp_path, manifest)) == [
        ("a", 0, 2, "PREFILL"),
        ("a", 2, 64, "DECODE"),
        ("a", 66, 64, "DECODE"),
        ("a", 130, 22, "DECODE"),
    ]
    reader = DumpReader(tmp_path)
    sample = reader.load(reader.samples()[0])
    assert sample.token_ids.tolist() == [5, 6, *range(150)] and sample.prompt_len == 2
    assert sample.hidden[:, 0].tolist() == sample.token_ids.tolist()


def test_requests_that_decode_together_do_not_mix(assembler: RowAssembler, tmp_path: Path) -> None:
    assembler.add(rows("a", 0, [1], [10]))
    assembler.add(rows("b", 0, [2], [20]))
    for step in range(70):
        assembler.add(token("a", 1 + step, 100 + step, 11 + step, 10 + step))
        assembler.add(token("b", 1 + step, 200 + step, 111 + step, 20 if step == 0 else 110 + step))
    assembler.close()
    reader = DumpReader(tmp_path)
    loaded = [reader.load(ref) for ref in reader.samples()]
    assert [sample.token_ids.tolist() for sample in loaded] == [[1, *range(100, 170)], [2, *range(200, 270)]]
    assert all(sample.hidden[:, 1].tolist() == sample.token_ids.tolist() for sample in loaded)


def test_a_gap_begins_another_record(assembler: RowAssembler, tmp_path: Path, manifest: Manifest) -> None:
    assembler.add(token("a", 0, 1, 1, None))
    assembler.add(token("a", 2, 3, 3, 1))
    assembler.close()
    assert spans(stored(tmp_path, manifest)) == [("a", 0, 1, "DECODE"), ("a", 2, 1, "DECODE")]


def test_a_retracted_request_is_prefilled_again(assembler: RowAssembler, tmp_path: Path) -> None:
    """Its generated tokens come back as a prefill; what was generated stays generated."""
    assembler.add(rows("a", 0, [1, 2], [1, 2]))
    assembler.add(token("a", 2, 3, 3, 2))
    assembler.add(token("a", 3, 4, 4, 3))
    assembler.add(rows("a", 0, [1, 2, 3, 4, 5], [11, 12, 13, 14, 15]))
    assembler.add(token("a", 5, 6, 16, 15))
    assembler.close()
    reader = DumpReader(tmp_path)
    sample = reader.load(reader.samples()[0])
    assert (sample.token_ids.tolist(), sample.prompt_len) == ([1, 2, 3, 4, 5, 6], 2)


def test_a_slot_never_written_is_missing_rows(assembler: RowAssembler, tmp_path: Path) -> None:
    assembler.add(rows("a", 4, [9], [44], previous=43))
    assembler.add(token("a", 5, 8, 45, 44))
    assembler.close()
    reader = DumpReader(tmp_path)
    with pytest.raises(MissingRowsError, match="Request a: positions 0 to 4"):
        reader.load(reader.samples()[0])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_are_refused(
    value: float, assembler: RowAssembler, tmp_path: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    assembler.add(rows("a", 0, [1], [1]))
    assembler.add(token("a", 1, 2, 2, 1))
    bad = rows("a", 2, [3, 4, 5], [3, 4, 5], 2, Kind.DECODE)
    bad.hidden_RF[1, 2] = value
    assembler.add(bad)
    assembler.add(token("a", 5, 6, 6, 5))
    assembler.add(rows("other", 0, [7], [7]))
    assembler.close()
    assert "taps of request a are not finite at 1 positions ([3] ...)" in caplog.text
    # The finite rows before them are kept; those behind them lead nowhere.
    assert spans(stored(tmp_path, manifest)) == [
        ("a", 0, 1, "PREFILL"),
        ("a", 1, 1, "DECODE"),
        ("other", 0, 1, "PREFILL"),
        ("a", 5, 1, "DECODE"),
    ]
    report = DumpReader(tmp_path).verify()
    assert len(report.problems) == 1 and report.problems[0].startswith("Request a: positions 0 to 4")


def test_idle_runs_are_flushed(
    assembler: RowAssembler, tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(writer_module.time, "monotonic", lambda: now[0])
    assembler.add(token("old", 0, 1, 1, None))
    now[0] += 1.0
    assembler.add(token("new", 0, 2, 2, None))
    assembler.flush(idle_seconds=1.0)
    assert [record.rid for record in stored(tmp_path, manifest)] == ["old"]
    assembler.add(token("new", 1, 3, 3, 2))
    assembler.close()
    assert spans(stored(tmp_path, manifest))[1:] == [("new", 0, 2, "DECODE")]


class Gate:
    """Stands for a ``RowAssembler``: takes rows when it is let, or fails."""

    def __init__(self, error: Exception | None = None, *, fails_in: str = "add") -> None:
        self.open = threading.Event()
        self.taken: list[str] = []
        self.closed = 0
        self.error, self.fails_in = error, fails_in

    def _act(self, name: str) -> None:
        if self.error is not None and self.fails_in == name:
            raise self.error

    def add(self, piece: RequestRows) -> None:
        assert self.open.wait(10)
        self._act("add")
        self.taken.append(piece.rid)

    def flush(self, *, idle_seconds: float = 0.0) -> None:
        self._act("flush")

    def close(self) -> None:
        self.closed += 1
        self._act("close")


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_the_queue_is_bounded_in_bytes_and_keeps_order() -> None:
    gate = Gate()
    size = rows("0", 0, [1], [1]).num_bytes
    assert size == 4 * FEATURES
    writer = AsyncWriter(gate, queue_bytes=3 * size)  # type: ignore[arg-type]
    given: list[int] = []

    def work() -> None:
        for number in range(10):
            writer.put([rows(f"{number}", 0, [1], [1])])
            given.append(number)

    thread = in_thread(work)
    time.sleep(0.2)
    assert given == [0, 1, 2] and thread.is_alive(), "the forward waits, with at most three forwards' rows queued"
    gate.open.set()
    thread.join(10)
    writer.close()
    assert gate.taken == [f"{number}" for number in range(10)]
    assert gate.closed == 1 and writer.failure is None


def test_a_forward_larger_than_the_queue_passes_alone() -> None:
    gate = Gate()
    gate.open.set()
    writer = AsyncWriter(gate, queue_bytes=1)  # type: ignore[arg-type]
    for _ in range(3):
        writer.put([rows("big", 0, list(range(50)), list(range(50)))])
    writer.put([])
    writer.close()
    assert gate.taken == ["big"] * 3


def test_close_writes_what_is_queued_and_seals(tmp_path: Path, manifest: Manifest, assembler: RowAssembler) -> None:
    writer = AsyncWriter(assembler, queue_bytes=1 << 20)
    for position in range(200):
        writer.put([token("a", position, position, position, position - 1 if position else None)])
    writer.close()
    assert [path.suffix for path in segments(tmp_path)] == [".seg"]
    assert sum(record.num_rows for record in stored(tmp_path, manifest)) == 200
    # Its lock is free again.
    SegmentWriter(tmp_path, manifest, segment_bytes=100).close()
    writer.close()


@pytest.mark.parametrize("fails_in", ["add", "flush", "close"])
def test_a_failure_is_kept_and_told_once(
    fails_in: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "IDLE_SECONDS", 0.05)
    error = OSError("disk full")
    gate = Gate(error, fails_in=fails_in)
    gate.open.set()
    writer = AsyncWriter(gate, queue_bytes=1 << 20)  # type: ignore[arg-type]
    writer.put([rows("a", 0, [1], [1])])
    if fails_in == "flush":
        time.sleep(0.2)
    writer.close()
    assert writer.failure is error
    assert caplog.text.count("The dump stopped: disk full") == 1


def test_a_failure_releases_who_waits_and_nobody_waits_again() -> None:
    gate = Gate(OSError("disk full"))
    writer = AsyncWriter(gate, queue_bytes=1)  # type: ignore[arg-type]

    def work() -> None:
        for _ in range(5):
            writer.put([rows("a", 0, [1, 2], [1, 2])])

    thread = in_thread(work)
    time.sleep(0.1)
    assert thread.is_alive()
    gate.open.set()
    thread.join(5)
    assert not thread.is_alive() and isinstance(writer.failure, OSError)
    begin = time.monotonic()
    for _ in range(100):
        writer.put([rows("a", 0, [1, 2], [1, 2])])
    writer.close()
    assert time.monotonic() - begin < 2 and gate.taken == []


def test_rows_after_the_end_are_dropped_and_nobody_waits() -> None:
    gate = Gate()
    gate.open.set()
    writer = AsyncWriter(gate, queue_bytes=1)  # type: ignore[arg-type]
    writer.close()
    thread = in_thread(lambda: [writer.put([rows("a", 0, [1, 2], [1, 2])]) for _ in range(3)])
    thread.join(5)
    assert not thread.is_alive() and gate.taken == []
