from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.kernels.tree_accept import accept_tree
from sglang_dflash.kernels.tree_build import build_tree
from sglang_dflash.speculative.penalties import PathPenalties, is_penalised, path_counts, stop_tokens
from sglang_dflash.speculative.tree import DraftTree

VOCABULARY = 9


class Request:
    """What is read of SGLang's ``Req``."""

    def __init__(self, output_ids: list[int] | None = None, **sampling: Any) -> None:
        self.rid = "r"
        self.output_ids = output_ids or []
        self.eos_token_ids = {7}
        self.tokenizer = SimpleNamespace(eos_token_id=8, additional_stop_token_ids=None)
        neutral = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
        self.sampling_params = SimpleNamespace(**{**neutral, "stop_token_ids": None, **sampling})


def random_tree(seed: int, batch: int, nodes: int = 8) -> DraftTree:
    generator = torch.Generator().manual_seed(seed)
    logp_BLK, id_BLK = torch.randn(batch, 4, VOCABULARY, generator=generator).log_softmax(-1).topk(4)
    return build_tree(id_BLK, logp_BLK, torch.randint(VOCABULARY, (batch,), generator=generator), num_nodes=nodes)


def path_tokens(tree: DraftTree, index: int, row: int) -> list[int]:
    tokens = []
    while row >= 0:
        tokens.append(int(tree.token_BW[index, row]))
        row = int(tree.parent_BW[index, row])
    return tokens[::-1]


def penalised(logits_V: torch.Tensor, generated: list[int], req: Request) -> torch.Tensor:
    """One position as SGLang's penalizers see it, token by token."""
    sampling = req.sampling_params
    logits_V = logits_V.clone()
    for token in range(VOCABULARY):
        count = generated.count(token)
        logits_V[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
        if len(generated) < sampling.min_new_tokens and token in stop_tokens(req):
            logits_V[token] = -torch.inf
        if count and sampling.repetition_penalty != 1:
            scale = sampling.repetition_penalty
            logits_V[token] = logits_V[token] * scale if logits_V[token] < 0 else logits_V[token] / scale
    return logits_V


SETTINGS = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": -0.4},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 5, "stop_token_ids": {2}},
    {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 0.8, "min_new_tokens": 3},
]


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("generated", [[], [1, 1, 4, 2]])
def test_every_row_is_penalised_for_its_own_path(sampling: dict[str, Any], generated: list[int]) -> None:
    tree = random_tree(0, 3)
    plain, ours = Request([3, 3]), Request(generated, **sampling)
    reqs = [plain, ours, plain]
    penalties = PathPenalties(VOCABULARY, "cpu")
    penalties.start(reqs)
    logits_TV = torch.randn(3 * tree.width, VOCABULARY, generator=torch.Generator().manual_seed(1))
    adjusted_BWV = logits_TV.clone().view(3, tree.width, -1)
    penalties.apply(adjusted_BWV.view(-1, VOCABULARY), tree, reqs)
    logits_BWV = logits_TV.view(3, tree.width, -1)
    assert torch.equal(adjusted_BWV[::2], logits_BWV[::2]), "the others are left alone"
    for row in range(tree.width):
        expected_V = penalised(logits_BWV[1, row], generated + path_tokens(tree, 1, row), ours)
        torch.testing.assert_close(adjusted_BWV[1, row], expected_V, rtol=1e-6, atol=1e-6)


def test_what_is_committed_is_counted() -> None:
    req = Request(frequency_penalty=1.0)
    penalties = PathPenalties(VOCABULARY, "cpu")
    penalties.start([req])
    generated: list[int] = []
    for seed in range(6):
        tree = random_tree(seed, 1)
        logits_WV = torch.randn(tree.width, VOCABULARY, generator=torch.Generator().manual_seed(seed))
        penalties.apply(logits_WV, tree, [req])
        acceptance = accept_tree(tree, logits_WV.argmax(-1)[None], max_depth=4)
        penalties.commit(tree, acceptance, [req])
        last = int(acceptance.row_BD[0, int(acceptance.length_B[0])])
        generated += path_tokens(tree, 0, last)
    tree = random_tree(99, 1)
    zeros_WV = torch.zeros(tree.width, VOCABULARY)
    penalties.apply(zeros_WV, tree, [req])
    assert (-zeros_WV[0]).tolist() == [
        (generated + path_tokens(tree, 0, 0)).count(token) for token in range(VOCABULARY)
    ]
    assert len(generated) > 6, "some drafts must be accepted for this test to say anything"


def test_a_retracted_request_starts_from_what_it_had_generated() -> None:
    req = Request(frequency_penalty=1.0)
    penalties = PathPenalties(VOCABULARY, "cpu")
    penalties.start([req])
    req.output_ids = [5, 5, 1]
    penalties.start([req])
    tree = DraftTree.chain(torch.zeros(1, 0, dtype=torch.int64), torch.tensor([1]))
    logits_WV = torch.zeros(1, VOCABULARY)
    penalties.apply(logits_WV, tree, [req])
    assert (-logits_WV[0]).tolist() == [0, 2, 0, 0, 0, 2, 0, 0, 0]


def test_a_chain_counts_like_a_tree_of_one_branch() -> None:
    chain = DraftTree.chain(torch.tensor([[4, 4, 2]]), torch.tensor([4]))
    assert path_counts(chain, 0, VOCABULARY)[:, 4].tolist() == [1, 2, 3, 3]
    assert path_counts(chain, 0, VOCABULARY)[:, 2].tolist() == [0, 0, 0, 1]


def test_nothing_is_kept_of_requests_that_are_gone_or_neutral() -> None:
    penalties = PathPenalties(VOCABULARY, "cpu")
    penalties.start([Request(presence_penalty=0.1), Request()])
    gc.collect()
    assert len(penalties._followed) == 0


@pytest.mark.parametrize("sampling", SETTINGS)
def test_is_penalised(sampling: dict[str, Any]) -> None:
    assert is_penalised(Request(**sampling).sampling_params)
    assert not is_penalised(Request().sampling_params)
