"""Schedules of a pipeline: bubbles and held micro-batches by the formulas of their papers, and what cannot run."""

from __future__ import annotations

import itertools

import pytest

from meshwright.errors import ProgramError
from meshwright.program import Action, Schedule, schedule

SIZES = [*itertools.product(range(1, 9), range(1, 25))]  # ranks and micro-batches


def ends(made: Schedule) -> float:
    return max(end for _, end in made.times().values())


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_bubbles_and_memory_are_those_of_the_formulas(name: str) -> None:
    """F, I and W of one unit each, B of two; fewer micro-batches than stages work too."""
    for p, m in SIZES:
        made = schedule(name, p, m)
        if name == "zero-bubble":
            assert ends(made) == (3 * m + p - 1 if m >= p else 2 * m + 2 * p - 1), (p, m)
            assert m < p or made.bubble() == pytest.approx((p - 1) / (3 * m + p - 1)), (p, m)
            most = [min(m, 2 * p - 1)] * p
        else:
            assert made.bubble() == pytest.approx(3 * (p - 1) / (3 * m + 3 * (p - 1))), (p, m)
            most = [m] * p if name == "gpipe" else [min(m, p - rank) for rank in range(p)]
        assert [made.held(rank) for rank in range(p)] == most, (p, m)


def test_looped_stages_divide_the_bubble_by_how_many_a_rank_has() -> None:
    """Whether or not ranks divide micro-batches, which go in groups of as many, or of a few more."""
    for (p, m), chunks in itertools.product(SIZES, (2, 3)):
        made = schedule("looped", p * chunks, m, chunks=chunks)
        if m >= p:
            assert made.bubble() == pytest.approx((p - 1) / (chunks * m + p - 1)), (p, m)
            group = -(-m // (m // p))
            most = [min(chunks * m, (chunks - 1) * group + 2 * (p - 1 - rank) + 1) for rank in range(p)]
            assert [made.held(rank) for rank in range(p)] == most, (p, m)


def test_the_bubble_of_v_is_half_of_zero_bubbles() -> None:
    """And as small as can be: the last rank begins p - 1 units of half a stage late, and nobody waits after that."""
    for p, m in SIZES:
        made = schedule("v", 2 * p, m, chunks=2)
        assert ends(made) == (6 * m + p - 1 if m >= p else max(4 * p + 2 * m - 1, 4 * m + 3 * p - 1)), (p, m)
        assert m < p or made.bubble() == pytest.approx((p - 1) / 2 / (3 * m + (p - 1) / 2)), (p, m)
        assert max(made.held(rank) for rank in range(p)) == min(2 * m, 2 * p + 1), (p, m)
        assert made.homes == (*range(p), *reversed(range(p)))
    for limit in (2, 3, 4):
        schedule("v", 6, 5, limit, 2).check_memory(limit)


def test_several_stages_of_a_rank_that_cannot_be() -> None:
    for name, stages, chunks, limit, message in (
        ("looped", 4, 1, None, "looped: 1 of 4 stages on a rank: 2 or more, which divide the stages was expected"),
        ("looped", 5, 2, None, "looped: 2 of 5 stages on a rank"),
        ("v", 6, 3, None, "v: 3 of 6 stages on a rank: 2, of an even number of stages was expected"),
        ("1f1b", 4, 2, None, "1f1b: 2 of 4 stages on a rank: 1 was expected"),
        ("looped", 4, 2, 2, "looped: rank 0 holds 5 micro-batches, more than 2"),
        ("v", 4, 2, 1, "v: a rank holds a micro-batch of each of its 2 stages, more than 1"),
    ):
        with pytest.raises(ProgramError, match=message):
            schedule(name, stages, 4, limit, chunks)
    apart = [[Action("F", 0, 0)], [Action("B", 0, 0)]]
    with pytest.raises(ProgramError, match="mine has F0 of stage 0 on rank 0, and other parts of that stage on rank 1"):
        Schedule(tuple(map(tuple, apart)), "mine")


def test_what_waits_for_what() -> None:
    """By the times that it says, which are those of the picture."""
    for name, (p, m) in itertools.product(("gpipe", "1f1b", "zero-bubble"), SIZES):
        made = schedule(name, p, m)
        times = made.times({"F": 1.0, "B": 2.5, "I": 1.5, "W": 0.5})
        back = "I" if name == "zero-bubble" else "B"
        for (part, s, k), (start, _) in (((a.part, a.stage, a.micro), t) for a, t in times.items()):
            if part == "F" and s:
                assert start >= times[Action("F", s - 1, k)][1]
            if part == back:
                assert start >= times[Action("F", s, k)][1]
                assert s + 1 == p or start >= times[Action(back, s + 1, k)][1]
            if part == "W":
                assert start >= times[Action("I", s, k)][1]
        for order in made.orders:
            assert all(times[a][1] <= times[b][0] for a, b in itertools.pairwise(order))
    assert str(schedule("zero-bubble", 2, 3)) == (
        "rank 0  F0 F1 F2 I0 W0 I1 W1 I2 W2 .\n"
        "rank 1  .  F0 I0 F1 I1 F2 I2 W0 W1 W2\n"
        "bubble 10.0%"
    )  # fmt: skip


def test_a_limit_is_kept() -> None:
    for limit in (1, 2, 3):
        for name in ("1f1b", "zero-bubble"):
            made = schedule(name, 4, 8, limit)
            made.check_memory(limit)
            assert made.bubble() > schedule(name, 4, 8).bubble()
    with pytest.raises(ProgramError, match="zero-bubble: rank 0 holds 3 micro-batches, more than 2"):
        schedule("zero-bubble", 2, 4).check_memory(2)


F, B = (lambda s, k: Action("F", s, k)), (lambda s, k: Action("B", s, k))


def test_one_of_the_users() -> None:
    """Two stages on one rank, and a rank that runs backwards in another order."""
    made = Schedule(((F(0, 0), F(1, 0), B(1, 0), B(0, 0)),))
    assert (made.stages, made.micro_batches, made.bubble()) == (2, 1, 0.0)
    other = Schedule(((F(0, 0), F(0, 1), B(0, 1), B(0, 0)), (F(1, 0), F(1, 1), B(1, 1), B(1, 0))))
    assert other.held(0) == 2


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ([[F(0, 0), B(0, 0)], [B(1, 0)]], "has no F0 of stage 1"),
        ([[F(0, 0), F(0, 0), B(0, 0)]], "has F0 of stage 0 twice"),
        ([[F(0, 0), B(0, 0), Action("W", 0, 0)]], "has W0 of stage 0 beside B"),
        (
            [[F(0, 0), B(0, 0), F(0, 1), B(0, 1)], [F(1, 0), F(1, 1), B(1, 0), B(1, 1)]],
            "never ends: rank 0 waits in B0 of stage 0 for B0 of stage 1, which rank 1 runs later; rank 1 waits in F1 "
            "of stage 1 for F1 of stage 0, which rank 0 runs later",
        ),
    ],
)
def test_what_cannot_run(orders: list[list[Action]], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        Schedule(tuple(map(tuple, orders)))


def test_bad_input() -> None:
    with pytest.raises(ProgramError, match="there is no schedule '1b1f': take one of gpipe, 1f1b, zero-bubble"):
        schedule("1b1f", 2, 2)
    for stages, micro, limit in ((0, 1, None), (1, 0, None), (1, 1, 0)):
        with pytest.raises(ProgramError, match="take numbers above 0"):
            schedule("1f1b", stages, micro, limit)
    with pytest.raises(ProgramError, match="gpipe holds all 4 micro-batches, more than 2"):
        schedule("gpipe", 2, 4, limit=2)
