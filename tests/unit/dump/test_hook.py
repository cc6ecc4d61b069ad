from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.dump import hook
from sglang_dflash.dump.hook import (
    WRITER_ATTRIBUTE,
    DumpOptionError,
    after_init_attention_backends,
    after_model_runner_forward,
    check_dump_flags,
    check_writable,
    request_rows,
)
from sglang_dflash.dump.reader import DumpReader, MissingRowsError
from sglang_dflash.dump.record import Kind
from sglang_dflash.dump.store import Manifest, SegmentWriter
from sglang_dflash.dump.writer import RowAssembler
from sglang_dflash.options import Options

FEATURES, SLOTS = 4, 200
# (request id, pool index, start, token ids)
Row = tuple[str, int, int, list[int]]


def mode(name: str) -> SimpleNamespace:
    return SimpleNamespace(
        is_decode=lambda: name == "decode",
        is_extend=lambda: name in ("extend", "target_verify"),
        is_idle=lambda: name == "idle",
        is_target_verify=lambda: name == "target_verify",
    )


class Engine:
    """A request table, a slot allocator that hands out the lowest free slot, and forwards whose taps are known."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.table = torch.zeros((8, 100), dtype=torch.int32)
        # Slot 0 is the padding slot.
        self.free = list(range(1, SLOTS))
        self.assembler = RowAssembler(SegmentWriter(folder, manifest, segment_bytes=1 << 20), manifest.id, SLOTS)

    def batch(self, kind: str, rows: list[Row]) -> SimpleNamespace:
        slots = []
        for _, pool, start, tokens in rows:
            taken, self.free = sorted(self.free)[: len(tokens)], sorted(self.free)[len(tokens) :]
            self.table[pool, start : start + len(tokens)] = torch.tensor(taken, dtype=torch.int32)
            slots += taken
        # Engines pad what a CUDA graph replays; rows past the batch's tokens are garbage.
        tokens = [token for *_, ids in rows for token in ids]
        return SimpleNamespace(
            forward_mode=mode(kind),
            rids=[row[0] for row in rows],
            req_pool_indices=torch.tensor([row[1] for row in rows]),
            seq_lens=torch.tensor([row[2] + len(row[3]) for row in rows]),
            extend_seq_lens_cpu=[len(row[3]) for row in rows],
            extend_prefix_lens_cpu=[row[2] for row in rows],
            input_ids=torch.tensor([*tokens, 98, 99]),
            out_cache_loc=torch.tensor([*slots, 0, 0]),
        )

    def forward(self, kind: str, *rows: Row) -> None:
        batch = self.batch(kind, list(rows))
        hidden_TF = batch.input_ids[:, None].float() + torch.arange(FEATURES) / 8
        hidden_TF[-2:] = torch.nan
        for piece in request_rows(batch, hidden_TF, self.table):
            self.assembler.add(piece)

    def share(self, source: int, pool: int, length: int) -> None:
        """A radix hit: the first ``length`` positions of ``pool`` are another request's slots."""
        self.table[pool, :length] = self.table[source, :length]

    def evict(self, pool: int, length: int) -> None:
        self.free += self.table[pool, :length].tolist()

    def reader(self) -> DumpReader:
        self.assembler.close()
        return DumpReader(self.folder)


@pytest.fixture
def engine(tmp_path: Path, manifest: Manifest) -> Engine:
    return Engine(tmp_path / "dump", manifest)


def load(reader: DumpReader, rid: str) -> tuple[list[int], int]:
    sample = reader.load({ref.rid: ref for ref in reader.samples()}[rid])
    assert torch.equal(sample.hidden, sample.token_ids[:, None].float() + torch.arange(FEATURES) / 8)
    return sample.token_ids.tolist(), sample.prompt_len


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 13, 40])
def test_chunks_of_any_size(chunk: int, engine: Engine) -> None:
    prompt = [(7 * i) % 61 for i in range(23)]
    for start in range(0, len(prompt), chunk):
        engine.forward("extend", ("a", 3, start, prompt[start : start + chunk]))
    for step in range(5):
        engine.forward("decode", ("a", 3, 23 + step, [70 + step]))
    assert load(engine.reader(), "a") == ([*prompt, 70, 71, 72, 73, 74], 23)


def test_requests_of_a_batch_are_told_apart(engine: Engine) -> None:
    engine.forward("extend", ("a", 0, 0, [1, 2, 3]), ("b", 1, 0, [4]), ("c", 2, 0, [5, 6]))
    engine.forward("extend", ("c", 2, 2, [7, 8]), ("a", 0, 3, [9]))
    for step in range(3):
        engine.forward("decode", ("b", 1, 1 + step, [20 + step]), ("a", 0, 4 + step, [30 + step]))
    reader = engine.reader()
    assert load(reader, "a") == ([1, 2, 3, 9, 30, 31, 32], 4)
    assert load(reader, "b") == ([4, 20, 21, 22], 1)
    assert load(reader, "c") == ([5, 6, 7, 8], 4)
    assert reader.verify().ok


def test_radix_hits_continue_other_requests(engine: Engine) -> None:
    engine.forward("extend", ("a", 0, 0, [1, 2, 3, 4, 5]))
    engine.forward("decode", ("a", 0, 5, [6]))
    engine.share(0, 1, 3)
    engine.forward("extend", ("b", 1, 3, [9, 9]))
    engine.share(0, 2, 6)
    engine.forward("extend", ("c", 2, 6, [8]))
    engine.share(1, 3, 4)
    engine.forward("extend", ("d", 3, 4, [7, 7]))
    reader = engine.reader()
    assert load(reader, "b") == ([1, 2, 3, 9, 9], 5)
    assert load(reader, "c")[0] == [1, 2, 3, 4, 5, 6, 8]
    assert load(reader, "d")[0] == [1, 2, 3, 9, 7, 7]


def test_an_evicted_slot_stands_for_its_new_token(engine: Engine) -> None:
    engine.forward("extend", ("a", 0, 0, [1, 2, 3]))
    engine.evict(0, 3)
    engine.forward("extend", ("b", 1, 0, [4, 5, 6]))
    assert engine.table[1, :3].tolist() == engine.table[0, :3].tolist()
    engine.share(1, 2, 2)
    engine.forward("extend", ("c", 2, 2, [7]))
    reader = engine.reader()
    assert [load(reader, rid)[0] for rid in "abc"] == [[1, 2, 3], [4, 5, 6], [4, 5, 7]]


def test_a_prefix_from_before_the_dump_is_missing(engine: Engine) -> None:
    engine.table[0, :4] = torch.tensor([150, 151, 152, 153])
    engine.forward("extend", ("a", 0, 4, [9]), ("b", 1, 0, [1]))
    engine.forward("decode", ("a", 0, 5, [8]))
    reader = engine.reader()
    with pytest.raises(MissingRowsError, match="Request a: positions 0 to 4"):
        load(reader, "a")
    assert load(reader, "b") == ([1], 1)


def test_rows_are_copies_of_the_taps(engine: Engine) -> None:
    batch = engine.batch("extend", [("a", 0, 0, [1, 2])])
    hidden_TF = torch.ones(4, FEATURES, requires_grad=True)
    (piece,) = request_rows(batch, hidden_TF, engine.table)
    with torch.no_grad():
        hidden_TF.zero_()
    assert piece.hidden_RF.tolist() == [[1.0] * FEATURES] * 2 and not piece.hidden_RF.requires_grad
    assert piece.num_bytes == 2 * FEATURES * 4
    assert (piece.rid, piece.kind, piece.start, piece.previous_slot) == ("a", Kind.PREFILL, 0, None)
    assert (piece.token_ids.dtype.name, piece.slots.dtype.name) == ("int32", "int64")


def test_rows_are_copies_of_tokens_and_slots(engine: Engine) -> None:
    """The writer's thread reads them while the engine goes on."""
    batch = engine.batch("extend", [("a", 0, 0, [1, 2])])
    batch.input_ids = batch.input_ids.int()
    slots = batch.out_cache_loc[:2].tolist()
    (piece,) = request_rows(batch, torch.ones(4, FEATURES), engine.table)
    batch.input_ids.zero_()
    batch.out_cache_loc.zero_()
    assert (piece.token_ids.tolist(), piece.slots.tolist()) == ([1, 2], slots)


def test_a_request_without_new_rows_has_none(engine: Engine) -> None:
    batch = engine.batch("extend", [("a", 0, 0, [1]), ("idle", 1, 0, []), ("b", 2, 0, [2])])
    pieces = request_rows(batch, torch.ones(5, FEATURES), engine.table)
    assert [(piece.rid, piece.token_ids.tolist()) for piece in pieces] == [("a", [1]), ("b", [2])]


def forward_hook(kind: str, engine: Engine, *, draft: bool = False, rids: bool = True) -> list[Any]:
    put: list[Any] = []
    batch = engine.batch("decode" if kind == "decode" else "extend", [("a", 0, 0, [1])])
    batch.forward_mode = mode(kind)
    if not rids:
        batch.rids = None
    runner = SimpleNamespace(
        is_draft_worker=draft,
        req_to_token_pool=SimpleNamespace(req_to_token=engine.table),
        **{WRITER_ATTRIBUTE: SimpleNamespace(put=put.append)},
    )
    output = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=torch.ones(3, FEATURES)))
    after_model_runner_forward(output, runner, batch)
    delattr(runner, WRITER_ATTRIBUTE)
    after_model_runner_forward(output, runner, batch)
    return put


def test_only_the_targets_own_forwards_are_recorded(engine: Engine) -> None:
    for kind in ("extend", "decode"):
        ((piece,),) = forward_hook(kind, engine)
        assert piece.rid == "a" and piece.kind.name == ("DECODE" if kind == "decode" else "PREFILL")
        assert forward_hook(kind, engine, draft=True) == forward_hook(kind, engine, rids=False) == []
    assert forward_hook("idle", engine) == forward_hook("target_verify", engine) == forward_hook("split", engine) == []


def test_the_first_rank_of_the_target_opens_the_dump(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = SimpleNamespace(attn_tp_rank=0)
    context = SimpleNamespace(get_parallel=lambda: rank)
    # A stand-in: importing SGLang's takes seconds.
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)  # type: ignore[misc]
    monkeypatch.setattr(hook, "manifest_of", lambda runner: manifest)
    monkeypatch.setattr(hook.atexit, "register", lambda function: None)

    def opened(folder: Path | None, *, draft: bool = False) -> bool:
        monkeypatch.setattr(hook, "read_options", lambda: Options(dump_dir=folder))
        pool = SimpleNamespace(size=64, page_size=1)
        runner = SimpleNamespace(is_draft_worker=draft, token_to_kv_pool=pool)
        after_init_attention_backends(None, runner)
        writer = getattr(runner, WRITER_ATTRIBUTE, None)
        if writer is not None:
            writer.close()
        return writer is not None

    assert opened(tmp_path / "dump") and (tmp_path / "dump" / "manifest.json").exists()
    assert not opened(None) and not opened(tmp_path / "draft", draft=True)
    rank.attn_tp_rank = 1
    assert not opened(tmp_path / "rank1") and not (tmp_path / "rank1").exists()


def flags(**changes: object) -> SimpleNamespace:
    good = {
        "enable_return_aux_hidden_states": True,
        "aux_hidden_state_capture": "dflash",
        "return_aux_hidden_state_layer_ids": [0, 1],
        "enable_hierarchical_cache": False,
        "enable_mixed_chunk": False,
        "dp_size": 1,
        "pp_size": 1,
    }
    return SimpleNamespace(**{**good, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_return_aux_hidden_states": False}, "taps are not captured. Start the server with --speculative-alg"),
        ({"aux_hidden_state_capture": "eagle3"}, "taps are not captured"),
        ({"enable_return_aux_hidden_states": False, "aux_hidden_state_capture": None}, "taps are not captured"),
        ({"return_aux_hidden_state_layer_ids": [1, 0]}, "strictly ascending"),
        ({"return_aux_hidden_state_layer_ids": [3, 1, 2]}, r"layer-ids \[3, 1, 2\] must be .* strictly ascending"),
        ({"return_aux_hidden_state_layer_ids": [1, 1]}, "strictly ascending"),
        ({"return_aux_hidden_state_layer_ids": None}, "must be one or more layers"),
        ({"enable_mixed_chunk": True}, "does not work with --enable-mixed-chunk"),
        ({"enable_hierarchical_cache": True}, "does not work with --enable-hierarchical-cache"),
        ({"dp_size": 2}, "needs --dp-size 1 and --pp-size 1"),
        ({"pp_size": 2}, "needs --dp-size 1 and --pp-size 1"),
    ],
)
def test_flags_that_lose_rows_are_refused(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "dump"
    with pytest.raises(DumpOptionError, match=words):
        check_dump_flags(flags(**changes), Options(dump_dir=folder))
    assert not folder.exists()
    check_dump_flags(flags(**changes), Options())
    check_dump_flags(flags(), Options(dump_dir=folder))
    assert list(folder.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "dump"):
        with pytest.raises(DumpOptionError, match="cannot be written"):
            check_writable(folder)
        with pytest.raises(DumpOptionError, match="cannot be written"):
            check_dump_flags(flags(), Options(dump_dir=folder))
