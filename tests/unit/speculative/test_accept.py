from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.kernels.tree_accept import accept_tree
from sglang_dflash.kernels.tree_build import build_tree
from sglang_dflash.speculative.accept import choose_tokens
from sglang_dflash.speculative.tree import DraftTree

ALL = 1 << 30
VOCABULARY = 8


def sampling_info(
    batch: int,
    *,
    temperature: list[float] | float = 1.0,
    top_k: list[int] | int = ALL,
    top_p: list[float] | float = 1.0,
    min_p: list[float] | float = 0.0,
    logit_bias_BV: torch.Tensor | None = None,
) -> SimpleNamespace:
    """What ``choose_tokens`` reads of SGLang's ``SamplingBatchInfo``; a greedy request has top-k 1."""

    def column(value: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * batch, dtype=dtype)

    top_k_B, top_p_B, min_p_B = column(top_k, torch.int32), column(top_p, torch.float32), column(min_p, torch.float32)
    return SimpleNamespace(
        temperatures=column(temperature, torch.float32)[:, None],
        top_ks=top_k_B,
        top_ps=top_p_B,
        min_ps=min_p_B,
        need_top_k_sampling=bool((top_k_B != ALL).any()),
        need_top_p_sampling=bool((top_p_B != 1).any()),
        need_min_p_sampling=bool((min_p_B > 0).any()),
        max_top_k=int(top_k_B.max()),
        is_all_greedy=bool((top_k_B == 1).all()),
        logit_bias=logit_bias_BV,
    )


@pytest.mark.parametrize("info", [None, sampling_info(2, top_k=1)])
def test_greedy_takes_the_argmax_of_every_row(info: Any) -> None:
    logits_TV = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0))
    chosen_BW = choose_tokens(logits_TV.clone(), info, 3)
    assert chosen_BW.dtype == torch.int64
    assert torch.equal(chosen_BW, logits_TV.argmax(-1).view(2, 3))


def test_empty_batch() -> None:
    assert choose_tokens(torch.zeros(0, VOCABULARY), None, 3).shape == (0, 3)


def test_each_request_of_a_mixed_batch_keeps_its_own_parameters() -> None:
    """Greedy, hot, top-k 2, top-p that leaves one token, min-p that leaves one token; many rows each."""
    torch.manual_seed(0)
    rows = 400
    logit_V = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5])
    info = sampling_info(
        5, temperature=[1.0, 50.0, 1.0, 1.0, 1.0], top_k=[1, ALL, 2, ALL, ALL], top_p=[1.0, 1.0, 1.0, 0.05, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.99],
    )  # fmt: skip
    chosen_BW = choose_tokens(logit_V.expand(5 * rows, -1).clone(), info, rows)
    support = [set(row) for row in chosen_BW.tolist()]
    assert support == [{0}, set(range(8)), {0, 1}, {0}, {0}]
    counts = chosen_BW[1].bincount(minlength=8)
    assert int(counts.max()) < 2 * int(counts.min()), "at temperature 50 all tokens are about as likely"


def test_greedy_request_breaks_ties_alike_in_greedy_and_mixed_batches() -> None:
    """The answer to a greedy request must not depend on who shares its batch."""
    torch.manual_seed(0)
    logits_TV = torch.randint(3, (8, 512)).float()
    alone_BW = choose_tokens(logits_TV[:4].clone(), sampling_info(1, top_k=1), 4)
    mixed_BW = choose_tokens(logits_TV.clone(), sampling_info(2, top_k=[1, ALL]), 4)
    assert torch.equal(mixed_BW[:1], alone_BW)


def test_rows_of_a_request_have_their_own_distribution() -> None:
    torch.manual_seed(0)
    logits_TV = torch.full((6, VOCABULARY), -1e9)
    wanted = [3, 1, 4, 1, 5, 2]
    logits_TV[torch.arange(6), wanted] = 0.0
    chosen_BW = choose_tokens(logits_TV, sampling_info(2, temperature=[0.5, 2.0]), 3)
    assert chosen_BW.reshape(-1).tolist() == wanted


@pytest.mark.parametrize("top_k", [1, ALL])
def test_logit_bias_reaches_every_row_of_its_own_request(top_k: int) -> None:
    torch.manual_seed(0)
    logits_TV = torch.zeros(9, VOCABULARY)
    logits_TV[:, 2] = 40.0
    bias_BV = torch.zeros(3, VOCABULARY)
    bias_BV[1, 6] = 80.0
    bias_BV[2, 2] = -80.0
    bias_BV[2, 0] = 40.0
    biased_BWV = logits_TV.view(3, 3, -1) + bias_BV[:, None]
    chosen_BW = choose_tokens(logits_TV, sampling_info(3, top_k=top_k, logit_bias_BV=bias_BV), 3)
    assert chosen_BW.tolist() == [[2] * 3, [6] * 3, [0] * 3]
    assert torch.equal(logits_TV.view(3, 3, -1), biased_BWV), "log-probs are taken from the biased logits"


def random_trees(rounds: int) -> DraftTree:
    """Another drafter every round: three positions, four of eight tokens each, six nodes."""
    logits_BLV = 1.5 * torch.randn(rounds, 3, VOCABULARY)
    logp_BLK, id_BLK = logits_BLV.log_softmax(-1).topk(4)
    return build_tree(id_BLK, logp_BLK, torch.zeros(rounds, dtype=torch.int64), num_nodes=6)


def context_of_rows(tree: DraftTree) -> torch.Tensor:
    """Which conditional the target has at each row: 0 at the root, 1 + a after a, 9 + 8a + b after (..., a, b)."""
    before_BW = tree.token_BW.gather(1, tree.parent_BW.clamp_min(0))
    one_BW = 1 + tree.token_BW
    two_BW = 9 + VOCABULARY * before_BW + tree.token_BW
    return torch.where(tree.depth_BW == 0, 0, torch.where(tree.depth_BW == 1, one_BW, two_BW))


def filtered(logits_CV: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The target's distribution of each context: softmax, the best top_k, of these the fewest that reach top_p."""
    probability_CV = (logits_CV.double() / temperature).softmax(-1)
    for probability_V in probability_CV:
        reached = 0.0
        for place, token in enumerate(probability_V.argsort(descending=True).tolist()):
            dropped = place >= top_k or reached > top_p
            reached += float(probability_V[token])
            if dropped:
                probability_V[token] = 0.0
    return probability_CV / probability_CV.sum(-1, keepdim=True)


def p_value(token_B: torch.Tensor, expected_C: torch.Tensor) -> float:
    """Pearson's chi-square test; 0 where something impossible was drawn."""
    count_C = token_B.bincount(minlength=len(expected_C)).double()
    possible_C = expected_C > 0
    if count_C[~possible_C].any():
        return 0.0
    mean_C = expected_C[possible_C] * len(token_B)
    statistic = ((count_C[possible_C] - mean_C) ** 2 / mean_C).sum()
    freedom = torch.tensor((int(possible_C.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def play_two_tokens(
    logits_CV: torch.Tensor, rounds: int, *, favour_draft: float = 0.0, **parameters: Any
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The first two tokens that rounds emit (a second round gives the second where the first gave one), mean length."""
    tree = random_trees(rounds)
    info = sampling_info(rounds, **parameters)
    target_BW = choose_tokens(logits_CV[context_of_rows(tree)].view(-1, VOCABULARY).clone(), info, tree.width)
    favoured_B = torch.rand(rounds) < favour_draft
    target_BW[:, 0] = torch.where(favoured_B, tree.token_BW[:, 1], target_BW[:, 0])
    acceptance = accept_tree(tree, target_BW, max_depth=3)
    first_B = acceptance.token_BD[:, 0]
    next_round_B = choose_tokens(logits_CV[1 + first_B].clone(), info, 1)[:, 0]
    second_B = torch.where(acceptance.length_B > 0, acceptance.token_BD[:, 1], next_round_B)
    return first_B, second_B, float(acceptance.length_B.float().mean())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, ALL, 1.0), (0.7, ALL, 1.0), (1.3, 5, 0.9), (1.0, ALL, 0.8)]
)
def test_round_emits_what_the_target_alone_would(temperature: float, top_k: int, top_p: float) -> None:
    torch.manual_seed(1)
    logits_CV = 0.8 * torch.randn(9 + VOCABULARY**2, VOCABULARY)
    first_B, second_B, accepted = play_two_tokens(logits_CV, 40_000, temperature=temperature, top_k=top_k, top_p=top_p)
    assert accepted > 0.3, "drafts must be accepted for this test to say anything"
    target_CV = filtered(logits_CV, temperature, top_k, top_p)
    assert p_value(first_B, target_CV[0]) > 1e-3
    pair_VV = target_CV[0][:, None] * target_CV[1 : 1 + VOCABULARY]
    assert p_value(first_B * VOCABULARY + second_B, pair_VV.reshape(-1)) > 1e-3


def test_the_same_test_sees_a_round_that_favours_drafts() -> None:
    torch.manual_seed(1)
    logits_CV = 0.8 * torch.randn(9 + VOCABULARY**2, VOCABULARY)
    first_B, _, _ = play_two_tokens(logits_CV, 40_000, favour_draft=0.15)
    assert p_value(first_B, filtered(logits_CV, 1.0, ALL, 1.0)[0]) < 1e-6
