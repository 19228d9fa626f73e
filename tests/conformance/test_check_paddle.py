"""``meshwright check paddle``: verdicts worked out by hand, the sample's counts, and the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import meshwright as mw
from conformance.paddle import CaseError, Score, read_cases, score, scoring
from conformance.paddle.command import RECORDED
from conformance.paddle.report import percent, tallies
from conformance.paddle.scoring import GAPS, REASONS
from conformance.paddle.steps import builder
from meshwright.cli import app
from meshwright.cli import check as yardsticks
from meshwright.dispatch import forget_ops
from meshwright.rules import RULES, notation
from meshwright.tensor import Inference, of_rule

DATA = Path(__file__).parent / "data"
SAMPLES = [DATA / "paddle_cases.jsonl", DATA / "paddle_cases_pir.jsonl"]
Rows = list[Any]
R = mw.Replicate()


def tensor(shape: list[int], mapping: Any, partial: Any = ()) -> dict[str, Any]:
    """``mapping``: a mesh axis or -1 per dim, or lists of axes per dim."""
    multi = {"multi": mapping} if any(isinstance(a, list) for a in mapping) else {}
    plain = [a if isinstance(a, int) else (a or [-1])[0] for a in mapping]
    return {"shape": shape, "dims_mapping": plain, "partial": list(partial)} | multi


def told(mapping: Any, **partial: str) -> dict[str, Any]:
    axes = {name.removeprefix("axis"): word for name, word in partial.items()}
    return tensor([], mapping, [int(a) for a in axes]) | {"reduce_type": axes}


def verdict(
    tmp_path: Path,
    op: str,
    inputs: Rows,
    result_inputs: Rows,
    result_outputs: Rows,
    outputs: Rows | None = None,
    **attrs: Any,
) -> Score:
    case = {"op": op, "direction": "backward" if outputs else "forward", "mesh": [2, 4], "attrs": attrs} | {
        "inputs": inputs,
        "outputs": outputs or [],
        "result_inputs": result_inputs,
        "result_outputs": result_outputs,
    }
    path = tmp_path / "case.jsonl"
    path.write_text(json.dumps(case))
    return score(next(read_cases(path)))


# ------------------------------------------------------------------------------------------------- verdicts


def test_agree_when_nothing_moves(tmp_path: Path) -> None:
    found = verdict(
        tmp_path,
        "matmul",
        [tensor([64, 32], [-1, 0]), tensor([32, 48], [0, 1])],
        [told([-1, 0]), told([0, 1])],
        [told([-1, 1], axis0="SUM")],
    )
    assert (found.verdict, found.note) == ("agree", "")
    assert found.ours is not None
    assert found.ours.bytes == 0
    assert found.ours.outputs == (mw.Layout(found.case.mesh, [mw.Partial(), mw.Shard(1)]),)


def test_freer_where_a_pending_sum_passes(tmp_path: Path) -> None:
    found = verdict(
        tmp_path, "transpose", [tensor([8, 16], [-1, -1], [0])], [told([-1, -1])], [told([-1, -1])], perm=[1, 0]
    )
    assert found.verdict == "freer"
    assert found.ours is not None
    assert found.theirs is not None
    assert (found.ours.bytes, found.theirs.bytes) == (0, 2 * 8 * 16 * 4 / 2)  # an all-reduce over two ranks


def test_same_cost_counts_the_ring(tmp_path: Path) -> None:
    found = verdict(tmp_path, "softmax", [tensor([8, 16], [0, 1])], [told([0, -1])], [told([0, -1])], axis=-1)
    assert found.verdict == "same cost"
    assert found.ours is not None
    assert found.ours.bytes == 8 * 16 * 4 / 2 * 3 / 4  # an all-gather over four ranks of what one of two halves holds


def test_a_split_that_cannot_stay_moves_to_another_dim(tmp_path: Path) -> None:
    given = [tensor([8, 16], [0, -1]), tensor([8, 16], [0, -1])]
    found = verdict(tmp_path, "concat", [given], [[told([-1, 0])] * 2], [told([-1, 0])], axis=0)
    assert found.verdict == "freer"  # it stays where it is, by blocks
    assert found.ours is not None
    assert found.ours.bytes == 0
    assert found.ours.outputs[0].placements == (mw.Shard(0, blocks=(8, 8)), R)
    assert found.theirs is not None
    assert found.theirs.bytes == 2 * 8 * 16 * 4 / 2 / 2  # two all-to-alls, of half a tensor each


def test_a_false_claim_of_paddle_is_no_target(tmp_path: Path) -> None:
    claim = ([tensor([8, 16], [-1, 1])], [told([-1, 1])], [told([-1], axis1="SUM")])
    assert verdict(tmp_path, "logsumexp", *claim, axis=[1], keepdims=False).verdict == "unsound"
    assert verdict(tmp_path, "p_norm", *claim, axis=1, porder=2.0).verdict == "unsound"
    assert verdict(tmp_path, "p_norm", *claim, axis=1, porder=1.0).verdict == "agree"  # of order 1 it is true


def test_what_is_no_layout_of_the_output_is_no_target(tmp_path: Path) -> None:
    found = verdict(tmp_path, "relu", [tensor([8, 16], [0, 1])], [told([0, 1])], [told([0])])
    assert (found.verdict, found.note) == ("unsound", "the result has a layout of 1 dims for output 0, which has 2")


def test_unsupported_says_why(tmp_path: Path) -> None:
    found = verdict(tmp_path, "roi_align", [tensor([8, 16], [0, 1])] * 2, [told([0, 1])] * 2, [told([0, 1])])
    assert (found.verdict, found.note) == ("unsupported", "'roi_align' is not in the table of ops")
    heads = [tensor([8, 64, 16, 32], [0, -1, 1, -1])] * 3
    found = verdict(tmp_path, "flash_attention", heads, [told([0, -1, 1, -1])] * 3, [], return_softmax=True)
    assert (found.verdict, found.note) == ("unsupported", "with these attributes it is none of ours")


# ------------------------------------------------------------------------------------------ several ops of ours


def test_a_composition_pays_for_what_is_converted_on_the_way(tmp_path: Path) -> None:
    x = tensor([8, 16], [1, -1])
    found = verdict(tmp_path, "swiglu", [x, tensor([8, 16], [-1, -1])], [told([1, -1])] * 2, [told([1, -1])])
    assert found.verdict == "agree"
    found = verdict(tmp_path, "cumsum", [x], [told([-1, -1])], [told([-1, -1])], axis=0, exclusive=True)
    assert found.ours is not None
    assert found.ours.bytes == 3 * 16 * 4  # the first rank sends its total, a row, to the three behind it
    pending = [tensor([8, 16], [-1, -1], [0])] * 3
    found = verdict(tmp_path, "add_n", [pending], [[told([-1, -1], axis0="SUM")] * 3], [told([-1, -1], axis0="SUM")])
    assert found.verdict == "agree"


def test_a_false_claim_about_a_composition_is_no_target(tmp_path: Path) -> None:
    x, labels = tensor([64, 32], [-1, 1]), tensor([64, 32], [-1, 1])
    attrs = {"soft_label": True, "use_softmax": False, "axis": -1}
    claim = ([x, labels], [told([-1, 1])] * 2, [told([-1, 1]), told([-1, -1])])  # a loss of a part of the classes
    found = verdict(tmp_path, "cross_entropy_with_softmax", *claim, **attrs)
    assert found.verdict in ("unsound", "same cost", "agree", "freer")
    rows = [tensor([64, 32], [0, 1]), tensor([32, 2], [0, -1]), tensor([32, 2], [0, -1])]
    found = verdict(tmp_path, "moe_combine", rows, [told([0, 1]), told([0, -1]), told([0, -1])], [told([0, 1])])
    assert found.verdict == "unsound"  # rows of other ranks are not here


def test_an_op_without_a_rule_is_gathered(tmp_path: Path) -> None:
    given = [[tensor([8, 16], [0, -1])], [tensor([8, 4], [-1, -1])]]
    found = verdict(tmp_path, "replicated", given, [told([-1, -1])], [told([-1, -1])])
    assert found.verdict == "same cost"


# ----------------------------------------------------------------------------------------------------- reasons


def test_stricter_for_a_reason(tmp_path: Path) -> None:
    x, row = tensor([8, 16, 32], [-1, -1, -1]), tensor([16, 32], [-1, -1], [1])
    kept = told([-1, -1], axis1="SUM")
    found = verdict(tmp_path, "multiply", [x, row], [told([-1] * 3), kept], [told([-1] * 3, axis1="SUM")])
    assert (found.verdict, found.reason) == ("stricter", "owed")  # the row is smaller than the product
    given = [tensor([8, 16], [-1, -1]), tensor([1, 16], [0, -1]), tensor([8, 1], [0, -1])]
    found = verdict(tmp_path, "where", given, [told([0, -1])] * 3, [told([0, -1])])
    assert (found.verdict, found.reason) == ("stricter", "refused")  # a row that one rank has, for all
    two = [[tensor([8, 16], [0, 1]), tensor([8, 16], [1, 0])]]
    found = verdict(tmp_path, "stack", two, [[told([1, 0])] * 2], [told([1, -1, 0])], axis=1)
    assert (found.verdict, found.reason) in (("stricter", "tie"), ("same cost", ""))


def test_the_docs_list_every_gap() -> None:
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    for name in (*REASONS, *GAPS):
        assert f"`{name}`" in page


def test_every_stricter_case_of_the_sample_has_a_reason() -> None:
    found = [s for path in SAMPLES for s in map(score, read_cases(path)) if s.verdict == "stricter"]
    assert all(s.reason in REASONS and s.note for s in found)


def test_a_rule_that_raises_is_an_error(tmp_path: Path) -> None:
    found = verdict(tmp_path, "concat", [[tensor([8, 16], [-1, 0]), tensor([9, 17], [-1, 0])]], [[]], [], axis=0)
    assert found.verdict == "error"
    assert "RuleError" in found.note


def test_order_of_axes_and_views(tmp_path: Path) -> None:
    by_both = [[1, 0], []]
    found = verdict(tmp_path, "relu", [tensor([8, 16], by_both)], [told(by_both)], [told(by_both)])
    assert found.verdict == "agree"
    swapped = [tensor([48, 32], [1, 0]), tensor([64, 48], [-1, 1])]
    results = [told([1, 0]), told([-1, 1])], [told([0, -1], axis1="SUM")]
    assert verdict(tmp_path, "matmul", swapped, *results, trans_x=True, trans_y=True).verdict == "agree"
    heads = tensor([8, 64, 16, 32], [0, -1, 1, -1])
    asked = told([0, -1, 1, -1])
    found = verdict(tmp_path, "flash_attention", [heads] * 3, [asked] * 3, [asked], causal=True)
    assert found.verdict == "agree"


# ------------------------------------------------------------------------------------------------- backward


def test_backward_wishes_reach_replicated_inputs(tmp_path: Path) -> None:
    given, wish = [tensor([8, 16, 32], [-1, -1, -1])], [tensor([16], [1])]
    found = verdict(tmp_path, "sum", given, [told([-1, 1, -1])], [told([1])], wish, axis=[0, 2])
    assert found.verdict == "agree"
    assert found.ours is not None
    assert found.ours.inputs == (mw.Layout(found.case.mesh, [R, mw.Shard(1)]),)
    # Whoever asks for nothing has not divided the work.
    assert verdict(tmp_path, "sum", given, [told([-1] * 3)], [told([1])], wish, axis=[0, 2]).verdict == "freer"


def test_backward_pays_for_outputs_that_are_not_as_wished(tmp_path: Path) -> None:
    found = verdict(
        tmp_path,
        "matmul",
        [tensor([64, 32], [-1, 1]), tensor([32, 48], [-1, -1])],
        [told([-1, 1]), told([1, -1])],
        [told([-1, -1], axis1="SUM")],
        [tensor([64, 48], [-1, -1])],
    )
    assert found.verdict == "freer"
    assert found.ours is not None
    assert found.theirs is not None
    assert found.theirs.bytes == 2 * 64 * 48 * 4 * 3 / 4
    assert found.ours.bytes == 64 * 32 * 4 * 3 / 4


def spec(shape: tuple[int, ...], *placements: Any, order: Any = None) -> mw.Spec:
    return mw.Spec(shape, torch.float32, mw.Layout(mw.Mesh({"a": 2, "b": 4}), placements, order=order))


def test_infer_backward_slices_what_is_larger_than_the_output() -> None:
    found = mw.infer_backward("sum", spec((8, 16), R, R), 1, outputs=[spec((8,), mw.Shard(0), R)])
    assert found.inputs[0].layout.placements == (mw.Shard(0), R)
    assert found.bytes == 0


def test_infer_backward_takes_the_order_of_the_wish() -> None:
    wish = spec((64, 48), mw.Shard(0), mw.Shard(0), order={0: ["b", "a"]})
    found = mw.infer_backward("matmul", spec((64, 32), R, R), spec((32, 48), R, R), outputs=[wish])
    assert found.outputs[0].layout == wish.layout
    assert found.inputs[0].layout.dims == {0: ("b", "a")}


def test_infer_backward_weighs_the_axes_together() -> None:
    given = [spec((16, 64, 32), mw.Shard(2), mw.Shard(1)), spec((32, 48), R, mw.Shard(1))]
    wish = spec((16, 64, 48), R, mw.Shard(0))
    found = mw.infer_backward("matmul", *given, outputs=[wish])
    # Axis by axis the contraction would stay split over a, and leave a sum of the large output to be reduced.
    assert found.inputs[0].layout.placements == (R, mw.Shard(0))
    assert found.outputs[0].layout == wish.layout


def test_norm_of_order_one_is_a_pending_sum() -> None:
    found = mw.infer_forward("linalg_vector_norm", spec((8, 16), mw.Shard(1), R), 1, 1)
    assert found.outputs[0].layout.placements == (mw.Partial(), R)
    mw.check_rule("linalg_vector_norm", torch.randn(5, 3, dtype=torch.float64), 1, (0, 1))


# --------------------------------------------------------------------------------------------------- sample


def counts(paths: list[Path]) -> dict[str, dict[str, int]]:
    scores = [score(case) for path in paths for case in read_cases(path)]
    return {d: dict(t.total) for d, t in tallies(scores).items()}


def test_counts_of_the_sample() -> None:
    found = counts(SAMPLES)
    assert found["forward"] == {
        "agree": 76,
        "freer": 39,
        "same cost": 35,
        "unsound": 5,
        "unsupported": 2,
    }
    assert found["backward"] == {"agree": 30, "freer": 2}
    assert percent(found["both"]).get("stricter", 0) <= 5


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Gives ops other rules."""

    def told(**given: Any) -> None:
        for name, rule in given.items():
            monkeypatch.setitem(RULES, name, rule)
        forget_ops()

    yield told
    monkeypatch.undo()
    forget_ops()


def test_a_rule_that_asks_for_too_much_is_stricter(rules: Callable[..., None]) -> None:
    before = counts(SAMPLES)["forward"].get("stricter", 0)
    rules(matmul=lambda x, y: notation("... m k, k n -> ... m n", x, y, whole="m k n"))
    assert counts(SAMPLES)["forward"]["stricter"] > before


def test_a_rule_that_asks_for_too_little_is_an_error(rules: Callable[..., None]) -> None:
    assert "error" not in counts(SAMPLES)["forward"]
    rules(
        softmax=lambda x, dim: notation("... d -> ... d", x),
        cross_entropy_loss=lambda x, y, *rest: notation("... c, ... -> ...", x, y, reduced="c"),
    )
    assert counts(SAMPLES)["forward"]["error"] > 0


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
def test_every_supported_case_has_a_rule_behind_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[str] = []

    def told(name: str, *rest: Any) -> Inference:
        found = of_rule(name, *rest)
        gathered.extend([name] * (found.kind == "gathered"))
        return found

    monkeypatch.setattr(scoring, "of_rule", told)
    for case in read_cases(path):
        found = score(case)
        assert not gathered, case
        assert (found.ours is None) == (builder(case.op) is None or found.verdict == "unsupported"), found.note


def test_elementwise_ops_need_no_entry(tmp_path: Path) -> None:
    for name in ("atan2", "erfc", "fmax"):
        given = [tensor([8, 16], [0, 1])] * (1 if name == "erfc" else 2)
        assert verdict(tmp_path, name, given, [told([0, 1])] * len(given), [told([0, 1])]).verdict == "agree"


# --------------------------------------------------------------------------------------------- command line


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    return lambda *words: CliRunner().invoke(app, ["check", *words], env={"NO_COLOR": "1", "TERM": "dumb"})


def test_help(run: Any) -> None:
    assert run().exit_code == 2
    assert "paddle" in run("--help").output
    text = re.sub(r"\x1b\[[0-9;]*m", "", run("paddle", "--help").output)
    for word in ("PaddlePaddle", "FILE", "--json", "--list", "Exit codes", "stricter"):
        assert word in text


def test_outside_of_a_checkout(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yardsticks, "CHECKOUT", tmp_path)
    found = run("paddle", "cases.jsonl")
    assert found.exit_code == 2
    assert re.match(r"error: .* check paddle is conformance/paddle of the repository.*pip install -e", found.stderr)
    assert found.stderr.count("\n") == 1
    assert "paddle" in run("--help").output


@pytest.mark.parametrize("name", ["paddle", "fuzz"])
def test_first_lines_of_help(run: Any, name: str) -> None:
    assert yardsticks.Yardsticks.listed[name] in " ".join(run(name, "--help").output.split())


def test_tables(run: Any) -> None:
    found = run("paddle", *map(str, SAMPLES), "--list", "freer")
    assert found.exit_code == 0
    assert re.search(r"paddle_cases\.jsonl: backward\s+op\s+cases\s+agree\s+freer", found.output)
    assert re.search(r"% of supported\s+93\.8\s+6\.2", found.output)
    assert re.search(r"paddle_cases\.jsonl:\d+: cumsum forward", found.output)
    assert "no rule: default_" in found.output
    assert not re.search(r"paddle_cases_pir\.jsonl: backward", found.output)  # there are none


def test_gaps_are_counted_by_op(run: Any, tmp_path: Path) -> None:
    given = [[tensor([8, 16], [-1, -1], [0]), tensor([8, 16], [-1, -1])]]  # a pending sum that Paddle scatters
    assert verdict(tmp_path, "concat", given, [[told([0, -1])] * 2], [told([0, -1])], axis=1).reason == "gap"
    found = run("paddle", str(tmp_path / "case.jsonl"), "--list", "stricter")
    assert found.exit_code == 0
    assert re.search(r"case\.jsonl:1: concat forward", found.output)
    assert re.search(r"gap +1 +Paddle's answer is better\s+concat 1", found.output)


def test_json(run: Any) -> None:
    found = json.loads(run("paddle", str(SAMPLES[0]), "--json", "--list", "unsound").output)
    assert list(found) == ["files", "all", "reasons", "cases"]
    assert found["files"] == {str(SAMPLES[0]): found["all"]}
    backward = found["all"]["backward"]
    assert backward["cases"] == backward["supported"] == 32
    assert backward["percent"]["agree"] == 93.75
    assert sum(op["cases"] for op in found["all"]["both"]["ops"].values()) == 147
    case = found["cases"][0]
    assert case["verdict"] == "unsound"
    assert case["ours"]["bytes"] > case["theirs"]["bytes"]


GOOD = json.dumps({"op": "relu", "direction": "forward", "mesh": [2], "inputs": [], "attrs": {}, "result_inputs": []})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "1: not a case: Expecting property name"),
        ("\n[]", "2: not a case: a case is a JSON object"),
        (GOOD, "1: the case has no 'result_outputs'"),
        (GOOD.replace("forward", "sideways"), "1: not a case: direction is 'sideways', not one of forward, backward"),
        (GOOD.replace('"inputs": []', '"inputs": 3'), "1: not a case: expected a list of tensors, not 3"),
        (
            GOOD.replace('"inputs": []', '"inputs": [{"shape": [8], "dims_mapping": [0, 1], "partial": []}]'),
            "1: not a case: shape [8] and dims_mapping [0, 1] differ in length",
        ),
        (
            GOOD.replace('"inputs": []', '"inputs": [{"shape": [8], "dims_mapping": [0], "partial": [0]}]'),
            "1: not a case: dims_mapping [0]: axis 0 is both Shard(0) and Partial()",
        ),
        (
            GOOD.replace(
                '"inputs": []', '"inputs": [{"shape": [8], "dims_mapping": [-1], "partial": {"0": "MEDIAN"}}]'
            ),
            "1: not a case: unknown reduction 'median'",
        ),
    ],
)
def test_bad_files(run: Any, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    found = run("paddle", str(path))
    assert found.exit_code == 2
    assert f"error: {path}:{message}" in found.output


def test_bad_arguments(run: Any, tmp_path: Path) -> None:
    assert run("paddle", str(tmp_path / "none")).exit_code == 2
    assert "No such file" in run("paddle", str(tmp_path / "none")).output
    assert run("paddle", str(tmp_path)).exit_code == 2
    assert "is no verdict" in run("paddle", str(SAMPLES[0]), "--list", "nice").output
    assert run("ruler", str(SAMPLES[0])).exit_code == 2
    with pytest.raises(CaseError, match="No such file"):
        list(read_cases(tmp_path / "none"))


def test_the_recorded_answers_are_there() -> None:
    counts = {path.name: sum(1 for _ in read_cases(path)) for path in RECORDED}
    assert counts == {"cases.jsonl.gz": 9821, "cases_pir.jsonl.gz": 1133}
    assert sum(path.stat().st_size for path in RECORDED) < 2**21
