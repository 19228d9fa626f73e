"""New sizes: PyTorch is asked once per line of a rule, tables stay bounded, and forgetting changes nothing."""

from __future__ import annotations

import ast
import contextlib
import gc
import itertools
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import meshwright as mw
from meshwright.dispatch import plan_call, results
from meshwright.errors import MeshwrightError
from meshwright.ranks import runtime
from meshwright.strategy_selection import Types, search
from tests.support import cheap
from tests.support.compare import S0, S1, R, on_ranks, same

PAIR = mw.Mesh({"x": 2})


# ---------------------------------------------------------------------------------------------- answers from the line

# How the sizes of a sample are changed, all of them or those of one dim.
OTHER_SIZES: tuple[Callable[[int, int], int], ...] = (
    lambda n, d: n,
    lambda n, d: n + 1 if n > 1 else n,
    lambda n, d: 2 * n if n > 1 else n,
    lambda n, d: n + 7 if n > 1 and d == 0 else n,
    lambda n, d: n + 6 if n > 1 and d == -1 else n,
    lambda n, d: n - 1 if n > 1 else n,
    lambda n, d: n if d == -1 else 0 if d == 0 else n,
)


def resized(given: Any, size: Callable[[int, int], int]) -> Any:
    def made(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        last = t.ndim - 1
        return torch.ones([size(n, -1 if d == last else d) for d, n in enumerate(t.shape)], dtype=t.dtype)

    return tree_map(made, given)


# Layouts of the tensors of a call: of each on each axis.
LAID: tuple[Callable[[int, int, int], Any], ...] = (
    lambda i, ndim, axis: S0 if axis == 0 else R,
    lambda i, ndim, axis: (mw.Shard(ndim - 1) if axis else S0) if i % 2 == 0 else R,
    lambda i, ndim, axis: R if axis == 0 and i % 2 else mw.Shard(ndim - 1),
    lambda i, ndim, axis: mw.Partial() if axis == 0 and i == 0 else S0 if i else R,
)


class Planned(torch.overrides.TorchFunctionMode):
    """Plans the ops that a function is made of, of tensors laid out so; ``wrong``: false ones taken for known."""

    def __init__(self, mesh: mw.Mesh, layout: Callable[[int, int, int], Any], wrong: list[AssertionError]) -> None:
        super().__init__()
        self.mesh, self.layout, self.wrong = mesh, layout, wrong

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if tensors and runtime.RT.rank == 0:
            count = itertools.count()
            laid = tree_map(lambda t: self.laid(t, next(count)) if isinstance(t, Tensor) else t, (args, kwargs or {}))
            try:
                plan_call(func, *laid)
            except (MeshwrightError, RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError):
                pass  # refused
            except AssertionError as error:
                self.wrong.append(error)
        return func(*args, **(kwargs or {}))

    def laid(self, t: Tensor, i: int) -> Tensor:
        """A tensor of no elements with the spec of the ``i``-th one."""
        made = torch.empty(0, dtype=t.dtype)
        placed = [self.layout(i, t.ndim, a) if t.ndim else R for a in range(self.mesh.ndim)]
        if not t.is_floating_point():
            placed = [R if isinstance(p, mw.Partial) else p for p in placed]
        made.__dict__["_spec"] = mw.Spec(t.shape, t.dtype, mw.Layout(self.mesh, placed))
        return made


def samples(op_db: list[Any], most: int) -> Iterator[tuple[Any, Any]]:
    """Ops and what they are given, in all sizes."""
    for op in op_db:
        dtypes = op.supported_dtypes("cpu")
        dtype = torch.float32 if torch.float32 in dtypes else torch.int64
        for s in itertools.islice(op.sample_inputs("cpu", dtype) if dtype in dtypes else (), most):
            given = (s.input, *s.args), s.kwargs
            if all(t.layout is torch.strided for t in tree_leaves(given) if isinstance(t, Tensor)):
                yield from ((op.op, resized(given, size)) for size in OTHER_SIZES)


def plan_in_many_sizes(op_db: list[Any], most: int, mesh: mw.Mesh, layouts: Any) -> tuple[int, int]:
    """Plan the samples of ops in many sizes, asking PyTorch and searching each time; how many answers and choices were
    taken for known."""
    known = chosen = 0
    wrong: list[AssertionError] = []
    compare, of = results.compare, Types.of

    def sure(self: Any, ins: Any, outs: Any, *total: float) -> Any:
        nonlocal chosen
        chosen += not total
        return of(self, ins, outs, *total)

    def counted(op: Any, told: Any, asked: Any) -> None:
        nonlocal known
        known += told is not None
        compare(op, told, asked)

    def run() -> None:
        for (fn, given), layout in itertools.product(samples(op_db, most), layouts):
            with warnings.catch_warnings(), contextlib.suppress(Exception), Planned(mesh, layout, wrong):
                warnings.simplefilter("ignore")
                fn(*given[0], **given[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "VERIFY", True)
        patch.setattr(results, "compare", counted)
        patch.setattr(search, "VERIFY", True)
        patch.setattr(Types, "of", sure)
        mw.simulate(run, mesh, timeout=3500)
    assert not {str(error) for error in wrong}
    return known, chosen


def op_db() -> list[Any]:
    found: list[Any] = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db
    cheap.without_names_of_tests()
    return found


def test_what_is_taken_for_known_is_what_is_found() -> None:
    known, chosen = plan_in_many_sizes(op_db()[7::24], 1, PAIR, LAID[1:2])
    assert known > 20
    assert chosen > 20


@pytest.mark.long
@pytest.mark.parametrize("group", range(24))
def test_what_is_taken_for_known_is_what_is_found_for_all_ops(group: int) -> None:
    mesh = (PAIR, mw.Mesh({"x": 3}), mw.Mesh({"x": 2, "y": 2}))[group % 3]
    assert min(plan_in_many_sizes(op_db()[group::24], 2, mesh, LAID)) > 20


def asked_of(fn: Callable[[], Any]) -> int:
    """How often PyTorch is asked."""
    count = 0
    ask = results.ask

    def counted(*given: Any) -> Any:
        nonlocal count
        count += 1
        return ask(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "ask", counted)
        fn()
    return count


def block(length: int) -> None:
    x, w, v = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, length, 6), (8, 6), (6, 8)))

    def run(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = F.gelu(F.linear(F.layer_norm(x, (6,)), w))
        scores = torch.softmax(h @ h.transpose(1, 2), -1)
        return x + F.linear(scores @ h, v).sum(1, keepdim=True).exp() * 1e-3

    same(run, (x, [S0]), (w, [S0]), (v, [S1]), mesh=PAIR)


def test_pytorch_is_asked_once_for_all_lengths() -> None:
    assert asked_of(lambda: block(5)) >= 6
    assert asked_of(lambda: block(9)) > 0  # more than the other sizes, which are 4, 6 and 8
    assert asked_of(lambda: [block(n) for n in (13, 10, 20)]) == 0
    assert asked_of(lambda: block(1)) > 0  # a size of one is another line


def test_numbers_that_are_compared_with_sizes_are_asked_anew() -> None:
    """A size that an argument does not fit is refused as on one device, on all ranks, though it is split."""

    def run() -> None:
        for n in (8, 9, 40):
            x = mw.shard_tensor(torch.arange(float(n)), PAIR, [S0])
            assert mw.unshard(x[7]) == mw.unshard(x[numpy.int64(7)]) == 7
            assert mw.unshard(x.narrow(0, 2, 5)).tolist() == [2, 3, 4, 5, 6]
            assert mw.unshard(x.select(0, -8)) == n - 8
        x = mw.shard_tensor(torch.arange(6.0), PAIR, [S0])
        calls = (
            lambda: x[7],
            lambda: x[numpy.int64(7)],
            lambda: x.narrow(0, 2, 5),
            lambda: x.select(0, -8),
            lambda: x.topk(7),
        )
        for refused in calls:
            with pytest.raises((IndexError, RuntimeError)):
                refused()

    mw.simulate(run, PAIR)


def test_sizes_are_compared_with_each_other() -> None:
    """An index may be as long as what it takes from, and no longer: also where its part here is."""

    def run() -> None:
        x = mw.shard_tensor(torch.arange(18.0).view(3, 6), PAIR, [R])
        for n in (2, 4, 6):
            index = mw.shard_tensor(torch.zeros(2, n, dtype=torch.long), PAIR, [S1])
            assert mw.unshard(x.gather(0, index)).tolist() == [list(range(n))] * 2
        with pytest.raises(RuntimeError):
            x.gather(0, mw.shard_tensor(torch.zeros(2, 8, dtype=torch.long), PAIR, [S1]))

    mw.simulate(run, PAIR)


# ---------------------------------------------------------------------------------------------- bounded tables


def test_a_table_keeps_what_is_asked_for() -> None:
    beside: dict[Any, Any] = {}
    table = runtime.Recent(4, beside)
    for i in range(100):
        before, beside["true"] = len(table), 1
        table.keep(i, i + 1)
        assert len(table) == before + 1 or not beside  # a new generation: nothing is known to be young
        assert table.find(0) == 1  # asked for all the time
        assert len(table) <= 4
    assert table.find(99) == 100
    assert table.find(50) is None


@pytest.mark.parametrize(("used", "held"), [(3, 4), (7, 16), (20, 32), (200, 4)])
def test_a_table_grows_where_its_entries_come_back(used: int, held: int) -> None:
    """``used`` keys in turn: held up to the limit of 32; with ever new keys the table stays small."""
    table = runtime.Recent(4, limit=32)
    missed = 0
    for i in range(4000):
        key = i if used == 200 else i % used
        if table.find(key) is None:
            missed += 1
            table.keep(key, key + 1)
        assert len(table) <= table.most <= 32
        assert len(table._old) <= 32
        assert len(table._dropped) <= 64
    assert table.most <= held
    assert used == 200 or missed <= 4 * used


def test_tables_of_a_run_of_new_lengths_stay_small() -> None:
    """3,000 lengths: plans and conversions of a few hundred are held, and the other tables have bounds."""

    def run() -> tuple[int, ...]:
        for n in range(1, 3001):
            x = mw.from_local(torch.empty(n, 0), PAIR, [S0], check=False)
            mw.reshard(x, [R])
        assert len(runtime.RT.groups) < 10
        tables = runtime.RT.plans, runtime.RT.memo
        assert all(len(t._dropped) < runtime.MOST + runtime.LEAST for t in tables)
        return tuple(len(t) + len(t._old) for t in tables)

    plans, memo = on_ranks(run, PAIR)[0]
    assert plans <= 1024
    assert 100 < memo <= 1024


# Functions of things of which a process has few: types, devices, ops of PyTorch, files of this package.
UNBOUNDED = {
    "_asking", "_builtin", "_elementwise", "_library_folders", "_side", "_takes_dtype", "_turns", "_uncompiled",
    "_wastes", "_weights", "_without_overrides", "fused_sgd_works", "guard_scripts", "hold_device_guard", "template",
}  # fmt: skip


def test_caches_of_functions_have_bounds() -> None:
    """Each by ``maxsize``; what has none is listed, with the reason, above."""
    root, bounded, unbounded = Path(mw.__file__).parent, 0, set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for made in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                text = ast.unparse(made).removeprefix("functools.")
                if text == "cache" or text.startswith("lru_cache(None)") or "maxsize=None" in text:
                    unbounded.add(node.name)
                bounded += text.startswith("lru_cache")
    assert bounded > 40
    assert unbounded - UNBOUNDED == set()


def grown_sizes() -> Iterator[int]:
    return itertools.chain(range(3, 9), range(3, 9))


def test_ranks_that_forget_at_different_times_stay_together() -> None:
    """Values, gradients and collectives are those of ranks that forget nothing."""
    mesh = mw.Mesh({"dp": 2, "tp": 2})

    def steps(most: Callable[[int], int]) -> Any:
        runtime.RT.plans.most = runtime.RT.memo.most = most(runtime.RT.rank)
        torch.manual_seed(0)
        w = mw.shard_tensor(torch.randn(6, 6), mesh, {"tp": mw.Shard(1)}).requires_grad_()
        found = []
        for n in grown_sizes():
            x = mw.shard_tensor(torch.randn(n, 6), mesh, {"dp": mw.Shard(0)})
            y = F.linear(F.linear(x, w).relu(), w)
            z = (y + x).square().sum() + y.relu().sum() + (y * 2).exp().mean()
            z.backward()
            found.append(mw.unshard(z).item())
        return found, mw.unshard(w.grad), runtime.RT.counts.table

    want = mw.simulate(lambda: steps(lambda rank: 8192), mesh)
    for most in (lambda rank: 3, lambda rank: (3, 8192, 5, 1)[rank]):
        for got, all_ in zip(mw.simulate(lambda most=most: steps(most), mesh), want, strict=True):  # type: ignore[misc]
            assert got[0] == all_[0]
            torch.testing.assert_close(got[1], all_[1], rtol=0, atol=0)
            assert got[2] == all_[2]


def test_a_conversion_is_known_by_its_ends() -> None:
    """A value is reduced once, also by a rank that forgot the plan of it in between."""
    from meshwright.resharding import planner

    def run() -> int:
        x = mw.from_local(torch.ones(4), PAIR, [mw.Partial()]).requires_grad_()
        y = x * 2
        _ = y.relu()
        if runtime.RT.rank:
            planner._plan.cache_clear()
            runtime.RT.plans.clear()
            runtime.RT.fast.clear()
        before = runtime.RT.counts.total
        _ = y.exp()
        return runtime.RT.counts.total - before

    assert on_ranks(run, PAIR) == [0, 0]


# ---------------------------------------------------------------------------------------------- captured steps


def test_the_programs_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are those of one device, whatever left; that lengths vary is said once, at the user's line."""
    from meshwright.program import step as steps

    monkeypatch.setattr(steps, "_MANY", 3)
    monkeypatch.setattr(steps.CompiledStep, "most_programs", 2)
    start = torch.nn.Linear(3, 3, dtype=torch.float64)

    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).square().sum()

    sizes = (4, 6, 5, 4, 6, 6, 5, 7)
    batches = [torch.randn(2, n, 3, dtype=torch.float64) for n in sizes]

    def fresh() -> Any:
        model = torch.nn.Linear(3, 3, dtype=torch.float64)
        model.load_state_dict(start.state_dict())
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    model, optimizer = fresh()
    want = []
    for x in batches:
        optimizer.zero_grad()
        want.append(loss(model, x))
        want[-1].backward()
        optimizer.step()

    def run() -> Any:
        model, optimizer = fresh()
        step = mw.compile_step(model, loss, optimizer, batches[0], mesh=PAIR, batch={"x": S0})
        made, kept = [], []
        for x in batches:
            made.append(step(x).item())
            kept.append(sorted(shapes[0][0][1] for *_, shapes in step._ready))
        return made, kept

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = mw.simulate(run, PAIR)
    for made, kept in found:
        assert made == pytest.approx([w.item() for w in want], rel=1e-12)
        assert kept == [[4], [4, 6], [5, 6], [4, 5], [4, 6], [4, 6], [5, 6], [5, 7]]
    said = [w for w in told if "shapes of batches" in str(w.message)]
    assert len(said) == PAIR.size
    assert "captured for 3 shapes" in str(said[0].message)
    assert "pad_to=" in str(said[0].message)
    assert said[0].filename == __file__


# ---------------------------------------------------------------------------------------------- long runs


def resident() -> float:
    """MiB that this process holds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def soak(step: Callable[[int], Any], lengths: Sequence[int], warm: int, most: float) -> None:
    """Memory and time per step are flat after the first ``warm`` lengths."""
    held, took = [], []
    for i, n in enumerate(lengths):
        start = time.process_time()
        step(n)
        took.append(time.process_time() - start)
        if i >= warm and (i - warm) % 100 == 0:
            held.append(resident())
    assert max(held) - held[0] <= most, [round(mib, 1) for mib in held]
    half = (len(took) - warm) // 2
    early, late = (statistics.median(part) for part in (took[warm : warm + half], took[warm + half :]))
    assert late <= 2 * early, (early, late)  # a machine is busy at times


def shuffled(count: int) -> list[int]:
    """So many lengths, all different, in no order: a heap that grows with the lengths is no growth of ours."""
    lengths = list(range(8, 8 + count))
    random.Random(0).shuffle(lengths)
    return lengths


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [3000, 20000])
def test_many_lengths_leave_nothing_behind(count: int) -> None:
    def run() -> None:
        w = mw.shard_tensor(torch.randn(8, 8), PAIR, [S1]).requires_grad_()

        def step(n: int) -> None:
            x = mw.shard_tensor(torch.ones(2, n, 8), PAIR, [S0], check=False)
            y = F.linear(F.linear(F.layer_norm(x, (8,)), w).relu(), w)
            (x + y).view(2, n, 2, 4).transpose(1, 2).flatten(2).square().mean().backward()
            w.grad = None

        runtime.RT.plans.most = runtime.RT.memo.most = 1000
        soak(step, shuffled(count), 1000, 10.0)

    mw.simulate(run, PAIR, timeout=3000)


@pytest.mark.long
@pytest.mark.parametrize("count", [20000])
def test_many_captured_lengths_leave_nothing_behind(count: int) -> None:
    def run() -> None:
        model = torch.nn.Linear(8, 8)

        def loss(model: Any, x: Tensor) -> Tensor:
            return model(x).square().mean()

        given = torch.ones(2, 4, 8)
        step = mw.compile_step(model, loss, torch.optim.SGD(model.parameters()), given, mesh=PAIR, batch={"x": S0})
        step.most_programs = 8
        runtime.RT.plans.most = runtime.RT.memo.most = 1000
        soak(lambda n: step(torch.ones(2, n, 8)), shuffled(count), 1000, 10.0)
        assert len(step._ready) == 8

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mw.simulate(run, PAIR, timeout=3000)
