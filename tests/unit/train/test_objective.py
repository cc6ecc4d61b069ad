from __future__ import annotations

import math

import pytest
import torch

from sglang_dflash.train import objective
from sglang_dflash.train.objective import (
    CandidateSampler,
    block_accuracy,
    cross_entropy,
    cross_entropy_reference,
    slot_weights,
)

ROWS, HIDDEN, VOCAB = 23, 8, 31


@pytest.fixture
def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_RH = torch.randn(ROWS, HIDDEN, generator=generator, requires_grad=True)
    head_VH = torch.randn(VOCAB, HIDDEN, generator=generator)
    label_R = torch.randint(VOCAB, (ROWS,), generator=generator)
    label_R[::4] = (hidden_RH @ head_VH.T).argmax(dim=1)[::4]
    return hidden_RH, head_VH, label_R, torch.rand(ROWS, generator=generator)


@pytest.mark.parametrize("chunk", [1, 5, 23, 1000])
def test_chunks_equal_all_logits_at_once(
    chunk: int, problem: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "CHUNK_ROWS", chunk)
    hidden_RH, head_VH, label_R, weight_R = problem
    loss, correct_R = cross_entropy(hidden_RH, head_VH, label_R, weight_R)
    (3 * loss).backward()  # an outer factor must reach the gradient
    gradient_RH, hidden_RH.grad = hidden_RH.grad, None
    expected = cross_entropy_reference(hidden_RH, head_VH, label_R, weight_R)
    (3 * expected).backward()
    # fp32 on both sides; only the order of the sums differs.
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient_RH, hidden_RH.grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(correct_R, (hidden_RH @ head_VH.T).argmax(1) == label_R)
    assert correct_R.any() and not correct_R.all()


def test_bf16_head(problem: tuple[torch.Tensor, ...]) -> None:
    hidden_RH, head_VH, label_R, weight_R = problem
    loss, _ = cross_entropy(hidden_RH.bfloat16(), head_VH.bfloat16(), label_R, weight_R)
    loss.backward()
    gradient_RH, hidden_RH.grad = hidden_RH.grad, None
    expected = cross_entropy_reference(hidden_RH, head_VH, label_R, weight_R)
    expected.backward()
    # bf16 keeps 8 bits; logits here reach about 8.
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(gradient_RH, hidden_RH.grad, rtol=0.1, atol=2e-3)


def test_slot_weights_decay_from_the_first_draft() -> None:
    weights = slot_weights(torch.tensor([1, 2, 5, 1]), 4.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, math.exp(-0.25), math.exp(-1.0), 1.0]))


def test_enough_candidates_are_the_whole_vocabulary(problem: tuple[torch.Tensor, ...]) -> None:
    hidden_RH, head_VH, label_R, weight_R = problem
    drawn = CandidateSampler(head_VH, label_R, extra=VOCAB).draw(torch.Generator())
    assert len(drawn.head_VH) == VOCAB
    loss, correct_R = cross_entropy(hidden_RH, drawn.head_VH, drawn.index_of[label_R], weight_R)
    expected, expected_R = cross_entropy(hidden_RH, head_VH, label_R, weight_R)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(correct_R, expected_R)


def test_candidates_are_all_labels_and_some_others(problem: tuple[torch.Tensor, ...]) -> None:
    hidden_RH, head_VH, _, weight_R = problem
    label_R = torch.randint(6, (ROWS,), generator=torch.Generator().manual_seed(1)) * 5
    sampler = CandidateSampler(head_VH, label_R, extra=7)
    first, again, other = (sampler.draw(torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    seen = label_R.unique()
    assert torch.equal(first.head_VH[first.index_of[label_R]], head_VH[label_R])
    assert len(first.head_VH) == len(seen) + 7
    others = first.head_VH[len(seen) :]
    assert all(any(torch.equal(row, head_VH[t]) for t in range(VOCAB) if t not in seen) for row in others)
    assert torch.equal(first.head_VH, again.head_VH) and not torch.equal(first.head_VH, other.head_VH)
    loss, _ = cross_entropy(hidden_RH, first.head_VH, first.index_of[label_R], weight_R)
    assert loss < cross_entropy(hidden_RH, head_VH, label_R, weight_R)[0], "the documented bias: part of the partition"


def test_block_accuracy_counts_the_accepted_prefix() -> None:
    # Blocks of 4: all right; wrong in slot 2; one label only; padding.
    row_R = torch.tensor([1, 2, 3, 5, 6, 7, 9])
    correct_R = torch.tensor([True, True, True, True, False, True, False])
    accuracy_S, tau = block_accuracy(correct_R, row_R, num_anchors=4, block_size=4)
    torch.testing.assert_close(accuracy_S, torch.tensor([0.0, 2 / 3, 1 / 2, 1.0]))
    assert float(tau) == pytest.approx(1 + (3 + 1 + 0) / 3)
