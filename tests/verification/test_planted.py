"""``mw.verify`` finds what is planted and names the op."""

from __future__ import annotations

import pytest

from .blind import BLIND
from .planted import TABLE, Planted, found, named

# Its node is gone: the first value that is seen to differ is that of the op behind it.
NOT_NAMED = {"a pass loses a sine"}


def test_the_table() -> None:
    assert len(TABLE) >= 50
    assert len({one.name for one in TABLE}) == len(TABLE)


# What it was expected to be named by in the first run, and is not; a memo of what nothing updates is no error.
BLIND_NOT_NAMED = {
    "a buffer has what a rank saw of the batch": "mean", "ranks call a module twice": "cos",
    "a branch goes by the size of a part": "sin",
}  # fmt: skip
NO_ERROR = {"a memo of a weight outlives its update"}


@pytest.mark.thin(5)
@pytest.mark.parametrize("one", BLIND, ids=lambda one: one.name)
def test_other_classes_are_found_and_named(one: Planted) -> None:
    report = found(one)
    assert report.passed == (one.name in NO_ERROR)
    if one.name in BLIND_NOT_NAMED:
        assert report.departures[0].op == BLIND_NOT_NAMED[one.name]
    elif not report.passed:
        assert named(one, report), str(report)


@pytest.mark.thin(6)
@pytest.mark.parametrize("one", TABLE, ids=lambda one: one.name)
def test_it_is_found_and_named(one: Planted) -> None:
    report = found(one)
    assert not report.passed
    assert named(one, report) or one.name in NOT_NAMED, str(report)
