"""From forwards to records: chunks, radix hits, slot reuse, refused rows, and a writer that fails."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.dump.hook import request_rows
from sglang_dflash.dump.reader import DumpReader, MissingRowsError
from sglang_dflash.dump.record import Kind
from sglang_dflash.dump.store import SegmentWriter
from sglang_dflash.dump.writer import IDLE_SECONDS, AsyncWriter, RequestRows, RowAssembler

from .conftest import FEATURES
from .conftest import TOY as MANIFEST


class Engine:
    """Just enough of an engine: a request table, and forwards whose taps are the token ids."""

    def __init__(self, folder: Path) -> None:
        self.req_to_token = torch.zeros((8, 64), dtype=torch.int32)
        self.assembler = RowAssembler(SegmentWriter(folder, MANIFEST, segment_bytes=1 << 20), MANIFEST.id, 100)

    def forward(self, mode: str, rows: list[tuple[str, int, int, list[int], list[int]]]) -> None:
        """Each row is (rid, pool index, start, tokens, slots)."""
        for _, pool, start, _, slots in rows:
            self.req_to_token[pool, start : start + len(slots)] = torch.tensor(slots, dtype=torch.int32)
        tokens = [token for *_, ids, _ in rows for token in ids]
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode=lambda: mode == "decode"),
            rids=[row[0] for row in rows],
            req_pool_indices=torch.tensor([row[1] for row in rows]),
            seq_lens=torch.tensor([row[2] + len(row[3]) for row in rows]),
            extend_seq_lens_cpu=[len(row[3]) for row in rows],
            extend_prefix_lens_cpu=[row[2] for row in rows],
            input_ids=torch.tensor(tokens),
            out_cache_loc=torch.tensor([slot for row in rows for slot in row[4]]),
        )
        hidden = torch.tensor(tokens, dtype=torch.float32)[:, None].expand(-1, FEATURES)
        padded = torch.cat([hidden, torch.full((3, FEATURES), torch.nan)])
        for piece in request_rows(batch, padded, self.req_to_token):
            self.assembler.add(piece)


def load(folder: Path, rid: str) -> tuple[list[int], int]:
    reader = DumpReader(folder)
    sample = reader.load({ref.rid: ref for ref in reader.samples()}[rid])
    assert sample.hidden[:, 0].tolist() == sample.token_ids.tolist()
    return sample.token_ids.tolist(), sample.prompt_len


def test_chunked_prefill_then_decode_in_a_mixed_batch(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.forward("extend", [("a", 0, 0, [5, 6, 7], [1, 2, 3]), ("b", 1, 0, [8], [4])])
    engine.forward("extend", [("a", 0, 3, [9], [5])])
    for step in range(70):
        engine.forward(
            "decode",
            [("a", 0, 4 + step, [10 + step], [6 + step])] if step < 50 else [("b", 1, 1 + step - 50, [3], [80])],
        )
    engine.assembler.close()
    assert load(tmp_path, "a") == ([5, 6, 7, 9, *range(10, 60)], 4)
    assert load(tmp_path, "b")[1] == 1


def test_radix_hit_continues_another_requests_prefix(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.forward("extend", [("a", 0, 0, [5, 6, 7], [1, 2, 3])])
    engine.req_to_token[1, :2] = torch.tensor([1, 2])
    engine.forward("extend", [("b", 1, 2, [9, 9], [11, 12])])
    engine.assembler.close()
    assert load(tmp_path, "b")[0] == [5, 6, 9, 9]


def test_a_reused_slot_stands_for_its_new_token(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.forward("extend", [("a", 0, 0, [5, 6], [1, 2])])
    engine.forward("extend", [("c", 2, 0, [7, 8], [1, 2])])
    engine.req_to_token[1, :2] = torch.tensor([1, 2])
    engine.forward("extend", [("b", 1, 2, [9], [3])])
    engine.assembler.close()
    assert load(tmp_path, "b")[0] == [7, 8, 9]


def test_a_slot_never_seen_is_missing_rows(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.req_to_token[0, :4] = torch.tensor([40, 41, 42, 43])
    engine.forward("extend", [("a", 0, 4, [9], [44])])
    engine.assembler.close()
    with pytest.raises(MissingRowsError, match="Request a: positions 0 to 3"):
        load(tmp_path, "a")


def test_rows_that_are_not_finite_are_refused_and_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(tmp_path)
    engine.forward("extend", [("a", 0, 0, [5], [1])])
    bad = RequestRows(
        "a",
        Kind.PREFILL,
        1,
        1,
        torch.tensor([6], dtype=torch.int32).numpy(),
        torch.tensor([2]).numpy(),
        torch.full((1, FEATURES), torch.inf),
    )
    engine.assembler.add(bad)
    engine.forward("extend", [("a", 0, 2, [7], [3])])
    engine.assembler.close()
    assert "not finite at 1 positions ([1]" in caplog.text
    with pytest.raises(MissingRowsError):
        load(tmp_path, "a")


def test_a_failed_writer_stops_the_dump_and_not_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    def fail(rows: RequestRows) -> None:
        raise OSError("disk full")

    writer = AsyncWriter(SimpleNamespace(add=fail, flush=lambda **_: None, close=lambda: None), queue_bytes=1)  # type: ignore[arg-type]
    rows = RequestRows(
        "a", Kind.PREFILL, 0, None, torch.tensor([6]).numpy(), torch.tensor([2]).numpy(), torch.ones(1, FEATURES)
    )
    for _ in range(3):
        writer.put([rows])
    writer.close()
    assert isinstance(writer.failure, OSError)
    assert caplog.text.count("The dump stopped: disk full") == 1


def test_a_finished_requests_rows_are_written_while_others_go_on(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    writer = AsyncWriter(engine.assembler, queue_bytes=1 << 20)
    hidden = torch.full((1, FEATURES), 5.0)
    tokens, slots = torch.tensor([5], dtype=torch.int32).numpy(), torch.tensor([1]).numpy()
    writer.put([RequestRows("ended", Kind.DECODE, 0, None, tokens, slots, hidden)])
    deadline = time.monotonic() + 3 * IDLE_SECONDS
    position = 0
    while time.monotonic() < deadline:
        writer.put([RequestRows("busy", Kind.DECODE, position, 2 if position else None, tokens, slots + 1, hidden)])
        position += 1
        time.sleep(0.05)
    # Not closed: what is on disk is what a kill would leave.
    assert load(tmp_path, "ended") == ([5], 0)
    writer.close()
    assert len(load(tmp_path, "busy")[0]) == position
