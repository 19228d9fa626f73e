"""The book of rules: its list, its table of reductions, and inference for ops that are not in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import meshwright as mw
from conformance.paddle import from_dims_mapping
from meshwright.cli import app
from meshwright.errors import LayoutError, MeshwrightError, RuleError
from meshwright.rules import COMPOSITES, RULES, partial_table
from meshwright.rules.book import _CALLS

MESH = mw.Mesh({"x": 2, "y": 2})
OTHER = mw.Mesh({"x": 4})
R, S0, S1, P = mw.Replicate(), mw.Shard(0), mw.Shard(1), mw.Partial()


def spec(*shape, layout=(), mesh=MESH):
    return mw.Spec(shape, torch.float32, mw.Layout(mesh, layout))


def test_the_table_in_the_docs_is_the_books():
    page = (Path(__file__).parents[2] / "docs" / "reductions.md").read_text()
    missing = [line for line in partial_table().splitlines() if line not in page]
    assert not missing, "run: meshwright rules --partial"


def test_every_rule_is_listed_with_its_notation():
    listed = {e.op: e for e in mw.rules()}
    assert {*RULES, *COMPOSITES} <= listed.keys()
    own = {n for n, fn in RULES.items() if fn.__module__.startswith("meshwright.")}
    assert own <= _CALLS.keys(), "give each op an example of a call in rules/book.py"
    for name in own - COMPOSITES.keys():
        assert "->" in listed[name].notation, name
        assert ".py:" in listed[name].source, name


def test_what_the_table_says_is_what_dispatch_does():
    """Of one row each: moved elements, linear in one operand, jointly linear, not linear."""
    rows = {e.op: e for e in mw.rules()}
    calls = {
        "flip": lambda p: p.flip(0),
        "mul": lambda p: p * 2,
        "add": lambda p: p + p,
        "cumsum": lambda p: p.cumsum(0),
        "sort": lambda p: p.sort(0)[0],
        "softmax": lambda p: p.softmax(0),
        "cat": lambda p: torch.cat([p, p]),
    }

    def run():
        kept = {}
        for name, fn in calls.items():
            for op in ("sum", "avg", "max", "min", "product"):
                p = mw.from_local(torch.rand(4, 4), OTHER, [mw.Partial(op)])
                kept[name, op] = isinstance(fn(p).placements[0], mw.Partial)
        return kept

    for (name, op), passed in mw.simulate(run, OTHER)[0].items():
        assert passed == (op in rows[name].passes), (name, op)


def test_patterns_and_names_that_are_close():
    assert [e.op for e in mw.rules("layer_*")] == ["layer_norm"]
    assert {"layer_norm", "rms_norm"} <= {e.op for e in mw.rules("*_norm")}
    assert mw.rules("tanh")[0].kind == "pointwise"
    assert mw.rules("hstack")[0].kind == "composite"
    with pytest.raises(RuleError, match="no op 'lienar' is in the book of rules; did you mean 'linear'"):
        mw.rules("lienar")


def test_the_command_lists_them():
    made = CliRunner().invoke(app, ["rules", "linear"])
    assert made.output == f"{mw.rules('linear')[0]}\n"
    assert "linear: rule  ... k, n k, n -> ... n  linear in {x, bias}, {weight, bias}  rules/matmul.py:" in made.output
    assert partial_table() in CliRunner().invoke(app, ["rules", "--partial"]).output
    wrong = CliRunner().invoke(app, ["rules", "lienar"])
    assert wrong.exit_code == 2
    assert "did you mean 'linear'" in wrong.output


def test_inference_without_a_rule_is_the_replicated_answer():
    found = mw.infer_forward("matrix_exp", spec(4, 4, layout=[S0, P]))
    assert (found.kind, found.inputs, found.outputs) == ("gathered", (spec(4, 4),), (spec(4, 4),))
    assert found.bytes > 0
    assert found.strategy == ("replicate", "replicate")
    solved = mw.infer_forward("cholesky_solve", spec(4, 2, layout=[S0, R]), spec(4, 4, layout=[S0, R]))
    assert (solved.kind, solved.inputs, solved.outputs) == ("gathered", (spec(4, 2), spec(4, 4)), (spec(4, 2),))
    back = mw.infer_backward("matrix_exp", spec(4, 4), outputs=[spec(4, 4, layout=[S0, R])])
    assert back.kind == "gathered"
    joined = mw.infer_forward("hstack", [spec(4, 4, layout=[S0, R]), spec(4, 4)])
    assert (joined.kind, joined.outputs) == ("composite", (spec(4, 8, layout=[S0, R]),))
    assert mw.infer_forward("tanh", spec(4, 4, layout=[S0, S1])).kind == "rule"
    assert mw.infer_forward("argmax", spec(4, 4, layout=[S0, R]), 1).outputs[0].dtype is torch.int64


WRONG = {
    "name": (lambda: mw.infer_forward("lienar", spec(4)), "'lienar' has no rule.*did you mean 'linear'"),
    "meshes": (lambda: mw.infer_forward("add", spec(4), spec(4, mesh=OTHER)), "specs lie on different meshes"),
    "wish": (lambda: mw.infer_backward("gelu", spec(4), outputs=[spec(5)]), r"outputs= has shapes \[\(5,\)\].*\(4,\)"),
    "no spec": (lambda: mw.infer_forward("add", 3, 4), "in place of each tensor"),
    "no wish": (lambda: mw.infer_backward("gelu", spec(4), outputs=[]), "outputs= has 0 entries, the op gives 1"),
    "wishes": (lambda: mw.infer_backward("gelu", spec(4), outputs=[spec(4)] * 2), "outputs= has 2 entries"),
    "dtype": (
        lambda: mw.infer_backward("gelu", spec(4), outputs=[mw.Spec((4,), torch.float64, mw.Layout(MESH))]),
        r"outputs= has dtypes \[torch.float64\]",
    ),
    "mesh of a wish": (lambda: mw.infer_backward("gelu", spec(4), outputs=[spec(4, mesh=OTHER)]), "different meshes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_questions_are_refused(name):
    fn, told = WRONG[name]
    with pytest.raises(MeshwrightError, match=told):
        fn()


@pytest.mark.parametrize(
    ("mapping", "partial", "told"),
    [
        ([0, 0], None, r"axis 0 is both Shard\(dim=0\) and|axis 0 is both Shard"),
        ([0, -1], {0: "SUM"}, r"axis 0 is both Shard.*and Partial"),
        ([2, -1], None, "names axis 2"),
        ([-2, -1], None, "names axis -2"),
        ([-1], {0: "SUM", 5: "SUM"}, "names axis 5"),
    ],
)
def test_a_dims_mapping_that_is_no_layout_is_refused(mapping, partial, told):
    with pytest.raises(LayoutError, match=told):
        from_dims_mapping(MESH, mapping, partial)
