"""Turns forwards into records: a bounded queue, one thread, and a table of what each KV slot holds.

The table maps a KV slot to the prefix hash of the token that was written there. A request whose prefix came from the radix
cache, or whose prompt is prefilled in chunks, continues the hash of the slot before its first row, so nothing has to be known
of the scheduler. A slot that this dump never saw written gives an unknown parent, which the reader reports as missing rows.

Rows of a request that has not grown for a second are written, so a kill loses at most the last second or two.

The forward waits when the queue is full. When the thread dies (a full disk, say), the error is logged once, the dump stops,
and the server goes on serving.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from sglang_dflash.dump.record import HASH_BYTES, UNKNOWN_HASH, Kind, Record, prefix_hashes
from sglang_dflash.dump.store import SegmentWriter

logger = logging.getLogger(__name__)

RUN_ROWS = 64
IDLE_SECONDS = 1.0


@dataclass(frozen=True)
class RequestRows:
    """Consecutive rows of one request from one forward, on the host.

    Attributes:
        start: position of the first row.
        previous_slot: KV slot of position ``start - 1``; None at position 0.
        token_ids: int32 ``[rows]``.
        slots: int64 ``[rows]``, KV slots that the forward wrote.
        hidden_RF: ``[rows, taps * hidden_size]``.
    """

    rid: str
    kind: Kind
    start: int
    previous_slot: int | None
    token_ids: np.ndarray
    slots: np.ndarray
    hidden_RF: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.hidden_RF.numel() * self.hidden_RF.element_size()


@dataclass
class _Run:
    """Rows of one request that are not yet a record."""

    first: RequestRows
    parent: bytes
    pieces: list[RequestRows] = field(default_factory=list)
    touched: float = 0.0

    @property
    def end(self) -> int:
        return self.first.start + sum(len(piece.token_ids) for piece in self.pieces)

    def record(self) -> Record:
        hidden_RF = torch.cat([piece.hidden_RF for piece in self.pieces]).contiguous()
        return Record(
            kind=self.first.kind,
            rid=self.first.rid,
            start=self.first.start,
            parent=self.parent,
            token_ids=np.concatenate([piece.token_ids for piece in self.pieces]),
            payload=hidden_RF.view(torch.uint8).numpy().tobytes(),
        )


class RowAssembler:
    """Puts rows into records in the order of the forwards. Not thread-safe: one thread calls it.

    Args:
        manifest_id: prefix hash before the first token of every request.
        num_slots: KV slots of the target's pool, the padding slot included.
    """

    def __init__(self, writer: SegmentWriter, manifest_id: bytes, num_slots: int) -> None:
        self._writer = writer
        self._manifest_id = manifest_id
        self._slot_hash = np.zeros((num_slots, HASH_BYTES), dtype=np.uint8)
        self._runs: dict[str, _Run] = {}

    def add(self, rows: RequestRows) -> None:
        """Take rows in; writes a record when a run is complete."""
        if not self._finite(rows):
            self._forget(rows)
            return
        parent = self._parent(rows)
        if parent == UNKNOWN_HASH:
            self._slot_hash[rows.slots] = 0
        else:
            digests = b"".join(prefix_hashes(parent, rows.token_ids))
            self._slot_hash[rows.slots] = np.frombuffer(digests, dtype=np.uint8).reshape(-1, HASH_BYTES)
        run = self._runs.get(rows.rid)
        if run is not None and (run.first.kind != rows.kind or run.end != rows.start):
            self._write(rows.rid)
            run = None
        if run is None:
            run = self._runs[rows.rid] = _Run(rows, parent)
        run.pieces.append(rows)
        run.touched = time.monotonic()
        if rows.kind == Kind.PREFILL or run.end - run.first.start >= RUN_ROWS:
            self._write(rows.rid)

    def _parent(self, rows: RequestRows) -> bytes:
        if rows.previous_slot is None:
            return self._manifest_id
        return self._slot_hash[rows.previous_slot].tobytes()

    def _finite(self, rows: RequestRows) -> bool:
        bad_R = (~torch.isfinite(rows.hidden_RF)).any(dim=1)
        if not bool(bad_R.any()):
            return True
        positions = (bad_R.nonzero().flatten() + rows.start).tolist()
        logger.error(
            "Dump: the taps of request %s are not finite at %s positions (%s ...); its rows from there on are not stored.",
            rows.rid,
            len(positions),
            positions[:8],
        )
        return False

    def _forget(self, rows: RequestRows) -> None:
        """Rows after refused ones have an unknown parent."""
        self._write(rows.rid)
        self._slot_hash[rows.slots] = 0

    def _write(self, rid: str) -> None:
        run = self._runs.pop(rid, None)
        if run is not None:
            self._writer.append(run.record())

    def flush(self, *, idle_seconds: float = 0.0) -> None:
        """Write every incomplete run that has not grown for ``idle_seconds``: its request has ended, or waits."""
        latest = time.monotonic() - idle_seconds
        for rid in [rid for rid, run in self._runs.items() if run.touched <= latest]:
            self._write(rid)

    def close(self) -> None:
        self.flush()
        self._writer.close()


class AsyncWriter:
    """Feeds a ``RowAssembler`` from the forward thread through a queue bounded in bytes."""

    def __init__(self, assembler: RowAssembler, *, queue_bytes: int) -> None:
        self._assembler = assembler
        self._queue_bytes = queue_bytes
        self._queue: deque[list[RequestRows]] = deque()
        self._bytes = 0
        self._closed = False
        self.failure: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="dflash-dump", daemon=True)
        self._thread.start()

    def put(self, batch: list[RequestRows]) -> None:
        """Hand over one forward's rows; waits while the queue is full. After a failure or ``close`` rows are dropped."""
        size = sum(rows.num_bytes for rows in batch)
        with self._changed:
            self._changed.wait_for(lambda: self._bytes + size <= self._queue_bytes or not self._queue or self._ended)
            if not self._ended:
                self._queue.append(batch)
                self._bytes += size
                self._changed.notify_all()

    @property
    def _ended(self) -> bool:
        return self._closed or self.failure is not None

    def _run(self) -> None:
        flushed = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed, timeout=IDLE_SECONDS / 2)
                batch = self._queue[0] if self._queue else None
                closing = self._closed and batch is None
            try:
                if closing:
                    self._assembler.close()
                    return
                for rows in batch or ():
                    self._assembler.add(rows)
                if time.monotonic() - flushed >= IDLE_SECONDS / 2:
                    self._assembler.flush(idle_seconds=IDLE_SECONDS)
                    flushed = time.monotonic()
            except Exception as error:  # noqa: BLE001 - whatever it is, the server must go on serving
                self._fail(error)
                return
            self._done(batch)

    def _done(self, batch: list[RequestRows] | None) -> None:
        if batch is not None:
            with self._changed:
                self._queue.popleft()
                self._bytes -= sum(rows.num_bytes for rows in batch)
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        logger.error("The dump stopped: %s. The server goes on; requests from here on are not in the dump.", error)
        with self._changed:
            self.failure = error
            self._queue.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Write out what is queued and seal; returns when it is on disk."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
