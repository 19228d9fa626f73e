"""Programs that were tampered with are caught; programs that were saved are the same when they are loaded."""

from __future__ import annotations

import copy
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx

import meshwright as mw
from meshwright.errors import DesyncError, MeshwrightError, ProgramError
from meshwright.passes import PassManager
from meshwright.program import Plan, Program, build
from meshwright.program.ir.nodes import annotate, checked_value, info_of
from meshwright.testing import check_program
from meshwright.train.config import TrainConfig
from meshwright.train.model import GPT, loss_of
from meshwright.train.plan import plan_for

MESH = mw.Mesh({"dp": 2, "tp": 2})
BATCH = (torch.zeros(4, 16, dtype=torch.long),) * 2
ops = torch.ops.meshwright


def program_of(rank: int = 0, **more: Any) -> Program:
    config = TrainConfig(mesh={"dp": 2, "tp": 2}, layers=1, hidden=32, heads=4, seq=16, batch=4)
    model, plan = GPT(config, "meta"), plan_for(MESH, sequence_parallel=True)
    said = Plan(plan.layouts, plan.batch, inputs=plan.inputs, outputs=plan.outputs, **more)
    optimizer = torch.optim.AdamW(model.parameters())
    return build(model, lambda m, b: loss_of(m, *b), optimizer, BATCH, MESH, said, rank=rank).program


ONE = program_of()


def fresh(program: Program = ONE) -> Program:
    """A copy that may be changed."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    return replace(program, graph=graph)


def the(program: Program, op: Any, number: int = 0) -> fx.Node:
    return [n for n in program.graph.nodes if n.target is op][number]


def sync(program: Program) -> fx.Node:
    return next(n for n in program.collectives() if info_of(n).sync)


def drop(node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    node.graph.erase_node(node)


def with_arg(node: fx.Node, i: int, value: Any) -> None:
    node.args = (*node.args[:i], value, *node.args[i + 1 :])


TAMPERING: dict[str, Callable[[Program], Any]] = {
    "a gradient is not reduced": lambda p: drop(sync(p)),
    "an activation is not gathered": lambda p: drop(the(p, ops.all_gather.default)),
    "over another axis": lambda p: with_arg(sync(p), 2, "tp"),
    "over an axis that does not exist": lambda p: with_arg(sync(p), 2, "pp"),
    "another reduction": lambda p: with_arg(sync(p), 1, "max"),
    "along another dim": lambda p: with_arg(the(p, ops.all_gather.default), 1, 2),
    "other sizes": lambda p: with_arg(the(p, ops.all_gather.default), 2, [8, 9]),
    "as another rank": lambda p: with_arg(the(p, ops.reduce_scatter.default), 4, 1),
    "a shape in a view": lambda p: with_arg(the(p, torch.ops.aten.view.default), 1, [1, 2]),
    "a matmul of other operands": lambda p: with_arg(
        the(p, torch.ops.aten.mm.default), 1, the(p, torch.ops.aten.mm.default).args[0]
    ),
    "a value said to be of another shape": lambda p: annotate(
        the(p, torch.ops.aten.mm.default),
        value=replace(checked_value(the(p, torch.ops.aten.mm.default)), shape=(1, 1)),
    ),
    "a role that there is not": lambda p: annotate(the(p, torch.ops.aten.mm.default), role="middle"),
    "an input of another layout": lambda p: replace(
        p, inputs=(replace(p.inputs[0], spec=p.inputs[0].spec.with_(layout=mw.Layout(MESH))), *p.inputs[1:])  # type: ignore[union-attr]
    ),
    "an input less": lambda p: replace(p, inputs=p.inputs[1:]),
    "an output more": lambda p: replace(p, outputs=(*p.outputs, p.outputs[0])),
    "an update of another gradient": lambda p: with_arg(
        the(p, torch.ops.aten._fused_adamw_.tensor_lr), 1,
        the(p, torch.ops.aten._fused_adamw_.tensor_lr).args[1][::-1],  # type: ignore[index]
    ),
}  # fmt: skip


def test_as_built_it_is_well_formed() -> None:
    mw.check_program(ONE)
    mw.check_program(fresh())
    for more in ({"fsdp": "dp"}, {"shard_states": "dp"}, {"clip_grad_norm": 1.0}):
        mw.check_program(program_of(**more))


@pytest.mark.parametrize("how", TAMPERING)
def test_tampering_is_caught(how: str) -> None:
    program = fresh()
    changed = TAMPERING[how](program)
    with pytest.raises(MeshwrightError) as caught:
        mw.check_program(changed if isinstance(changed, Program) else program)
    assert any(word in str(caught.value) for word in ("%", "lists", "conversion"))  # says where


@pytest.fixture(scope="module")
def everyone() -> list[Program]:
    return [program_of(rank) for rank in MESH.ranks]


def test_all_ranks_together(everyone: list[Program]) -> None:
    check_program(everyone)
    with pytest.raises(ProgramError, match="one program for each rank"):
        check_program(everyone[:3])


def test_a_rank_that_meets_in_another_order(everyone: list[Program]) -> None:
    changed = fresh(everyone[2])
    first, second = [n for n in changed.collectives() if info_of(n).sync][-2:]
    second.append(first)
    with pytest.raises(DesyncError, match="rank 2"):
        check_program([*everyone[:2], changed, everyone[3]])


@pytest.mark.parametrize(
    "passes", [[], ["data-parallel-optimization"], ["gradient-merge:k_steps=2,weighted=false"]], ids=str
)
def test_saved_and_loaded_it_is_the_same(tmp_path: Path, passes: list[str]) -> None:
    program = PassManager(passes)(ONE)
    mw.save_program(program, tmp_path / "step.mw")
    loaded = mw.load_program(tmp_path / "step.mw")
    assert str(loaded) == str(program)
    assert [repr(c) for c in loaded.causes] == [repr(c) for c in program.causes]
    check_program(loaded)


def test_a_file_that_was_changed(tmp_path: Path) -> None:
    path = tmp_path / "step.mw"
    mw.save_program(ONE, path)
    with zipfile.ZipFile(path) as file:
        held = {n: file.read(n) for n in file.namelist()}
    text = json.loads(held["program.json"])
    changed = copy.deepcopy(text)
    changed["rank"] = 3
    for data, message in (
        (changed, r"step\.mw"),
        ({**text, "version": 99}, "program format 99, expected"),
        ({"format": "other"}, r"step\.mw"),
    ):
        with zipfile.ZipFile(path, "w") as file:
            for name, value in held.items():
                file.writestr(name, json.dumps(data) if name == "program.json" else value)
        with pytest.raises(ProgramError, match=message):
            mw.load_program(path)
    path.write_text("no program")
    with pytest.raises(ProgramError, match=r"step\.mw"):
        mw.load_program(path)
    with pytest.raises(ProgramError, match=r"absent\.mw"):
        mw.load_program(tmp_path / "absent.mw")


def test_new_tensors_have_the_default_dtype_of_the_capture() -> None:
    """Verification remembers what ops give; another default dtype is another answer."""
    mesh, before = mw.Mesh({"dp": 2}), torch.get_default_dtype()

    def run() -> Any:
        model = torch.nn.Linear(3, 5)
        loss_of = lambda m, b: (m(b) * torch.linspace(0.5, 1.5, 5)).sum()  # noqa: E731
        step = mw.compile_step(model, loss_of, None, torch.ones(2, 3), mesh=mesh, gradients=True)
        return step(torch.ones(2, 3)).dtype

    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert mw.simulate(run, mesh) == [dtype, dtype]
    finally:
        torch.set_default_dtype(before)
