from __future__ import annotations

import pytest

from sglang_dflash.speculative.budget import WINDOW_ROUNDS, Budget, StepCosts, widths_to_verify

WIDTHS = (8, 17, 33)


def costs(*, by_width: tuple[float, float, float] = (1.0, 1.1, 1.4), per_token: float = 0.0) -> StepCosts:
    """Two batch sizes; at the larger one every width costs in proportion to its rows."""
    return StepCosts(
        (1, 32),
        {width: (ms, width / 8) for width, ms in zip(WIDTHS, by_width, strict=True)},
        dict.fromkeys(WIDTHS, (per_token, per_token)),
    )


@pytest.mark.parametrize(
    ("block", "width", "expected"),
    [
        (8, 33, (8, 17, 33)),
        (8, 65, (8, 17, 33, 65)),
        (8, 17, (8, 17)),
        (8, 9, (8, 9)),
        (8, 8, (8,)),
        (8, 5, (5,)),
        (16, 33, (16, 33)),
        (2, 17, (2, 3, 5, 9, 17)),
    ],
)
def test_widths_go_from_the_chain_to_the_width_that_was_asked_for(
    block: int, width: int, expected: tuple[int, ...]
) -> None:
    assert widths_to_verify(block, width) == expected


def test_costs_pad_to_the_next_measured_batch_and_grow_in_proportion_beyond() -> None:
    table = StepCosts((1, 4), {8: (1.0, 2.0)}, {8: (0.5, 0.25)})
    assert table.ms(8, 1, 0) == 1.0
    assert table.ms(8, 2, 0) == 2.0
    assert table.ms(8, 8, 0) == 4.0
    assert table.ms(8, 3, 10) == 4.5


def test_before_a_tree_was_seen_the_cheapest_round_is_chosen() -> None:
    assert Budget(costs()).choose(1, 0, 0.0) == 8


def test_a_tree_that_promises_more_than_it_costs_is_taken_and_one_that_does_not_is_left() -> None:
    budget = Budget(costs())
    budget.promise((2.0, 2.6, 2.8))
    assert budget.choose(1, 0, 0.0) == 17
    assert budget.choose(32, 0, 0.0) == 8
    budget.promise((1.2, 1.9, 3.2))
    assert budget.choose(1, 0, 0.0) == 33


def test_long_contexts_make_rows_cheap_beside_what_every_width_reads() -> None:
    budget = Budget(costs(by_width=(1.0, 1.5, 2.0), per_token=0.001))
    budget.promise((2.0, 2.4, 2.6))
    assert budget.choose(1, 0, 0.0) == 8
    assert budget.choose(1, 100_000, 0.0) == 33


def test_promises_are_corrected_by_what_is_accepted() -> None:
    budget = Budget(costs(by_width=(1.0, 1.1, 1.2)))
    budget.promise((2.0, 2.15, 2.2))
    assert budget.choose(1, 0, 0.0) == 8
    for _ in range(60):
        budget.choose(1, 0, 0.0)
        budget.accepted([3, 3])
    # Three drafts where one was promised: every draft counts three times, the bonus once.
    assert budget.choose(1, 0, 0.0) == 17


def test_where_the_host_is_the_limit_the_widest_tree_costs_nothing() -> None:
    shared = []

    def share(number: float) -> float:
        shared.append(number)
        return number

    budget = Budget(costs(by_width=(1.0, 1.5, 2.0)), share=share)
    budget.promise((2.0, 2.4, 2.6))
    chosen = [budget.choose(1, 0, 4.0 * turn) for turn in range(WINDOW_ROUNDS + 2)]
    assert chosen[0] == 8 and chosen[-1] == 33
    assert shared == [4.0]


def test_rounds_that_take_their_device_time_are_not_the_hosts_fault() -> None:
    budget = Budget(costs(by_width=(1.0, 1.5, 2.0)))
    budget.promise((2.0, 2.4, 2.6))
    assert {budget.choose(1, 0, 1.05 * turn) for turn in range(3 * WINDOW_ROUNDS)} == {8}


def test_a_round_that_was_never_chosen_does_not_count() -> None:
    budget = Budget(costs())
    budget.accepted([1])
    budget.accepted([])
    assert budget.choose(1, 0, 0.0) == 8
