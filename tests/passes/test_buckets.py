"""Which gradients share a collective: each limit by hand, and the cut by time beside all cuts that there are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx

from meshwright.collective import COLLECTIVES, KINDS, OPERATORS
from meshwright.passes.buckets import (
    FusedBucket,
    Network,
    by_limit,
    by_time,
    by_unit,
    fusible,
    in_order,
    seconds_of,
    times,
)
from meshwright.passes.gradients import SentGradient
from meshwright.program.ir.nodes import Value, annotate

F32, F64 = torch.float32, torch.float64
MESH = "dp=2,tp=3@cpu"
LAST = 1000  # a place behind all others
aten = torch.ops.aten


class Step:
    """A step with gradients, as much of it as buckets look at: sums are made and read where the test says."""

    def __init__(self) -> None:
        self.graph, self.sent = fx.Graph(), list[SentGradient]()
        self.order: list[fx.Node] = []
        self.complete: dict[fx.Node, float] = {}  # seconds after which gradients are

    @property
    def reductions(self) -> list[SentGradient]:
        """All of them."""
        return self.sent

    def fusible(self, r: SentGradient) -> bool:
        """Whether it can share a buffer, here."""
        return fusible(r)

    def born(self, r: SentGradient) -> float:
        """When the gradient is complete."""
        return self.complete.get(r.node, 0.0)

    def fitting(self) -> Callable[[SentGradient], bool]:
        """Says of one after the other whether all of them may start together."""
        members: list[SentGradient] = []

        def fits(r: SentGradient) -> bool:
            members.append(r)
            return max(m.ready for m in members) < min(m.needed for m in members)

        return fits

    def node(self, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        """A call of an operator."""
        made = self.graph.call_function(target, args)
        annotate(made, value=value)
        return made

    def value(self, *shape: int, dtype: torch.dtype = F32) -> Value:
        """Of a tensor by itself."""
        return Value.alone(shape, dtype, len(self.graph.nodes))

    def given(self, *shape: int, dtype: torch.dtype = F32) -> fx.Node:
        """An input."""
        made = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        annotate(made, value=self.value(*shape, dtype=dtype))
        return made

    def sum_of(
        self, n: int, ready: int | None = None, needed: int = LAST, *, axes: str = "dp", dtype: torch.dtype = F32,
        kind: str = "all_reduce", options: tuple[Any, ...] = ("sum",), unit: str = "", stage: int | None = None,
    ) -> SentGradient:  # fmt: skip
        """The sum of a gradient of ``n`` elements."""
        i = len(self.sent)
        gradient, ready = self.given(n, dtype=dtype), i if ready is None else ready
        node = self.node(OPERATORS[kind].default, (gradient, *options, axes, MESH), None)
        key = (ready if stage is None else stage, i)
        made = SentGradient(node, gradient, f"p{i}", KINDS[kind], n * dtype.itemsize, key, ready, needed, unit)
        self.sent.append(made)
        return made

    def scatter(self, sizes: list[int], **more: Any) -> SentGradient:
        """The sum of a gradient, cut into parts of these sizes."""
        return self.sum_of(sum(sizes), kind="reduce_scatter", options=("sum", 0, sizes, 0), **more)


def said(buckets: list[FusedBucket]) -> list[tuple[str, str]]:
    return [(" ".join(r.name for r in b.members), b.why if len(b.members) == 1 else "") for b in buckets]


FULL = "the next one does not fit into its bucket"
LEFT = "no other gradient of its group and dtype is left"
USED = "used before the next gradient exists"
ODD = "a reduce-scatter of the step's own, into other parts"


# -- by a limit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "want"),
    [
        ([40, 40, 20], [("p0 p1 p2", "")]),
        ([40, 40, 24], [("p0 p1", ""), ("p2", LEFT)]),
        ([60, 60, 40, 40], [("p0", FULL), ("p1 p2", ""), ("p3", LEFT)]),
        ([96, 4, 4], [("p0 p1", ""), ("p2", LEFT)]),
        ([40, 100, 40], [("p1", "100 bytes fill a bucket"), ("p0 p2", "")]),
        ([120], [("p0", "120 bytes fill a bucket")]),
        ([], []),
    ],
    ids=str,
)
def test_a_bucket_holds_at_most_the_limit(sizes: list[int], want: list[tuple[str, str]]) -> None:
    step = Step()
    made = by_limit([step.sum_of(n // 4) for n in sizes], 100, step)
    assert said(made) == want
    assert [b.nbytes for b in made] == [sum(sizes[int(p[1:])] for p in names.split()) for names, _ in want]


@pytest.mark.parametrize(
    ("needed", "want"),
    [
        ((LAST, LAST, LAST), [("p0 p1 p2", "")]),
        ((3, LAST, LAST), [("p0 p1 p2", "")]),
        ((2, LAST, LAST), [("p0 p1", ""), ("p2", LEFT)]),
        ((1, LAST, LAST), [("p0", USED), ("p1 p2", "")]),
        ((1, 2, LAST), [("p0", USED), ("p1", USED), ("p2", LEFT)]),
    ],
)
def test_a_bucket_is_sent_before_one_of_its_sums_is_used(needed: tuple[int, ...], want: list[tuple[str, str]]) -> None:
    step = Step()
    for n in needed:
        step.sum_of(2, needed=n)
    assert said(by_limit(step.sent, 1000, step)) == want
    only = [(names, "the only one of its unit and dtype" if why == LEFT else why) for names, why in want]
    assert said(by_unit(step.sent, step)) == only


def test_buckets_are_of_one_group_each() -> None:
    step = Step()
    for i in range(2):
        step.sum_of(2)
        step.sum_of(2, axes="tp")
        step.sum_of(2, dtype=F64)
        step.sum_of(2, options=("avg",))
        step.sum_of(2, unit="blocks.0")
        step.sum_of(2, kind="wire_all_reduce", options=("sum", "bfloat16"))
        step.scatter([1, 1])
        step.scatter([2, 0])
        assert len(step.sent) == 8 * (i + 1)
    want = [("p7", ODD), *((f"p{i} p{i + 8}", "") for i in range(7)), ("p15", ODD)]
    assert said(by_limit(step.sent, 1000, step)) == want
    assert sorted(said(by_unit(step.sent, step))) == sorted(want)
    slow = Network(1.0, 1e9, 1e12)
    assert said(by_time(step.sent, slow, step)) == want


def test_a_scatter_into_other_parts_is_alone_whatever_its_size() -> None:
    step = Step()
    for _ in range(2):
        step.scatter([300, 100])
        step.scatter([4, 2])
        step.scatter([3, 3])
    alone = [("p0", ODD), ("p1", ODD), ("p3", ODD), ("p4", ODD)]
    for made in (by_limit(step.sent, 100, step), by_unit(step.sent, step)):
        assert said(made) == [*alone, ("p2 p5", "")]


def test_units() -> None:
    step = Step()
    for unit in ("a", "b", "a", "c", "b", "b"):
        step.sum_of(4000, unit=unit)
    assert said(by_unit(step.sent, step)) == [
        ("p0 p2", ""), ("p1 p4 p5", ""), ("p3", "the only one of its unit and dtype"),
    ]  # fmt: skip


def test_a_unit_whose_sum_is_used_is_closed() -> None:
    step = Step()
    for needed in (3, LAST, LAST, LAST, 5, LAST):
        step.sum_of(2, needed=needed, unit="a")
    made = by_unit(step.sent, step)
    assert [names for names, _ in said(made)] == ["p0 p1 p2", "p3 p4", "p5"]
    assert made[-1].why == "the only one of its unit and dtype"


def test_buckets_start_in_the_order_of_their_last_gradients() -> None:
    step = Step()
    a, b, c = (step.sum_of(2, stage=s) for s in (7, 3, 5))
    made = in_order([FusedBucket((a,)), FusedBucket((b,)), FusedBucket((b, c)), FusedBucket((a, b))])
    assert [tuple(r.name for r in m.members) for m in made] == [("p1",), ("p1", "p2"), ("p0",), ("p0", "p1")]


# -- by time ---------------------------------------------------------------------------------------------


class Model:
    """What the cut knows, written down apart: seconds on the wire, when gradients exist, and what may share."""

    def __init__(self, sent: list[SentGradient], born: list[float], network: Network) -> None:
        self.sent, self.network = sent, network
        self.wire = [r.nbytes / network.bandwidth for r in sent]
        self.exists = [max(born[: i + 1]) + 50e-6 for i in range(len(sent))]
        self.most = max(sum(self.wire) / 12, 4 * network.latency)

    def fits(self, i: int, j: int) -> bool:
        """Whether the gradients from i up to j may run as one."""
        part = self.sent[i:j]
        small = sum(self.wire[i:j]) <= self.most * (1 + 1e-9) and j - i <= 256
        return j - i == 1 or (small and max(r.ready for r in part) < min(r.needed for r in part))

    def end(self, cuts: list[int]) -> float:
        """When the last of the buckets that begin at these places has arrived."""
        at = 0.0
        for i, j in itertools.pairwise([*cuts, len(self.sent)]):
            at = max(at, self.exists[j - 1]) + self.network.latency + sum(self.wire[i:j])
        return at

    def all_cuts(self) -> list[list[int]]:
        """All that may be."""
        n = len(self.sent)
        made = ([0, *c] for k in range(n) for c in itertools.combinations(range(1, n), k))
        return [c for c in made if all(self.fits(i, j) for i, j in itertools.pairwise([*c, n]))]


def cut(step: Step, network: Network) -> list[int]:
    made = by_time(step.sent, network, step)
    assert [r for b in made for r in b.members] == step.sent
    assert all(b.why == ("sending it with its neighbours would end later" if len(b.members) == 1 else "") for b in made)
    return [step.sent.index(b.members[0]) for b in made]


def a_step(draw: random.Random, even: bool) -> tuple[Step, list[float], Network]:
    network = Network(draw.choice([0.0, 0.01, 0.3, 1.0]), 100.0, draw.choice([1e3, 1e4, 1e5]))
    step, born, now = Step(), list[float](), 0.0
    count, order = draw.choice([1, 5, 9]), list[fx.Node]()
    for _ in range(count):
        for _ in range(draw.choice([0, 1, 1, 3])):
            k = draw.randint(1, 40)
            order.append(step.node(aten.mm.default, (step.given(2, k), step.given(k, 5)), step.value(2, 5)))
            now += 2 * 2 * k * 5 / network.flops + 5e-6 if even else 0.0
        order.append(step.given(1))
        ready = len(order) - 1
        n = draw.choice([1, 3, 10, 30])
        now += 0.0 if even else 4 * 1024 * n / network.flops
        sent = step.sum_of(n, ready, draw.choice([LAST, LAST, ready + 5]))
        step.complete[sent.node] = now
        born.append(now)
    step.order = order
    if even:
        assert times(step, network) == step.complete  # type: ignore[arg-type]
    return step, born, network


@pytest.mark.parametrize("even", [True, False])
def test_no_other_cut_ends_sooner_with_fewer_buckets(even: bool) -> None:
    draw = random.Random(5)
    for _ in range(60):
        step, born, network = a_step(draw, even)
        model, cuts = Model(step.sent, born, network), cut(step, network)
        ends = {tuple(c): model.end(c) for c in model.all_cuts()}
        best = min(ends.values())
        late = best + max(50e-6, 0.05 * (best - model.exists[-1]))
        assert ends[tuple(cuts)] <= late + 1e-9
        fewest = min(len(c) for c, end in ends.items() if end <= late - 1e-9)
        assert len(cuts) <= fewest, (cuts, ends)


def test_a_bucket_has_so_many_gradients_at_most() -> None:
    step = Step()
    for _ in range(300):
        step.sum_of(1)
    assert cut(step, Network(10.0, 1e9, 1e12)) == [0, 44]


@pytest.mark.parametrize(("latency", "count"), [(0.0, 15), (0.04, 15), (0.05, 10), (0.1, 5), (1.0, 1)])
def test_a_bucket_takes_a_twelfth_of_all_or_four_latencies(latency: float, count: int) -> None:
    """Of 30 gradients of 1/16 s on the wire: 5/32 s, that is two of them."""
    step = Step()
    for _ in range(30):
        step.sum_of(25)
    assert len(cut(step, Network(latency, 1600.0, 1e12))) == count


@pytest.mark.parametrize(
    ("kind", "options", "axes", "seconds"),
    [
        ("all_reduce", ("sum",), "dp", 400),  # 2 x 1/2
        ("all_reduce", ("sum",), "tp", 532),  # 2 x 2/3, rounded down: 533.3
        ("all_reduce", ("sum",), "dp,tp", 664),
        ("wire_all_reduce", ("sum", "bfloat16"), "dp", 200),
        ("wire_all_reduce", ("sum", "float8/4"), "dp", 125),
    ],
)
def test_seconds_on_the_wire(kind: str, options: tuple[Any, ...], axes: str, seconds: int) -> None:
    """A gradient is sent with its neighbour if the wire has four latencies for both, and no less."""
    for latency, together in ((seconds / 2 * 1.02, True), (seconds / 2 * 0.98, False)):
        step = Step()
        for _ in range(2):
            step.sum_of(100, kind=kind, options=options, axes=axes)
        assert len(cut(step, Network(latency, 1.0, 1e12))) == (1 if together else 2)


def test_seconds_of_ops() -> None:
    step, network = Step(), Network(0.0, 1.0, 1000.0)
    a, b = step.given(6, 10), step.given(10, 4)
    assert seconds_of(a, network) == 0
    view = step.node(aten.t.default, (a,), step.value(10, 6))
    assert seconds_of(view, network) == 0
    sent = step.sum_of(1000).node
    assert sent.target in COLLECTIVES
    assert seconds_of(sent, network) == 0
    product = step.node(aten.mm.default, (a, b), step.value(6, 4))
    assert seconds_of(product, network) == pytest.approx(0.48 + 5e-6, rel=1e-12)
    # Read and written at 10 GB/s: 240 + 160 + 96 bytes, of float64 twice as many.
    other = step.node(aten.cat.default, ([a, b],), step.value(24))
    assert seconds_of(other, network) == pytest.approx(496e-10 + 5e-6, rel=1e-12)
    other = step.node(aten.cat.default, ([a, b],), (step.value(24, dtype=F64), None))
    assert seconds_of(other, network) == pytest.approx(592e-10 + 5e-6, rel=1e-12)


def test_seconds_of_ops_with_several_results() -> None:
    step, network = Step(), Network(0.0, 1.0, 1e6)
    grad, x, w = step.given(2, 5, 7, 7), step.given(2, 3, 7, 7), step.given(5, 3, 3, 3)
    options = [5], [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    flops = 2 * (2 * 7 * 7) * 5 * (3 * 3 * 3)  # of the forward, and of each of its gradients
    for mask in itertools.product([True, False], repeat=2):
        values = (
            step.value(2, 3, 7, 7) if mask[0] else None,
            step.value(5, 3, 3, 3) if mask[1] else None,
            step.value(5),
        )
        node = step.node(aten.convolution_backward.default, (grad, x, w, *options, [*mask, True]), values)
        assert seconds_of(node, network) == pytest.approx(sum(mask) * flops / 1e6 + 5e-6, rel=1e-12)
