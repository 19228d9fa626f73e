"""The tests of ``make test-quick`` are there, and there are some of each room of the core."""

from __future__ import annotations

from tests.support.quick import QUICK, listed
from tests.support.seeds import ROOT

# Rooms around the core: what starts processes, reads files of others, prints, or needs libraries of others.
LEFT_TO_MAKE_TEST = {"cli", "generator", "integrations", "planning", "testing", "train", "verification"}


def test_all_are_there() -> None:
    paths = [test.partition("::")[0] for test in listed()]
    assert not [path for path in paths if not (ROOT / path).is_file()]
    assert len(paths) == len(set(paths))


def test_each_room_of_the_core_has_some() -> None:
    rooms = {path.parent.name for path in (ROOT / "src" / "meshwright").glob("*/__init__.py")}
    assert rooms - LEFT_TO_MAKE_TEST <= set(QUICK)
