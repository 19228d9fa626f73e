"""check_rule and check_conversion: they catch what is wrong, and say what, where and by how much."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.dispatch import forget_ops, plans
from meshwright.errors import ConversionError, RuleError
from meshwright.layout import Layout, Spec
from meshwright.resharding.planner import ConversionPlan
from meshwright.rules import RULES, Arg, Local, Rule, notation, partial_table
from meshwright.testing import function_named

FOUR = mw.Mesh({"x": 4})


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@torch.library.custom_op("mwtest::scaled_sum", mutates_args=())
def scaled_sum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Σ_k x[i, k] w[k]²."""
    return (x * w.square()).sum(-1)


@scaled_sum.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[:-1])


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = ctx.saved_tensors
    return grad.unsqueeze(-1) * w.square(), (grad.unsqueeze(-1) * x * 2 * w).sum(tuple(range(x.ndim - 1)))


scaled_sum.register_autograd(_backward, setup_context=_setup)


@pytest.fixture
def with_rule() -> Iterator[Callable[[Callable[..., Rule | None]], None]]:
    """Gives the custom op a rule for one test."""

    def give(fn: Callable[..., Rule | None]) -> None:
        mw.rule("mwtest::scaled_sum")(fn)

    yield give
    RULES.pop("mwtest::scaled_sum", None)
    forget_ops()


def right(x: Arg, w: Arg) -> Rule:
    return notation("... k, k -> ...", x, w, reduced="k", linear=[[x]])


def test_a_custom_op_joins_the_book(with_rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a call before it has a rule, of which nothing is kept
        monkeypatch.setattr(plans, "_WARNED", set())
        mw.simulate(lambda: scaled_sum(mw.shard_tensor(torch.ones(8, 6), FOUR, [mw.Shard(0)]), torch.ones(6)), FOUR)
    with_rule(right)
    assert "mwtest" not in partial_table()
    report = mw.check_rule("mwtest::scaled_sum", rand(5, 6), rand(6), most=25)
    assert report.op == "mwtest::scaled_sum"
    assert report.gathered == 0
    assert report.cases > 50
    assert report.strategies == [
        "replicate: Replicate(), Replicate() -> Replicate()",
        "k: Shard(1), Shard(0) -> Partial()",
        "~0: Shard(0), Replicate() -> Shard(0)",
        "partial: Partial(), Replicate() -> Partial()",
    ]
    assert "runs agree with the single device" in str(report)

    x, w = rand(6, 8), rand(8)

    def run() -> tuple[torch.Tensor, Any]:
        a, b = mw.shard_tensor(x, FOUR, [mw.Shard(1)]), mw.shard_tensor(w, FOUR, [mw.Shard(0)])
        with mw.explicit():
            y = scaled_sum(a, b)
        return mw.unshard(y), y.placements

    for value, placements in mw.simulate(run, FOUR):
        assert torch.allclose(value, scaled_sum(x, w))
        assert placements == (mw.Partial(),)


def test_without_a_rule_it_is_gathered() -> None:
    with pytest.warns(UserWarning, match="has no rule"):
        report = mw.check_rule(scaled_sum, rand(5, 6), rand(6), most=40)
    assert report.gathered == 4
    assert not report.strategies
    assert "4 gathered (no rule)" in str(report)


def wrong_value(x: Arg, w: Arg) -> Rule:
    return notation("... k, k -> ...", x, w, reduced={"k": "max"}, linear=[[x]])


def not_linear(x: Arg, w: Arg) -> Rule:
    return notation("... k, k -> ...", x, w, reduced="k", linear=[[x], [w]])


def loses_a_gradient(x: Arg, w: Arg) -> Rule:
    def local(ctx: Local) -> Any:
        return lambda x, w: scaled_sum(x, w.detach())

    return notation("... k, k -> ...", x, w, reduced="k", local=local)


def wrong_gradient(x: Arg, w: Arg) -> Rule:
    def local(ctx: Local) -> Any:
        return lambda x, w: scaled_sum(x, 2 * w - w.detach())

    return notation("... k, k -> ...", x, w, reduced="k", local=local)


def only_one_rank(x: Arg, w: Arg) -> Rule:
    def local(ctx: Local) -> Any:
        return (lambda x, w: scaled_sum(x, w) + 1) if ctx.here == (2,) else None

    return notation("... k, k -> ...", x, w, whole="k", local=local)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (wrong_value, r"wrong value on rank 0 with argument 0 <x: Shard\(1\)>, argument 1 <x: Shard\(0\)> on "
                      r"Mesh\(x=4\) \(strategy: k\): largest difference"),
        (not_linear, r"wrong value on rank 0 with argument 0 <x: Replicate\(\)>, argument 1 <x: Partial\(\)> on "
                     r"Mesh\(x=4\) \(strategy: partial\)"),
        (loses_a_gradient, r"wrong gradient of argument 1 on rank 0 .*largest difference"),
        (wrong_gradient, r"wrong gradient of argument 1 on rank 0 .*largest difference"),
        (only_one_rank, r"wrong value on rank 2 with .*largest difference 1;"),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_caught(with_rule: Any, rule: Any, message: str) -> None:
    with_rule(rule)
    with pytest.raises(RuleError, match=f"check_rule\\('mwtest::scaled_sum'\\): {message}"):
        mw.check_rule("mwtest::scaled_sum", rand(5, 6), rand(6), mesh=FOUR)


def wrong_shape(x: Arg, w: Arg) -> Rule:
    return notation("a k, k -> k a", x, w)


def wrong_local_shape(x: Arg, w: Arg) -> Rule:
    return notation("... k, k -> ...", x, w, whole="k", local=lambda ctx: lambda x, w: scaled_sum(x, w)[:1])


def fails(x: Arg, w: Arg) -> Rule:
    return notation("... k, k -> ...", x, w, sizes={"k": x.shape[7]})


def two_inputs_missing(x: Arg, w: Arg) -> Rule:
    return notation("a k -> a", x, reduced="k")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (wrong_shape, r"says its outputs have shapes \[\(6, 5\)\], the op gives \[\(5,\)\]: correct the rule"),
        (wrong_local_shape, r"says that this rank gets \[\(5,\)\], the op gave \[\(1,\)\]"),
        (fails, "the rule of 'mwtest::scaled_sum' failed: IndexError"),
        (two_inputs_missing, "covers 1 of 2 tensor arguments"),
    ],
)
def test_a_rule_that_contradicts_the_op_is_named(with_rule: Any, rule: Any, message: str) -> None:
    with_rule(rule)
    with pytest.raises(RuleError, match=message):
        mw.check_rule("mwtest::scaled_sum", rand(5, 6), rand(6), mesh=FOUR)


def test_communication_that_the_strategy_does_not_say_is_reported(with_rule: Any) -> None:
    def talks(x: Arg, w: Arg) -> Rule:
        from meshwright import collective

        def local(ctx: Local) -> Any:
            def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
                collective.all_reduce(x.detach(), "sum", collective.group(FOUR, (0,)))
                return scaled_sum(x, w)

            return fn

        return notation("... k, k -> ...", x, w, whole="k", local=local)

    with_rule(talks)
    with pytest.raises(RuleError, match=r"wrong communication on rank 0 .*the strategy says none"):
        mw.check_rule("mwtest::scaled_sum", rand(8, 6), rand(6), mesh=FOUR)


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("linear", (rand(2, 5, 6), rand(7, 6), rand(7)), {}),
        ("softmax", (rand(5, 6), -1), {}),
        ("sum", (rand(5, 6), 1), {}),
        ("F.cross_entropy", (rand(10, 7), torch.arange(10) % 7), {}),
        ("add_", (rand(5, 6), rand(6)), {}),
        ("getitem", (rand(5, 6), (slice(1, 4),)), {}),
        ("linalg.norm", (rand(5, 6),), {"dim": 1}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
@pytest.mark.thin(9)
def test_some_ops_by_name(op: str, args: Any, kwargs: Any) -> None:
    meshes = [mw.Mesh({"x": 3}), mw.Mesh({"x": 2, "y": 2})]
    report = mw.check_rule(op, *args, mesh=meshes, most=40, **kwargs)
    assert report.cases > 20


@pytest.mark.parametrize(
    "call", [(torch.pixel_shuffle, rand(1, 9, 2, 2), 1), (torch.pixel_unshuffle, rand(1, 1, 9, 9), 1)]
)
def test_an_empty_part_of_a_dim_by_blocks_with_factors_of_one(call: Any) -> None:
    assert mw.check_rule(*call, mesh=FOUR).cases > 3


@pytest.mark.parametrize(
    "call", [("relu_", rand(5, 6)), ("cumsum_", rand(5, 6), 0), ("t_", rand(5, 6)), ("unsqueeze_", rand(5, 6), 0)]
)
def test_in_place_calls_in_every_layout(call: Any) -> None:
    assert mw.check_rule(*call, mesh=FOUR).cases > 3


def test_random_ops_are_compared_between_ranks() -> None:
    report = mw.check_rule("dropout", rand(6, 8), 0.5, True, mesh=FOUR)
    assert report.random
    assert "the ranks agree" in str(report)


def test_names_and_arguments() -> None:
    assert function_named("gelu") is torch._C._nn.gelu
    assert function_named("F.cross_entropy") is torch.nn.functional.cross_entropy
    assert function_named("linalg.inv") is torch.linalg.inv
    assert function_named("getitem") is torch.Tensor.__getitem__
    with pytest.raises(RuleError, match="no function is known by the name 'nonsense'"):
        mw.check_rule("nonsense", rand(2))
    with pytest.raises(RuleError, match="at least one tensor"):
        mw.check_rule("gelu", 3.0)


def spec(*placements: Any, mesh: mw.Mesh = FOUR, grad_partial_mask: int = 0) -> Spec:
    return Spec((5, 3), torch.float64, Layout(mesh, list(placements)), grad_partial_mask)


def test_conversions_and_their_transposes(monkeypatch: pytest.MonkeyPatch) -> None:
    mw.check_conversion(spec(mw.Shard(0)), spec(mw.Shard(1)))
    mw.check_conversion(spec(mw.Partial()), spec(mw.Shard(0)))
    mw.check_conversion(spec(mw.Replicate(), grad_partial_mask=1), spec(mw.Shard(1)))

    from meshwright.testing import conversions

    def one_step_less(src: Spec, dst: Spec) -> ConversionPlan:
        made = original(src, dst)
        return ConversionPlan(src, dst, made.steps[:-1], 0.0, 0.0)

    original = conversions.conversion_plan
    monkeypatch.setattr(conversions, "conversion_plan", one_step_less)
    with pytest.raises(ConversionError, match=r"wrong value .* in the conversion from float64\[5, 3\]"):
        mw.check_conversion(spec(mw.Partial()), spec(mw.Replicate()))
