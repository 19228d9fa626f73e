"""A pipeline explained: who computes what when, what ranks of all stages hold, as text, JSON and on the page."""

from __future__ import annotations

import json
from typing import Any

import pytest

import meshwright as mw
from meshwright.explanation import explain_program
from meshwright.explanation.pipeline import Sent
from meshwright.program import Program
from meshwright.program.ir.nodes import checked_value
from meshwright.ranks import runtime
from tests.support import stages
from tests.support.stages import DP, captured, ignoring

ZERO: dict[str, Any] = {"batch": DP, "fsdp": "dp"}
HOW: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("schedule=v", {"pp": 2}, {}),
    ("schedule=zero-bubble", {"pp": 3}, {"tie": True}),
    ("schedule=1f1b", {"pp": 2, "dp": 2}, {"tie": True, **ZERO}),
    ("schedule=looped,gather=step", {"pp": 2, "dp": 2}, ZERO),
    ("schedule=1f1b,gather=micro-batch", {"pp": 2, "dp": 2}, ZERO),
]
Exact = tuple[dict[int, tuple[int, int]], dict[int, int], dict[int, int]]


def bytes_of(tensors: Any) -> int:
    """Of what lies on this rank."""
    local = (t.to_local() if isinstance(t, mw.DistTensor) else t for t in tensors)
    return sum(t.numel() * t.itemsize for t in local)


def in_parts(program: Program, own: tuple[int, ...]) -> Exact:
    """Of a rank's stages what their parts hand on, what ``G`` makes, sums of gradients and what ``R`` makes of them."""
    how = program.pipeline
    assert how is not None
    left, gathered, sums = dict[int, tuple[int, int]](), dict[int, int](), dict[int, int]()
    for stage in own:
        of = {part: p for part in "GFBIWR" if (p := program.parts.get(how.name(part, stage))) is not None}
        given = [(i, checked_value(n)) for p in of.values() for n, i in zip(p.placeholders, p.inputs, strict=True)]
        added = {i.name: v.size for i, v in given if i.kind == "accumulator" and i.owner and "gain" not in i.owner}
        stays = {v.storage for i, v in given if i.kind not in ("edge", "held")}
        each = list[int]()
        for part in "FI":
            made = {o.name for o in of[part].outputs if o.kind == "held"} if part in of else set()
            kept = {v.storage: v.nbytes for i, v in given if i.kind == "held" and i.name in made}
            each.append(sum(n for storage, n in kept.items() if storage not in stays))
            stays |= kept.keys()
        left[stage] = each[0], each[1]
        gathered[stage] = sum(checked_value(n).size for n in of["G"].results) if "G" in of else 0
        reduced = [checked_value(n).size for n, o in zip(of["R"].results, of["R"].outputs, strict=True)
                   if o.kind == "reduced"] if "R" in of else []  # fmt: skip
        sums[stage] = sum(added.values()) + sum(reduced)
    return left, gathered, sums


@pytest.mark.thin(2)
@pytest.mark.parametrize(("how", "axes", "options"), HOW, ids=str)
def test_what_ranks_hold(how: str, axes: dict[str, int], options: dict[str, Any]) -> None:
    """Each rank says the same of all: what they store, and what their parts hand on for each micro-batch under way."""
    mesh = mw.Mesh(axes)
    blocks = 3 if "1f1b" in how else 4

    def run() -> Any:
        step, model, optimizer = captured(
            mesh, passes=[f"pipeline:micro_batches=4,{how}"], blocks=(stages.Block,) * blocks, **options
        )
        step(ignoring(0, 8))
        stored = bytes_of(model.parameters())
        states = bytes_of(t for s in optimizer.state.values() for t in s.values())
        why = step.explain()
        own = why.pipeline.ranks[mesh.coordinate(runtime.RT.rank)[0]].stages
        return why, stored, states, in_parts(step.program, own), step.program.pipeline

    made = mw.simulate(run, mesh)
    for rank, (why, stored, states, (left, gathered, sums), staging) in enumerate(made):
        pipeline, here = why.pipeline, mesh.coordinate(rank)[0]
        mine = pipeline.ranks[here]
        assert pipeline.ranks == made[0][0].pipeline.ranks
        assert (mine.parameters, mine.states) == (stored, states)
        assert {s: staging.left[s] for s in mine.stages} == left
        assert {s: staging.gathered.get(s, 0) for s in mine.stages} == gathered
        assert mine.gradients == sum(sums.values())
        assert mine.micro_batches == pipeline.schedule.held(here)
        if len(mine.stages) == 1 and "1f1b" in how:
            assert mine.activations == mine.micro_batches * left[mine.stages[0]][0]
        assert why.memory.at_peak["states"] == states
        assert why.memory.highest["activations"] >= mine.activations
        assert why.memory.highest["parameters"] >= mine.parameters + mine.gathered
        assert why.memory.peak >= mine.parameters + mine.states + mine.activations


def test_it_is_told_everywhere() -> None:
    mesh = mw.Mesh({"pp": 2})

    def run() -> Any:
        how = "pipeline:micro_batches=3,schedule=looped"
        step, _, _ = captured(mesh, passes=[how], blocks=(stages.Block,) * 4, stages={"pp": "auto"}, tie=True)
        return step.explain()

    why = mw.simulate(run, mesh)[0]
    found = json.loads(why.to_json())["pipeline"]
    assert (found["axis"], found["stages"], found["micro_batches"]) == ("pp", 4, 3)
    assert found["orders"][0][:2] == ["F0.0", "F1.0"]
    assert [r["stages"] for r in found["ranks"]] == [[0, 2], [1, 3]]
    each = {(s.src, s.dst): s.bytes for s in why.pipeline.sent if not s.once}
    assert each.keys() == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)}
    assert Sent(0, 3, True, 1, 11 * 6 * 8) in why.pipeline.sent  # the tied weight
    assert Sent(3, 0, True, 1, 11 * 6 * 8) in why.pipeline.sent  # and its gradient
    text = why.text(140)
    assert "memory per rank along pp between micro-batch actions" in text
    assert "% of the work: tokens" in text
    page = why.to_html("a step")
    assert page.count('<g class="part ') == 4 * 3 * 2
    assert "<title>B2 of stage 3</title>" in page
    assert "3 micro-batches through 4 stages by looped" in page
    assert page.count("<td>once for all micro-batches</td>") == 2


def test_a_step_that_is_not_cut_has_none() -> None:
    def run() -> Any:
        uncut = ["pipeline:micro_batches=2,schedule=uncut"]
        return [explain_program(captured(mesh, passes=passes)[0].program) for passes in ([], uncut)]

    mesh = mw.Mesh({"pp": 2})
    for why in mw.simulate(run, mesh)[0]:
        assert why.pipeline is None
        assert json.loads(why.to_json())["pipeline"] is None
        assert 'class="part ' not in why.to_html("a step")
