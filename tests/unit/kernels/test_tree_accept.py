from __future__ import annotations

import random

import pytest
import torch

from sglang_dflash.kernels.tree_accept import (
    accept_reference,
    accept_tree,
    accept_tree_torch,
    accept_tree_triton,
)
from sglang_dflash.speculative.tree import DraftTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("token_BW", "parent_BW", "depth_BW", "score_BW", "valid_BW")


def make_tree(token: list[list[int]], parent: list[list[int]], valid: list[list[bool]] | None = None) -> DraftTree:
    """A batch from Python lists; depths follow from the parents."""
    depth: list[list[int]] = []
    for parents in parent:
        depths: list[int] = []
        for row_parent in parents:
            depths.append(depths[row_parent] + 1 if row_parent >= 0 else 0)
        depth.append(depths)
    token_BW = torch.tensor(token)
    return DraftTree(
        token_BW=token_BW,
        parent_BW=torch.tensor(parent),
        depth_BW=torch.tensor(depth),
        score_BW=torch.zeros(token_BW.shape),
        valid_BW=torch.ones_like(token_BW, dtype=torch.bool) if valid is None else torch.tensor(valid),
    )


def random_batch(seed: int, batch: int, width: int, vocabulary: int) -> tuple[DraftTree, torch.Tensor]:
    """Trees of random shape whose siblings differ, some with padding rows that pretend to be children; target choices."""
    rng = random.Random(seed)
    tokens, parents, valids = [], [], []
    for _ in range(batch):
        real = rng.randint(1, width)
        token, parent, taken = [rng.randrange(vocabulary)], [-1], set()
        for row in range(1, width):
            free = [(p, t) for p in range(min(row, real)) for t in range(vocabulary) if (p, t) not in taken]
            row_parent, row_token = rng.choice(free)
            if row < real:
                taken.add((row_parent, row_token))
            token.append(row_token)
            parent.append(row_parent)
        tokens.append(token)
        parents.append(parent)
        valids.append([row < real for row in range(width)])
    target = [[rng.randrange(vocabulary) for _ in range(width)] for _ in range(batch)]
    return make_tree(tokens, parents, valids), torch.tensor(target)


@pytest.mark.parametrize(("width", "vocabulary", "max_depth"), [(1, 4, 0), (2, 3, 1), (9, 4, 8), (9, 2, 3), (33, 4, 7)])
def test_walk_equals_the_reference(width: int, vocabulary: int, max_depth: int) -> None:
    batch = 200
    tree, target_BW = random_batch(width, batch, width, vocabulary)
    acceptance = accept_tree(tree, target_BW, max_depth=max_depth)
    assert acceptance.row_BD.shape == acceptance.token_BD.shape == (batch, max_depth + 1)
    lengths = set()
    for request in range(batch):
        path, bonus = accept_reference(
            tree.token_BW[request].tolist(),
            tree.parent_BW[request].tolist(),
            tree.valid_BW[request].tolist(),
            target_BW[request].tolist(),
            max_depth=max_depth,
        )
        length = len(path) - 1
        lengths.add(length)
        past = max_depth - length
        assert int(acceptance.length_B[request]) == length
        assert int(acceptance.bonus_B[request]) == bonus
        assert acceptance.row_BD[request].tolist() == path + [path[-1]] * past
        drafted = tree.token_BW[request, path[1:]].tolist()
        assert acceptance.token_BD[request].tolist() == [*drafted, bonus] + [0] * past
        assert bool(tree.valid_BW[request, path].all())
    assert width == 1 or len(lengths) > 1, "the walks must differ for this test to say anything"


@pytest.mark.parametrize(("width", "vocabulary", "max_depth"), [(1, 4, 0), (2, 3, 1), (9, 2, 3), (65, 4, 15)])
def test_triton_walks_the_same_way(width: int, vocabulary: int, max_depth: int) -> None:
    tree, target_BW = random_batch(width + 1, 40, width, vocabulary)
    expected = accept_tree_torch(tree, target_BW, max_depth=max_depth)
    on_device = DraftTree(**{name: getattr(tree, name).to(DEVICE) for name in NAMES})
    actual = accept_tree_triton(on_device, target_BW.to(DEVICE), max_depth=max_depth)
    for name in ("row_BD", "length_B", "bonus_B", "token_BD"):
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name


def test_triton_walks_the_first_rows_of_wider_trees() -> None:
    tree, target_BW = random_batch(3, 40, 17, 3)
    on_device = DraftTree(**{name: getattr(tree, name).to(DEVICE) for name in NAMES})
    for width in (2, 9, 16):
        narrow, target = on_device.narrowed(width), target_BW[:, :width]
        expected = accept_tree_torch(tree.narrowed(width), target, max_depth=7)
        actual = accept_tree_triton(narrow, target.to(DEVICE), max_depth=7)
        for name in ("row_BD", "length_B", "bonus_B", "token_BD"):
            assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name


def test_chain_accepts_up_to_the_first_mismatch() -> None:
    tree = DraftTree.chain(torch.tensor([[11, 12, 13]] * 4), torch.tensor([1, 2, 3, 4]))
    target_BW = torch.tensor([[11, 12, 13, 14], [11, 12, 0, 13], [0, 12, 13, 14], [11, 0, 13, 14]])
    acceptance = accept_tree(tree, target_BW, max_depth=3)
    assert acceptance.length_B.tolist() == [3, 2, 0, 1]
    assert acceptance.bonus_B.tolist() == [14, 0, 0, 0]
    assert acceptance.token_BD.tolist() == [[11, 12, 13, 14], [11, 12, 0, 0], [0, 0, 0, 0], [11, 0, 0, 0]]
    assert acceptance.row_BD.tolist() == [[0, 1, 2, 3], [0, 1, 2, 2], [0, 0, 0, 0], [0, 1, 1, 1]]


def test_star_accepts_the_one_child_that_the_target_names() -> None:
    tree = make_tree([[9, 20, 21, 22]] * 3, [[-1, 0, 0, 0]] * 3)
    target_BW = torch.tensor([[22, 1, 2, 3], [20, 1, 2, 3], [5, 1, 2, 3]])
    acceptance = accept_tree(tree, target_BW, max_depth=1)
    assert acceptance.row_BD.tolist() == [[0, 3], [0, 1], [0, 0]]
    assert acceptance.token_BD.tolist() == [[22, 3], [20, 1], [5, 0]]


def test_single_node_emits_the_target_token() -> None:
    tree = make_tree([[7], [8]], [[-1], [-1]])
    acceptance = accept_tree(tree, torch.tensor([[7], [3]]), max_depth=0)
    assert acceptance.length_B.tolist() == [0, 0]
    assert acceptance.token_BD.tolist() == [[7], [3]]


def test_empty_batch() -> None:
    tree = DraftTree.chain(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    acceptance = accept_tree(tree, torch.zeros(0, 4, dtype=torch.int64), max_depth=3)
    assert acceptance.row_BD.shape == (0, 4) and acceptance.length_B.shape == (0,)


def test_padding_is_never_accepted_whatever_it_holds() -> None:
    """Padding that names the root as parent, itself, or -1, and carries the very token that the target wants."""
    tree = make_tree([[9, 20, 5, 5, 5]], [[-1, 0, 0, 0, -1]], [[True, True, False, False, False]])
    tree.parent_BW[0, 3] = 3
    acceptance = accept_tree(tree, torch.full((1, 5), 5), max_depth=4)
    assert acceptance.length_B.tolist() == [0]
    assert acceptance.row_BD.tolist() == [[0] * 5]


def test_target_token_of_the_root_itself_accepts_nothing() -> None:
    """The root's parent is -1: a target that repeats the bonus must not walk back onto the root."""
    tree = make_tree([[9, 1]], [[-1, 0]])
    assert accept_tree(tree, torch.tensor([[9, 9]]), max_depth=1).length_B.tolist() == [0]


def test_traces_without_a_graph_break() -> None:
    tree, target_BW = random_batch(7, 4, 9, 3)
    traced = torch.compile(accept_tree, fullgraph=True, backend="eager")(tree, target_BW, max_depth=5)
    plain = accept_tree(tree, target_BW, max_depth=5)
    for name in ("row_BD", "length_B", "bonus_B", "token_BD"):
        assert torch.equal(getattr(traced, name), getattr(plain, name)), name
