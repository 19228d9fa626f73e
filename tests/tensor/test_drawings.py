"""What objects draw in notebooks, and ``mw.visualize`` in the terminal."""

from __future__ import annotations

import html.parser
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import LayoutError
from meshwright.layout.picture import grid_of, listed
from meshwright.program.ir.schedules import schedule

MESH = mw.Mesh({"dp": 2, "tp": 2})


class Checker(html.parser.HTMLParser):
    """Fails where tags are not closed in order; collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def texts(drawn: str) -> list[str]:
    checker = Checker()
    checker.feed(drawn)
    assert not checker.open
    return checker.text


@pytest.mark.parametrize(
    ("placements", "shape", "ranks"),
    [
        ({"dp": mw.Shard(0)}, (4, 3), (((0, 1),), ((2, 3),))),
        ({"dp": mw.Shard(0), "tp": mw.Shard(1)}, (4, 4), (((0,), (1,)), ((2,), (3,)))),
        ({"dp": mw.Shard(0), "tp": mw.Shard(0)}, (8,), (((0,), (1,), (2,), (3,)),)),
        ({"tp": mw.Shard(1)}, (2, 5), (((0, 2), (1, 3)),)),
        ({"dp": mw.Shard(2)}, (2, 3, 4), (((0, 1), (2, 3)),)),
        ({"dp": mw.Partial()}, (), (((0, 1, 2, 3),),)),
        ({"dp": mw.Shard(0)}, (1, 2), (((0, 1),),)),
        ({"dp": mw.Shard(0)}, (0, 2), (((0, 1, 2, 3),),)),
        ({"tp": mw.Shard(0, blocks=(2, 4))}, (6,), (((0, 2), (1, 3), (0, 2), (1, 3)),)),
    ],
)
def test_blocks_have_the_ranks_that_hold_them(placements: Any, shape: tuple[int, ...], ranks: Any) -> None:
    assert grid_of(mw.Layout(MESH, placements, ndim=len(shape)), shape).ranks == ranks


def test_ranks_in_runs() -> None:
    assert listed((0, 1, 2, 3, 6, 8, 9)) == "0-3,6,8,9"


def test_a_sharding_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    mw.visualize(mw.Layout(MESH, {"dp": mw.Shard(0), "tp": mw.Shard(1)}), (4, 6))
    out = capsys.readouterr().out
    assert "0:3" in out
    assert "3:6" in out
    assert [cell for cell in ("│ 0", "│ 1", "│ 2", "│ 3") if cell not in out.replace("  ", " ")] == []


def test_only_the_first_rank_prints_and_nothing_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    def show() -> int:
        x = mw.shard_tensor(torch.ones(4, 2), MESH, {"dp": mw.Shard(0), "tp": mw.Partial()})
        with mw.explain() as why:
            mw.visualize(x)
            mw.visualize(x.spec)
            if mw.rank() == 1:
                assert "Partial" in x._repr_html_()
        return why.counts.total

    assert mw.simulate(show, MESH) == [0] * 4
    assert capsys.readouterr().out.count("Partial('sum') over tp: the value is the sum") == 2


def test_other_things_are_named() -> None:
    with pytest.raises(LayoutError, match="a Layout without shape="):
        mw.visualize(mw.Layout(MESH))
    with pytest.raises(LayoutError, match=r"got a int\. Pass a DistTensor"):
        mw.visualize(3)


def test_everything_draws_itself() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    table = mw.layouts(net, MESH, torch.ones(4, 8), lambda model, x: model(x).sum())
    drawn = [MESH, mw.Layout(MESH, {"dp": mw.Shard(0)}), table, schedule("1f1b", 2, 4)]
    found = [" ".join(texts(x._repr_html_())) for x in drawn]
    assert "dp=1" in found[0]
    assert "Shard(0)" in found[1]
    assert "0.weight" in found[2]
    assert "F3" in found[3]
    assert "bubble" in found[3]
    assert "<iframe" not in mw.Mesh({"dp": 4096})._repr_html_()


def test_a_step_and_its_explanation_draw_themselves() -> None:
    def make() -> tuple[str, str]:
        model, batch = nn.Linear(4, 1), torch.ones(4, 4)
        options: dict[str, Any] = {"mesh": MESH, "batch": {"dp": mw.Shard(0)}}
        step = mw.compile_step(
            model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), 0.1), batch, **options
        )
        return step._repr_html_(), step.explain()._repr_html_()

    step, why = mw.simulate(make, MESH)[0]
    assert "all_reduce" in texts(step)
    assert why.startswith(("<iframe", "<pre"))
