"""The ledger of a captured step: what was asked, and what became of each request."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.explanation import explain_program
from meshwright.program import Plan, build
from meshwright.program.capture.ledger import OptionUse, ledger_of
from tests.support.optimizers import Signs

MESH = mw.Mesh({"dp": 2, "tp": 2, "one": 1})
COLUMN, ROW = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}
ADAM, SGD = torch.optim.AdamW, functools.partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.idle = nn.Linear(8, 16), nn.Linear(16, 8), nn.Identity()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.up(input=x).relu()) * self.scale
        q = x.view(1, 1, 4, 8)
        return F.scaled_dot_product_attention(q, q, q).view(4, 8)


def asked(make: Any = ADAM, passes: Any = (), mesh: mw.Mesh = MESH, **said: Any) -> list[OptionUse]:
    net = Net()
    opt = None if make is None else make(net.parameters())
    plan = Plan(**said)
    built = build(net, lambda m, b: m(b).square().mean(), opt, torch.randn(4, 8), mesh, plan)
    manager = mw.passes.PassManager(passes)
    return list(ledger_of(net, opt, plan, built, manager(built.program), manager.passes))


BATCH = {"batch": {"dp": mw.Shard(0)}}
TP = {"layouts": {"up.*": COLUMN, "down.weight": ROW}}


@pytest.mark.parametrize(
    ("said", "option", "words"),
    [
        (TP, "layouts", "'up.*': {'tp': Shard(0)}: applied: 2: up.bias, up.weight"),
        ({"layouts": {"*.bias": {"tp": mw.Replicate()}, "up.bias": COLUMN, "down.bias": COLUMN}}, "layouts",
         "'*.bias': {'tp': Replicate()}: WITHOUT EFFECT: later globs match all that it matches"),
        ({"layouts": {"up.weight": {"one": mw.Shard(0)}}}, "layouts", "WITHOUT EFFECT: the axis one has one rank"),
        ({"by": "element"}, "by", "'element': WITHOUT EFFECT: AdamW, of which that is known"),
        ({"by": "element", "make": Signs}, "by", "'element': applied: Signs"),
        (BATCH, "batch", "{'dp': Shard(0)}: applied: 1: batch"),
        ({**BATCH, "layouts": {"batch": {"dp": mw.Shard(1)}}}, "batch", "WITHOUT EFFECT: layouts= says it of"),
        ({"inputs": {"up": {}}}, "inputs", "'up': {}: WITHOUT EFFECT: the step calls no such module that is given"),
        ({"inputs": {"*": {}, "down": {}, "": {}}}, "inputs", "'down': {}: applied: 1: down"),
        ({"outputs": {"idle": {}}}, "outputs", "'idle': {}: WITHOUT EFFECT: the step calls no such module"),
        ({"outputs": {"down": {"tp": mw.Shard(0)}}}, "outputs", "'down': {'tp': Shard(0)}: applied: 1: down"),
        ({"fsdp": {"scale": "dp"}}, "fsdp", "'scale': dp: WITHOUT EFFECT: no dim of what it"),
        ({"fsdp": "dp"}, "fsdp", "'dp': applied: 4 of 5: up.weight"),
        ({"fsdp": "one"}, "fsdp", "WITHOUT EFFECT: the axis one has one rank"),
        ({"reshard_after_forward": False}, "reshard_after_forward",
         "False: WITHOUT EFFECT: no parameter is gathered or copied for use"),
        ({"reshard_after_forward": False, "fsdp": "dp"}, "reshard_after_forward", "False: applied: 4: "),
        ({"offload": {"up.*": "cpu"}}, "offload", "'up.*': cpu: applied: 2: up.weight, up.bias"),
        ({"shard_states": "dp"}, "shard_states", "'dp': applied: 8 of "),
        ({"make": SGD, "shard_states": "dp"}, "shard_states", "'dp': applied: SGD keeps no states; gradients follow"),
        ({"make": None, "shard_states": "dp"}, "shard_states", "'dp': WITHOUT EFFECT: there is no optimizer"),
        ({"make": torch.optim.Adagrad, "shard_states": "dp"}, "shard_states", "applied: Adagrad updates behind"),
        ({"make": None, "clip_grad_norm": 1.0}, "clip_grad_norm", "1.0: applied: gradients returned"),
        ({"precision": mw.Precision(compute=torch.float32)}, "precision", "WITHOUT EFFECT: all it matches is"),
        ({"precision": mw.Precision(gather=torch.bfloat16)}, "precision", "WITHOUT EFFECT: nothing that it"),
        ({"precision": {"up": mw.Precision(grad_comm=torch.bfloat16)}, **BATCH}, "precision",
         "grad_comm=torch.bfloat16: applied: 2"),
        ({"strategies": {"scaled_dot_product_attention": {"dp": "heads"}}}, "strategies",
         "dp=heads: WITHOUT EFFECT: dp does not split the sequence of any of 1"),
        ({"strategies": {"scaled_dot_product_attention": {"dp": "gather"}}, **BATCH}, "strategies",
         "dp=gather: applied: 1 of 1"),
        ({"passes": ["data-parallel-optimization"], **BATCH}, "pass", "data-parallel-optimization"),
        (BATCH, "mesh", "tp=2: WITHOUT EFFECT: nothing is split over it: its ranks do the same work"),
    ],
)  # fmt: skip
def test_each_request_is_there_with_what_became_of_it(said: Any, option: str, words: str) -> None:
    lines = [str(e) for e in asked(**said) if e.option == option]
    assert any(words in line for line in lines), lines


def test_every_option_that_is_said_has_an_entry() -> None:
    said = {
        **TP, **BATCH, "inputs": {"down": {}}, "outputs": {"up": {}}, "fsdp": "dp", "offload": "cpu",
        "reshard_after_forward": False, "clip_grad_norm": 1.0, "gradients": True,
        "precision": mw.Precision(reduce=torch.float64),
        "strategies": {"scaled_dot_product_attention": {"tp": "heads"}},
    }  # fmt: skip
    options = {e.option for e in asked(**said)}
    assert options == {*said}
    assert not any(e.option == "mesh" for e in asked(**TP, **BATCH))
    assert asked(mesh=mw.Mesh({"dp": 1})) == []


def test_rows_of_experts_are_applied_where_tokens_and_experts_are_split() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Parameter(torch.randn(4, 6, 8)), torch.nn.Parameter(torch.randn(4, 8, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, ids = x[:, :4].softmax(-1).topk(1)
            return mw.experts(x, ids, weights, self.up, self.down).square().mean()

    def rank(batch: Any) -> str:
        net, layouts = Layer(), {"up": {"ep": mw.Shard(0)}, "down": {"ep": mw.Shard(0)}}
        wish = {"experts": {"ep": "rows"}}
        step = mw.compile_step(
            net, lambda m, x: m(x), None, torch.randn(8, 8), mesh=mesh, layouts=layouts, batch=batch, strategies=wish
        )
        return next(str(e) for e in step.ledger if e.option == "strategies")

    mesh = mw.Mesh({"ep": 2})
    assert "applied: 1 of 1 experts" in mw.simulate(lambda: rank({"ep": mw.Shard(0)}), mesh)[0]
    words = "WITHOUT EFFECT: ep splits not both tokens and experts of any of 1 experts"
    assert words in mw.simulate(lambda: rank({}), mesh)[0]


def test_a_step_has_it_and_explains_it() -> None:
    def rank() -> None:
        net = Net()
        said = {"layouts": {"up.weight": {"one": mw.Shard(0)}}, "init": lambda m: None}
        loss = lambda m, b: m(b).square().mean()  # noqa: E731
        step = mw.compile_step(net, loss, ADAM(net.parameters()), torch.randn(4, 8), mesh=MESH, **BATCH, **said)
        lost = {e.option for e in step.ledger if not e.applied}
        assert lost == {"layouts", "init", "mesh"}
        why = step.explain()
        assert why.ledger == step.ledger
        assert "WITHOUT EFFECT: the axis one has one rank" in " ".join(why.text(200).split())
        assert "What was asked" in why.to_html()
        assert why.to_dict()["ledger"][0]["option"] == "layouts"
        assert explain_program(step.program).ledger == ()

    mw.simulate(rank, MESH)
