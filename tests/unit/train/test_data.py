from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.train.data import (
    Batch,
    DataError,
    Sample,
    batches,
    epoch_groups,
    fingerprint,
    load_samples,
    make_batch,
    num_anchors,
    pad_taps,
    plan,
    split,
    stream,
    tap_scale,
)

Make = Callable[..., Any]


def numbered(make_sample: Make, *, length: int, prompt_len: int, rid: str = "r", start: int = 100) -> Sample:
    """A request whose token at position p is ``start + p`` and whose taps are p."""
    position_T = torch.arange(length)
    return make_sample(rid, start + position_T, position_T[:, None].repeat(1, 3).float(), prompt_len)


def labels(batch: Batch, block_size: int) -> dict[tuple[int, int, int], int]:
    """{(sample, anchor position, slot): label}"""
    anchors = batch.anchor_BA.shape[1]
    found = {}
    for row, label in zip(batch.row_R.tolist(), batch.label_R.tolist(), strict=True):
        block, slot = divmod(row, block_size)
        sample, place = divmod(block, anchors)
        found[sample, int(batch.anchor_BA[sample, place]), slot] = label
    return found


def test_every_anchor_predicts_what_follows_it(make_sample: Make) -> None:
    sample = numbered(make_sample, length=9, prompt_len=4)
    batch = make_batch([sample], 100, block_size=3, max_length=100)
    # The last prompt token (3) is no anchor when serving; position 8 has no known successor.
    assert batch.anchor_BA.tolist() == [[4, 5, 6, 7]]
    assert batch.token_BA.tolist() == [[104, 105, 106, 107]]
    assert labels(batch, 3) == {
        (0, anchor, slot): 100 + anchor + slot for anchor in range(4, 8) for slot in (1, 2) if anchor + slot < 9
    }


def test_padding_has_no_labels(make_sample: Make) -> None:
    long, short = (
        numbered(make_sample, length=9, prompt_len=2),
        numbered(make_sample, length=5, prompt_len=3, start=500),
    )
    batch = make_batch([long, short], 100, block_size=4, max_length=100)
    assert batch.anchor_BA.tolist() == [[2, 3, 4, 5, 6, 7], [3, 0, 0, 0, 0, 0]]
    assert batch.taps_BTF[1, :, 0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0, 0]
    assert {key: label for key, label in labels(batch, 4).items() if key[0] == 1} == {(1, 3, 1): 504}


def test_max_length_cuts_taps_anchors_and_labels(make_sample: Make) -> None:
    sample = numbered(make_sample, length=40, prompt_len=10)
    batch = make_batch([sample], 100, block_size=4, max_length=16)
    assert batch.taps_BTF.shape == pad_taps([sample], 16).shape == (1, 16, 3)
    assert batch.anchor_BA.tolist() == [[10, 11, 12, 13, 14]]
    assert max(labels(batch, 4).values()) == 115
    assert num_anchors(sample, 16) == 5
    assert num_anchors(sample, 11) == num_anchors(sample, 5) == 0


@settings(max_examples=50, deadline=None)
@given(length=st.integers(3, 40), prompt_len=st.integers(0, 38), count=st.integers(1, 50), seed=st.integers(0, 9))
def test_drawn_anchors_are_distinct_generated_tokens(length: int, prompt_len: int, count: int, seed: int) -> None:
    prompt_len = min(prompt_len, length - 2)
    sample = numbered(lambda *parts: FakeSample(*parts), length=length, prompt_len=prompt_len)
    batch = make_batch([sample], count, 4, 100, stream(seed, 0, "anchors"))
    anchors = batch.anchor_BA[0].tolist()
    assert len(anchors) == min(count, length - 1 - prompt_len)
    assert anchors == sorted(set(anchors)) and prompt_len <= anchors[0] <= anchors[-1] <= length - 2
    assert all(label == 100 + anchor + slot < 100 + length for (_, anchor, slot), label in labels(batch, 4).items())
    assert sum(slot == 1 for _, _, slot in labels(batch, 4)) == len(anchors), "every anchor has a label in slot 1"


class FakeSample:
    def __init__(self, rid: str, token_ids: torch.Tensor, hidden: torch.Tensor, prompt_len: int) -> None:
        self.rid, self.token_ids, self.hidden, self.prompt_len = rid, token_ids, hidden, prompt_len


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=60),
    samples_per_batch=st.integers(1, 5),
    tokens_per_batch=st.integers(16, 80),
    epoch=st.integers(0, 3),
)
def test_an_epoch_is_every_request_once_within_the_limits(
    lengths: list[int], samples_per_batch: int, tokens_per_batch: int, epoch: int
) -> None:
    groups = epoch_groups(
        lengths, samples_per_batch=samples_per_batch, tokens_per_batch=tokens_per_batch, seed=1, epoch=epoch
    )
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) <= samples_per_batch
        assert len(group) == 1 or max(lengths[index] for index in group) * len(group) <= tokens_per_batch


def plan_of(samples: list[Any], **changes: Any) -> list[list[int]]:
    options = {"epochs": 3, "max_length": 100, "samples_per_batch": 4, "tokens_per_batch": 1000, "seed": 0}
    return plan(samples, **{**options, **changes})


def test_order_and_anchors_change_every_epoch_and_follow_the_seed(make_samples: Make) -> None:
    samples = make_samples(40)
    steps = plan_of(samples)
    assert len(steps) == 30
    epochs = [sorted(map(sorted, steps[i : i + 10])) for i in (0, 10, 20)]
    assert epochs[0] != epochs[1] != epochs[2], "other neighbours, not only another order"
    padded = sum(max(len(samples[i].token_ids) for i in group) * len(group) for group in steps)
    assert padded < 1.2 * 3 * sum(len(sample.token_ids) for sample in samples)
    assert steps == plan_of(samples) and steps != plan_of(samples, seed=1)

    def anchors(seed: int, first_step: int = 0) -> list[list[list[int]]]:
        options = {"anchors_per_sample": 3, "block_size": 4, "max_length": 100}
        return [
            b.anchor_BA.tolist() for b in batches(samples, [[0, 1]] * 4, seed=seed, first_step=first_step, **options)
        ]

    assert anchors(0)[0] != anchors(0)[1], "the same requests have other anchors in another step"
    assert anchors(0) == anchors(0) != anchors(1)
    assert anchors(0, first_step=2) == anchors(0)[2:], "a resumed run draws what an uninterrupted one does"


def test_missing_rows_are_named_and_limited(
    make_samples: Make, make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader(make_samples(10), missing=["request-3", "request-7"])
    with caplog.at_level(logging.WARNING):
        samples, missing = load_samples(reader, max_length=100, max_missing_fraction=0.2)
    assert missing == ("request-3", "request-7")
    assert [s.rid for s in samples] == [f"request-{i}" for i in range(10) if i not in (3, 7)]
    assert "Request request-3: no record holds position 3" in caplog.text and "request-7" in caplog.text
    with pytest.raises(
        DataError, match=r"(?s)2 of 10 requests .*max_missing_fraction allows 0\.1 .*request-3.*request-7"
    ):
        load_samples(reader, max_length=100, max_missing_fraction=0.1)
    reader = make_reader(make_samples(10), missing=[f"request-{i}" for i in range(8)])
    with pytest.raises(DataError, match="and 3 more"):
        load_samples(reader, max_length=100, max_missing_fraction=0.0)


def test_other_errors_of_a_reader_are_not_missing_rows(make_samples: Make, make_reader: Make) -> None:
    reader = make_reader(make_samples(2))
    reader.load = lambda ref: 1 / 0
    with pytest.raises(ZeroDivisionError):
        load_samples(reader, max_length=100, max_missing_fraction=1.0)


def test_requests_without_anchors_are_left_out(make_sample: Make, make_reader: Make) -> None:
    whole = numbered(make_sample, length=6, prompt_len=4, rid="whole")
    prompt_only, one_token = (numbered(make_sample, length=6, prompt_len=p, rid=f"{p}") for p in (6, 5))
    reader = make_reader([prompt_only, whole, one_token])
    samples, missing = load_samples(reader, max_length=100, max_missing_fraction=0.0)
    assert ([s.rid for s in samples], missing) == (["whole"], ())
    with pytest.raises(DataError, match="None of the dump's 2 requests has two generated tokens"):
        load_samples(make_reader([prompt_only, one_token]), max_length=100, max_missing_fraction=0.0)
    with pytest.raises(DataError, match="None of the dump's 0 requests"):
        load_samples(make_reader([]), max_length=100, max_missing_fraction=0.0)


def test_a_request_stays_on_its_side_of_the_split(make_samples: Make) -> None:
    training, held_out = split(make_samples(200), 0.2)
    assert 20 <= len(held_out) <= 60 and len(training) + len(held_out) == 200
    fewer = split(make_samples(100), 0.2)
    assert {s.rid for s in fewer[1]} <= {s.rid for s in held_out}
    assert split(make_samples(3), 0.0)[1] == []


def test_one_request_is_trained_on_whatever_its_hash(make_samples: Make) -> None:
    training, held_out = split(make_samples(1), 0.999999)
    assert len(training) == 1 and held_out == []


def test_fingerprint_tells_dumps_apart(make_samples: Make) -> None:
    samples = make_samples(5)
    assert fingerprint(samples) == fingerprint(make_samples(5))
    assert len({fingerprint(samples), fingerprint(samples[:4]), fingerprint(make_samples(5, seed=1))}) == 3


def test_tap_scale_evens_out_the_features(make_sample: Make) -> None:
    hidden_TF = torch.randn(400, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 1000.0, 0.1, 0.0])
    hidden_TF[0] = 1e6  # an attention sink: every request's first row
    samples = [
        make_sample(rid, torch.zeros(200, dtype=torch.int64), rows, 4) for rid, rows in (("a", hidden_TF[:200]),)
    ]
    scale_F = tap_scale(samples)
    scaled_TF = hidden_TF[1:200] * scale_F
    torch.testing.assert_close(scaled_TF[:, :3].square().mean(0).sqrt(), torch.ones(3))
    assert scale_F[3] < 1e5, "a dead feature is not blown up without bound"
