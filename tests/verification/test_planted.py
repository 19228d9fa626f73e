"""``mw.verify`` finds what is planted and names the op."""

from __future__ import annotations

import pytest

from .planted import TABLE, Planted, found, named

# Its node is gone: the first value that is seen to differ is that of the op behind it.
NOT_NAMED = {"a pass loses a sine"}


def test_the_table() -> None:
    assert len(TABLE) >= 50
    assert len({one.name for one in TABLE}) == len(TABLE)


@pytest.mark.thin(6)
@pytest.mark.parametrize("one", TABLE, ids=lambda one: one.name)
def test_it_is_found_and_named(one: Planted) -> None:
    report = found(one)
    assert not report.passed
    assert named(one, report) or one.name in NOT_NAMED, str(report)
