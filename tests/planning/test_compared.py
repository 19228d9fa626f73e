"""``mw.layouts`` with hardware: where the planner chooses something else is a note."""

from __future__ import annotations

import torch
import torch.nn as nn

import meshwright as mw


def test_a_note_lists_what_the_planner_chooses() -> None:
    """Few rows and wide weights: on two fast ranks both shard the weights, on slow links the planner shards rows."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        x = torch.ones(4096, 64)
    mesh = mw.Mesh({"tp": 2})
    quick = mw.layouts(net, mesh, x, lambda m, x: m(x).sum())
    table = mw.layouts(net, mesh, x, lambda m, x: m(x).sum(), hardware="cpu-gloo")
    assert dict(quick) == dict(table)
    assert not any("mw.plan" in note for note in quick.notes)
    notes = [n for n in table.notes if n not in quick.notes]
    assert notes[0].startswith("mw.plan chooses other layouts")
    assert {"*.weight: replicated", "0.bias: replicated"} <= {*notes}


def test_there_is_no_note_where_both_agree() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(64, 64))
        x = torch.ones(65536, 64)
    table = mw.layouts(net, mw.Mesh({"dp": 2}), x, lambda m, x: m(x).sum(), hardware="cpu-gloo")
    assert not any("mw.plan" in note for note in table.notes)
