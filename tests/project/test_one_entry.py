"""Where things are added: a kind of collective is one description, a conversion one entry beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from meshwright.collective import checking, graph, ops
from meshwright.errors import ProgramError
from meshwright.passes import PassManager
from meshwright.resharding import conversions, executor

MESH = mw.Mesh({"one": 2, "entry": 2})  # axes of its own: what is known of conversions is kept


def _ring(x: torch.Tensor, dim: int, sizes: Any, group: Any) -> torch.Tensor:
    """A gather of another name."""
    call = ops._call(group, "ring_gather", "", x, (("dim", dim), ("sizes", tuple(sizes))), (dim,))
    whole = torch.Size(sum(sizes) if d == dim else n for d, n in enumerate(x.shape))
    ops._count(RING, group, 0, whole.numel() * x.element_size())
    made: torch.Tensor = checking.rendezvous(group, call, x, lambda parts: [torch.cat(parts, dim) for _ in parts])
    return made


RING = replace(ops.ALL_GATHER, name="ring_gather", run=_ring, start=None)


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    graph.add(RING)

    def prepared(step: Any, here: tuple[int, ...]) -> Any:
        (axis,) = step.axes
        group = collective.group(step.src.mesh, step.axes)
        d, sizes = executor._dim(step.src, axis), executor._lengths(step.src, step.axes, here)
        return lambda t: _ring(t, d, sizes, group)

    known = conversions.kind_of
    named = {"all_gather": "ring_gather"}
    monkeypatch.setattr(conversions, "kind_of", lambda a, b: named.get(known(a, b), known(a, b)))
    monkeypatch.setitem(executor._PREPARE, "ring_gather", prepared)
    yield
    for table in (ops.KINDS, graph.OPERATORS):
        table.pop("ring_gather")
    for target in [t for t, k in graph.COLLECTIVES.items() if k is RING]:
        graph.COLLECTIVES.pop(target)


class Sorted(nn.Module):
    """Needs its dim whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sort(-1).values


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Sorted(), nn.Linear(8, 2))


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.usefixtures("ring")
def test_a_new_collective_and_its_conversion() -> None:
    """Run, captured, counted, verified, priced and explained, with nothing else that knows of it."""
    data = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    layouts = {"0.*": {"entry": mw.Shard(0)}}

    def eager() -> Any:
        with collective.counting() as counts:
            model = mw.shard_module(_model(), MESH, layouts)
            loss = _loss(model, mw.shard_tensor(data, MESH, {"one": mw.Shard(0)}))
            loss.backward()
        return mw.unshard(loss).item(), dict(counts.kinds)

    def captured() -> Any:
        model = _model()
        step = mw.compile_step(
            model, _loss, torch.optim.SGD(model.parameters(), lr=0.0), data, mesh=MESH, layouts=layouts,
            batch={"one": mw.Shard(0)},
        )  # fmt: skip
        program = step.program
        PassManager(["data-parallel-optimization"]).run(program)
        sent = [e for e in step.explain().collectives if e.kind == "ring_gather"]
        node = next(n for n in program.collectives() if graph.COLLECTIVES[n.target] is RING)
        spoilt = (*node.args[:2], [1] * 3, *node.args[3:])
        old, node.args = node.args, spoilt
        with pytest.raises(ProgramError, match="with these arguments it gives"):
            mw.check_program(program)
        node.args = old
        return float(step(data)), program.kinds.get("ring_gather"), [e.bytes for e in sent]

    want = _loss(_model(), data).item()
    for loss, gathers in mw.simulate(eager, MESH):
        assert loss == pytest.approx(want, rel=1e-6)
        assert gathers.get("ring_gather"), gathers
    for loss, gathers, sent in mw.simulate(captured, MESH):
        assert loss == pytest.approx(want, rel=1e-6)
        assert gathers == len(sent) > 0
        assert all(b > 0 for b in sent)
