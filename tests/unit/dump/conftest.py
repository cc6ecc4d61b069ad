"""A toy dump: its manifest, and records whose taps are their token ids plus a half."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from sglang_dflash.dump.record import Kind, Record, encode, segment_header
from sglang_dflash.dump.store import MANIFEST, Manifest

TOY = Manifest("Toy", "00", 100, 4, 2, (0, 1), "float32", None, "float32", "0.5.23")
FEATURES = 4
MakeRecord = Callable[..., Record]
WriteDump = Callable[..., Path]


def toy_record(rid: str, start: int, parent: bytes, tokens: Sequence[int], kind: Kind = Kind.PREFILL) -> Record:
    """Rows of four features, each the token id + 0.5."""
    token_ids = np.array(tokens, dtype="<i4")
    payload = np.repeat(token_ids.astype("<f4") + 0.5, FEATURES).tobytes()
    return Record(kind, rid, start, parent, token_ids, payload)


@pytest.fixture
def manifest() -> Manifest:
    return TOY


@pytest.fixture
def make_record() -> MakeRecord:
    """``make_record(rid, start, tokens)``: rows of four features, each the token id + 0.5."""

    def make(rid: str, start: int, tokens: Sequence[int], parent: bytes = TOY.id, kind: Kind = Kind.PREFILL) -> Record:
        return toy_record(rid, start, parent, tokens, kind)

    return make


@pytest.fixture
def write_dump(tmp_path: Path) -> WriteDump:
    """``write_dump(segment, ...)``: a dump directory made without the writer, one sealed segment an argument.

    A segment is an iterable of records, or of bytes that stand for one.
    """

    def write(*contents: Iterable[Record | bytes]) -> Path:
        folder = tmp_path / "dump"
        folder.mkdir()
        (folder / MANIFEST).write_text(TOY.to_json())
        for number, items in enumerate(contents):
            body = b"".join(item if isinstance(item, bytes) else encode(item) for item in items)
            (folder / f"segment-{number:06d}.seg").write_bytes(segment_header(TOY.id) + body)
        return folder

    return write
