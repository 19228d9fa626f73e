"""Bad input: the same clear error on every rank, promptly, with the culprit and the fix; no rank is left waiting."""

from __future__ import annotations

import re
import time
import warnings

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright import errors
from meshwright.errors import DesyncError, DispatchError, LayoutError, MeshError, MeshwrightError, RuleError
from meshwright.ranks import runtime
from meshwright.rules import RULES
from tests.support.compare import FOUR, GRID, S0, S1, P, R, on_ranks, ramp
from tests.support.processes import run_processes


def dist(t, *p, mesh=FOUR):
    return mw.shard_tensor(t, mesh, p, check=False)


def refused(fn, kind, message, mesh=FOUR):
    """Every rank gets the same error, and can go on."""

    def run():
        with pytest.raises(kind, match=message) as caught:
            fn()
        dist(ramp(4), P) if mesh is FOUR else None
        return str(caught.value)

    texts = on_ranks(run, mesh)
    assert len(set(texts)) == 1, texts
    return texts[0]


# ------------------------------------------------------------------------------------------ the tree


def test_the_tree():
    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert all(issubclass(k, MeshwrightError) for k in kinds)
    for kind, base in [(MeshError, ValueError), (LayoutError, ValueError), (DispatchError, RuntimeError),
                       (RuleError, RuntimeError), (DesyncError, RuntimeError)]:  # fmt: skip
        assert issubclass(kind, base)
    assert all(k.__doc__ for k in kinds)


# ------------------------------------------------------------------------------------------ layouts and meshes


def test_placements_that_do_not_fit():
    refused(lambda: mw.shard_tensor(ramp(4, 2), FOUR, {"tp": S0}), MeshError, r"unknown axis 'tp': Mesh\(x=4\) has")
    refused(lambda: mw.shard_tensor(ramp(4, 2), FOUR, [mw.Shard(2)]), LayoutError, r"2 dims, so dims -2 to 1 exist")
    refused(lambda: mw.reshard(dist(ramp(4, 2), S0), {"y": S0}), MeshError, "unknown axis 'y'")
    refused(lambda: mw.reshard(dist(ramp(4, 2), S0), [S0, S0]), LayoutError, "2 placements for the 1 axes")
    refused(lambda: mw.from_local(ramp(4), FOUR, [S1]), LayoutError, "1 dim, so dims -1 to 0 exist")
    refused(lambda: mw.shard_tensor(ramp(4), FOUR, ["dp"]), LayoutError, "'dp' is not a placement")


def test_two_meshes_in_one_call():
    text = refused(
        lambda: dist(ramp(4, 4), S0) + mw.shard_tensor(ramp(4, 4), mw.Mesh({"y": 4}), [S0], check=False),
        LayoutError,
        "arguments lie on different meshes",
    )
    assert "mw.shard_tensor(mw.unshard(x), mesh, placements)" in text
    other = mw.Mesh({"dp": 4, "tp": 1})  # of the same axes
    refused(
        lambda: dist(ramp(4, 4), S0, R, mesh=GRID) + dist(ramp(4, 4), S0, R, mesh=other),
        LayoutError, "arguments lie on different meshes", GRID,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ ops


@pytest.mark.parametrize(
    ("fn", "kind", "message"),
    [
        (lambda x: x @ ramp(3, 3), RuntimeError, ""),
        (lambda x: x + ramp(3, 3), RuntimeError, ""),
        (lambda x: x.view(7, 7), RuntimeError, ""),
        (lambda x: x.sum(5), IndexError, ""),
        (lambda x: x[99], IndexError, ""),
        (lambda x: x[:, :, 0], IndexError, ""),
        (lambda x: x.transpose(0, 4), IndexError, ""),
        (lambda x: torch.cat([x, ramp(3, 3)]), RuntimeError, ""),
        (lambda x: F.layer_norm(x, (7,)), RuntimeError, ""),
        (lambda x: x.no_such_method(), AttributeError, "no_such_method"),
        (lambda x: torch.add(x, "one"), TypeError, ""),
        (lambda x: x.reshape(2, "two"), TypeError, ""),
        (lambda x: F.embedding(x, x), RuntimeError, ""),
        (lambda x: x.expand(3, 8, 5), RuntimeError, ""),
        (lambda x: F.cross_entropy(x, torch.arange(3)), (RuntimeError, ValueError), ""),
    ],
)
def test_mistakes_in_calls_raise_what_pytorch_raises(fn, kind, message):
    """The kind of PyTorch's own error, on every rank, for every layout."""
    with pytest.raises(kind, match=message):
        fn(ramp(8, 4))

    def run(p):
        with pytest.raises(kind, match=message):
            fn(dist(ramp(8, 4), p))
        return mw.unshard(dist(ramp(8, 4), P))

    for p in (R, S0, S1, P):
        assert len(on_ranks(lambda p=p: run(p))) == 4


def test_a_partial_cannot_change_its_reduction():
    def run():
        x = mw.from_local(ramp(2) + runtime.RT.rank, FOUR, [mw.Partial("max")])
        y = x + mw.from_local(ramp(2), FOUR, [P])
        return mw.unshard(y)

    for got in on_ranks(run):
        torch.testing.assert_close(got, ramp(2) + 3 + 4 * ramp(2))


# ------------------------------------------------------------------------------------------ rules that lie


@pytest.fixture
def custom():
    """A way to register rules that are gone after the test."""
    before = dict(RULES)
    yield mw.rule
    RULES.clear()
    RULES.update(before)
    mw.rule("habits::none")(lambda *args: None)  # forgets the plans
    RULES.pop("habits::none")


@torch.library.custom_op("habits::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("habits::halves", mutates_args=())
def halves(x: torch.Tensor) -> torch.Tensor:
    return x[::2].clone()


@halves.register_fake
def _(x):
    return torch.empty_like(x[::2])


def test_a_rule_that_lies_about_its_shapes(custom):
    from meshwright.rules import notation

    custom("habits::double")(lambda x: notation("a b -> a", x, reduced="b"))
    text = refused(lambda: torch.ops.habits.double(dist(ramp(8, 4), R)), RuleError, "says its outputs have shapes")
    assert "habits::double" in text
    assert "[(8,)], the op gives [(8, 4)]: correct the rule" in text
    RULES.pop("habits::double")
    custom("habits::double")(lambda x: notation("a b -> b a", x))
    text = refused(lambda: torch.ops.habits.double(dist(ramp(8, 4), R)), RuleError, "says its outputs have shapes")
    assert "[(4, 8)], the op gives [(8, 4)]: correct the rule" in text


def test_a_rule_whose_local_shapes_are_wrong(custom):
    """Right about the global shape, wrong that the dim may be split: 3 of 5 rows locally is not 5 of 10."""
    from meshwright.rules import notation

    custom("habits::halves")(lambda x: notation("(h k) b -> h b", x, sizes={"k": 2}))
    ok = on_ranks(lambda: mw.unshard(torch.ops.habits.halves(dist(ramp(8, 4), S0))))
    assert all(torch.equal(t, ramp(8, 4)[::2]) for t in ok)
    uneven = on_ranks(lambda: mw.unshard(torch.ops.habits.halves(dist(ramp(6, 4), S0))))
    assert all(torch.equal(t, ramp(6, 4)[::2]) for t in uneven)
    RULES.pop("habits::halves")
    custom("habits::halves")(lambda x: notation("a b -> c b", x, sizes={"c": 4}, reduced="a"))

    def run():
        with pytest.raises(RuleError, match=r"says that this rank gets .* the op gave .*: correct it"):
            torch.ops.habits.halves(dist(ramp(8, 4), S0))

    on_ranks(run)


def test_a_rule_that_fails_or_misses_tensors(custom):
    from meshwright.rules import notation

    custom("habits::double")(lambda x: {}["nothing"])
    text = refused(
        lambda: torch.ops.habits.double(dist(ramp(8, 4), R)), RuleError, "the rule of 'habits::double' failed"
    )
    assert "KeyError" in text
    RULES.pop("habits::double")
    custom("habits::double")(lambda x: notation("a b c -> a b c", x))
    refused(lambda: torch.ops.habits.double(dist(ramp(8, 4), R)), RuleError, "has 2 dims, 3 were named")
    RULES.pop("habits::double")
    custom("habits::double")(lambda x: notation("a b", x))
    refused(lambda: torch.ops.habits.double(dist(ramp(8, 4), R)), RuleError, "has no '->'")


def test_a_second_rule_for_one_op(custom):
    from meshwright.rules import notation

    with pytest.raises(RuleError, match="'linear' has a rule already"):
        mw.rule("linear")(lambda *args: None)
    custom("habits::double")(lambda x: notation("a b -> a b", x))
    with pytest.raises(RuleError, match="'habits::double' has a rule already"):
        mw.rule("habits::double")(lambda *args: None)


def test_an_op_without_a_rule_is_no_error():
    """It is gathered, and one warning names the op, the bytes and what to do."""

    def quietly():
        torch.ops.habits.double(dist(ramp(6, 4), S0))
        return mw.unshard(torch.ops.habits.double(dist(ramp(8, 4), S0)))

    with pytest.warns(UserWarning, match=r"habits::double has no rule .*@mw\.rule\('habits::double'\)") as told:
        answers = on_ranks(quietly)
    assert len(told) == 1  # once, on whatever rank and in whatever size
    assert all(torch.equal(t, ramp(8, 4) * 2) for t in answers)
    eye = torch.eye(4, dtype=torch.float64) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solved = on_ranks(lambda: mw.unshard(torch.cholesky_solve(dist(ramp(4, 4), S0), dist(eye, S0))))
    assert all(torch.equal(t, ramp(4, 4) / 4) for t in solved)


# ------------------------------------------------------------------------------------------ ranks that disagree


def _rank() -> int:
    return runtime.RT.rank


def disagreeing():
    return {
        "shard_tensor shapes": lambda mesh: mw.shard_tensor(ramp(4 + (_rank() == 1), 2), mesh, [S0]),
        "shard_tensor placements": lambda mesh: mw.shard_tensor(ramp(4, 4), mesh, [S1 if _rank() == 1 else S0]),
        "shard_tensor dtypes": lambda mesh: mw.shard_tensor(
            ramp(4, 4, dtype=torch.float32 if _rank() == 1 else torch.float64), mesh, [S0]
        ),
        "from_local placements": lambda mesh: mw.from_local(ramp(2, 2), mesh, [P if _rank() == 1 else S0]),
        "from_local dims": lambda mesh: mw.from_local(ramp(2, 2) if _rank() == 1 else ramp(2), mesh, [S0]),
    }


@pytest.mark.parametrize("name", list(disagreeing()))
def test_ranks_that_disagree(name):
    def run():
        with pytest.raises(DesyncError, match="the ranks disagree") as caught:
            disagreeing()[name](FOUR)
        return str(caught.value)

    texts = on_ranks(run)
    assert len(set(texts)) == 1
    for r in range(4):
        assert re.search(rf"ranks? ([\d, ]+, )?{r}[:,]", texts[0])
    assert "every rank must make the same call" in texts[0]


def test_a_rank_that_fails_alone_wakes_the_others():
    def run():
        x = dist(ramp(8, 4), S0)
        if _rank() == 2:
            raise KeyError("only here")
        return x.sum().item()

    start = time.monotonic()
    with pytest.raises(KeyError, match="only here") as caught:
        on_ranks(run)
    assert time.monotonic() - start < 50  # a rank is waited for for 60
    assert any("simulated rank 2" in note for note in caught.value.__notes__)


def test_ranks_that_take_different_branches():
    def run():
        x = dist(ramp(8, 4), S0)
        return x.sum().item() if _rank() else mw.unshard(x)

    with pytest.raises(DesyncError, match="disagree") as caught:
        on_ranks(run)
    assert re.search(r"rank 0: all_gather", str(caught.value))
    assert re.search(r"rank 1: all_reduce", str(caught.value))


def _disagree_on_processes(name: str) -> tuple[str, float]:
    mesh = mw.init_mesh({"x": 3})
    start = time.monotonic()
    with pytest.raises(DesyncError) as caught:
        disagreeing()[name](mesh)
    # The ranks are still together: the next calls work.
    assert mw.shard_tensor(ramp(4), mesh, [S0]).sum().item() == ramp(4).sum().item()
    return str(caught.value), time.monotonic() - start


@pytest.mark.processes
@pytest.mark.parametrize("name", ["shard_tensor shapes", "from_local placements"])
def test_processes_that_disagree(name):
    results = run_processes(_disagree_on_processes, 3, name)
    assert len({text for text, _ in results}) == 1
    assert all(seconds < 250 for _, seconds in results)


def _mistakes_on_processes() -> list[str]:
    mesh = mw.init_mesh({"dp": 2, "tp": 2})
    x = mw.shard_tensor(ramp(3, 4), mesh, {"dp": S0, "tp": S1})
    texts = []
    for call in (
        lambda: x @ ramp(3, 3),
        lambda: x.clone().requires_grad_().relu_(),
        lambda: mw.reshard(x, {"pp": S0}),
        lambda: x.backward(),
        lambda: mw.from_local(torch.zeros(1 + _rank(), 2), mesh, [S0, R]),
        lambda: mw.init_mesh({"dp": 3}),
    ):
        with pytest.raises((RuntimeError, MeshwrightError)) as caught:
            call()
        texts.append(type(caught.value).__name__)
    assert x.sum().item() == ramp(3, 4).sum().item()
    return texts


@pytest.mark.processes
def test_mistakes_on_processes_leave_no_rank_waiting():
    results = run_processes(_mistakes_on_processes, 4)
    assert all(r == results[0] for r in results)


def test_simulated_ranks_need_a_simulation():
    x = mw.simulate(lambda: dist(ramp(8, 4, dtype=torch.float32), S0, R, mesh=GRID), GRID)[0]
    with pytest.raises(MeshwrightError, match="simulate"):
        mw.unshard(x)
