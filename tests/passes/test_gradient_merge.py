"""One update for the gradients of several micro-steps."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright import collective
from meshwright.errors import DesyncError, PassError, ProgramError
from meshwright.passes import (
    DataParallelOptimization,
    GradientMerge,
    PassManager,
    parse,
)
from meshwright.program.compile import capture_local, compile_step
from meshwright.program.ir.nodes import info_of
from meshwright.ranks import runtime
from meshwright.train.config import TrainConfig
from meshwright.train.model import GPT, loss_of
from meshwright.train.plan import plan_for
from tests.support import by_hand as by_hand_steps
from tests.support.by_hand import all_reduce
from tests.support.processes import run_processes

Tensor = torch.Tensor
MICRO, SEQ = 8, 6
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
}


class Experts(nn.Module):
    """Experts in one tensor, between dense layers; the batch is (expert, token, feature)."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.out = nn.Linear(6, 8), nn.Linear(8, 1)
        self.experts = nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.bmm(self.dense(x).relu(), self.experts).relu())


def experts_case() -> Any:
    """Expert weights are summed over dp, dense weights over dp and ep."""

    def data(i: int, n: int) -> Tensor:
        return torch.randn(4, n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(i))

    torch.manual_seed(0)
    layouts = {"experts": {"ep": mw.Shard(0)}}
    options = {"layouts": layouts, "batch": {"dp": mw.Shard(1), "ep": mw.Shard(0)}}
    return Experts().double(), lambda m, x: m(x).square().mean(), data, options, 1


def gpt_case(axes: dict[str, int], tie: bool = False, sp: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    """The GPT of the main job."""
    cfg = TrainConfig(mesh=axes, layers=1, hidden=24, heads=2, seq=SEQ, batch=MICRO, tie=tie)

    def data(i: int, n: int) -> Any:
        g = torch.Generator().manual_seed(i)
        return torch.randint(0, 256, (n, SEQ), generator=g), torch.randint(0, 256, (n, SEQ), generator=g)

    torch.manual_seed(0)
    plan = plan_for(mw.Mesh(axes), sequence_parallel=sp, tie=tie)
    options = {"layouts": plan.layouts, "batch": plan.batch, "inputs": plan.inputs, "outputs": plan.outputs}
    return GPT(cfg).to(dtype), lambda m, b: loss_of(m, *b), data, options, 0


def case_of(kind: str, axes: dict[str, int]) -> Any:
    return experts_case() if kind == "experts" else gpt_case(axes, tie=kind == "tied", sp=kind == "sp")


def one_device(case: Any, optim: str, sizes: Sequence[int], clip: float | None, avg: bool = True) -> dict[str, Tensor]:
    """Parameters after a step on each whole batch; ``sizes``: micro-steps in each."""
    model, loss, data, _, _ = case
    optimizer = OPTIMIZERS[optim](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for i, k in enumerate(sizes):
        (loss(model, data(i, k * MICRO)) * (1 if avg else k)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def cut(batch: Any, k: int, dim: int) -> list[Any]:
    parts = [x.chunk(k, dim) for x in (batch if isinstance(batch, tuple) else (batch,))]
    return [tuple(p[i] for p in parts) if isinstance(batch, tuple) else parts[0][i] for i in range(k)]


def merged(axes: dict[str, int], kind: str, optim: str, sizes: Sequence[int], k: int, passes: Any, options: Any) -> Any:
    """Parameters after merged micro-steps and flushes, and the bytes of each call."""
    model, loss, data, layout, dim = case_of(kind, axes)
    mesh = mw.init_mesh(axes) if dist.is_initialized() else mw.Mesh(axes)
    optimizer = OPTIMIZERS[optim](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    example = data(0, MICRO)
    step = compile_step(model, loss, optimizer, example, mesh=mesh, passes=passes, **layout, **options)
    calls, flushed = [], 0
    for i, n in enumerate(sizes):
        for micro in cut(data(i, n * MICRO), n, dim):
            with collective.counting() as counts:
                step(micro)
            calls.append((counts.bytes_by_axes, counts.kinds))
        assert step.micro_step == (0 if n == k else n)
        flushed += step.flush()
        assert step.micro_step == 0
        schedule.step()
    assert flushed == sum(n != k for n in sizes)
    return {n: mw.unshard(p.detach()).clone() for n, p in model.named_parameters()}, calls


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(((found[n] - p).abs().max() / p.abs().max()).item() for n, p in wanted.items())


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(mw.unshard(p), mw.unshard(q)) for p, q in pairs)


def plain_bytes(axes: dict[str, int], kind: str, optim: str, passes: Any, options: Any) -> Any:
    """Bytes by axes of one step without merging."""
    return merged(axes, kind, optim, [1], 1, passes, options)[1][0][0]


DPO = "data-parallel-optimization:bucket_bytes=20000"
MERGE = "gradient-merge:k_steps=4"
SIZES = (4, 4, 2)  # the last update is of leftovers


@pytest.mark.thin(11)
@pytest.mark.parametrize("passes", [(MERGE,), (MERGE, DPO), (DPO, MERGE)], ids=["merge", "merge-dp", "dp-merge"])
@pytest.mark.parametrize(
    ("axes", "kind", "optim", "options"),
    [
        ({"dp": 2}, "gpt", "adamw", {}),
        ({"dp": 4}, "tied", "sgd", {"clip_grad_norm": 0.1}),
        ({"dp": 2, "tp": 2}, "gpt", "adamw", {"clip_grad_norm": 0.1}),
        ({"dp": 2, "tp": 2}, "sp", "sgd", {"gradients": True}),
        ({"dp": 2, "tp": 2}, "gpt", "sgd", {"fsdp": "dp", "clip_grad_norm": 0.1}),
        ({"dp": 2, "tp": 2}, "gpt", "adamw", {"shard_states": "dp"}),
        ({"dp": 2}, "gpt", "rmsprop", {}),
        ({"dp": 2, "ep": 2}, "experts", "sgd", {"clip_grad_norm": 0.1}),
    ],
)
def test_equals_the_whole_batch(
    axes: dict[str, int], kind: str, optim: str, options: dict[str, Any], passes: Sequence[str]
) -> None:
    wanted = one_device(case_of(kind, axes), optim, SIZES, options.get("clip_grad_norm"))
    ranks = mw.simulate(lambda: merged(axes, kind, optim, SIZES, 4, passes, options), mw.Mesh(axes))
    assert max(difference(found, wanted) for found, _ in ranks) < 1e-9
    others = [p for p in passes if p != MERGE]
    plain = mw.simulate(lambda: plain_bytes(axes, kind, optim, others, options), mw.Mesh(axes))
    for (_, calls), once in zip(ranks, plain, strict=True):
        # An update moves what a step without merging moves; in other buckets other gaps of up to 256 bytes lie
        # between gradients.
        assert calls[3][0] == calls[7][0]
        assert calls[3][0] == pytest.approx(once, rel=0.005 if others else 0, abs=256 if others else 0)
        if "fsdp" not in options:
            assert ("dp",) not in calls[0][0]  # a micro-step moves nothing over dp
            assert "reduce_scatter" not in calls[0][1] or kind == "sp"


def test_whole_sums_are_scattered_once_per_update() -> None:
    axes, options = {"dp": 2}, {"fsdp": "dp"}
    wanted = one_device(case_of("gpt", axes), "sgd", (2,), None)
    passes = [GradientMerge(2, whole_sums=True)]
    for found, calls in mw.simulate(lambda: merged(axes, "gpt", "sgd", (2,), 2, passes, options), mw.Mesh(axes)):
        assert difference(found, wanted) < 1e-9
        assert ["reduce_scatter" in kinds for _, kinds in calls] == [False, True]


@pytest.mark.parametrize("weighted", ["yes", "no"])
def test_what_is_left_over_is_a_mean_of_its_own(weighted: str) -> None:
    """An update from two of four micro-steps, in an optimizer that a factor on its gradients shows in."""
    axes = {"dp": 2}
    passes = (f"gradient-merge:k_steps=4,weighted={weighted}",)
    wanted = one_device(case_of("gpt", axes), "sgd", SIZES, None)
    ranks = mw.simulate(lambda: merged(axes, "gpt", "sgd", SIZES, 4, passes, {}), mw.Mesh(axes))
    assert max(difference(found, wanted) for found, _ in ranks) < 1e-9


REAL = [
    ({"dp": 2}, "gpt", "adamw", {"clip_grad_norm": 0.1}, (MERGE,)),
    ({"dp": 4}, "tied", "sgd", {}, (DPO, MERGE)),
    ({"dp": 2, "tp": 2}, "gpt", "adamw", {"fsdp": "dp"}, (MERGE, DPO)),
    ({"dp": 2, "ep": 2}, "experts", "sgd", {"clip_grad_norm": 0.1}, (MERGE, DPO)),
]


@pytest.mark.thin(6)
@pytest.mark.processes
@pytest.mark.parametrize(("axes", "kind", "optim", "options", "passes"), REAL)
def test_real_processes(axes: Any, kind: str, optim: str, options: Any, passes: Any) -> None:
    sizes = (4,) * 20
    wanted = one_device(case_of(kind, axes), optim, sizes, options.get("clip_grad_norm"))
    world = mw.Mesh(axes).size
    for found, calls in run_processes(merged, world, axes, kind, optim, sizes, 4, passes, options, timeout=120):
        assert difference(found, wanted) < 1e-9
        assert len(calls) == 80


def test_a_sum_instead_of_a_mean() -> None:
    axes, sizes = {"dp": 2}, (3, 3, 2)
    wanted = one_device(case_of("gpt", axes), "sgd", sizes, None, avg=False)
    passes = [GradientMerge(3, avg=False)]
    for found, _ in mw.simulate(lambda: merged(axes, "gpt", "sgd", sizes, 3, passes, {}), mw.Mesh(axes)):
        assert difference(found, wanted) < 1e-9

    def of_no_mean(avg: bool) -> int:  # nobody asks what a micro-step counts
        model, mesh = nn.Linear(4, 1), mw.Mesh(axes)
        step = compile_step(
            model, lambda m, x: m(x).square().mean().sqrt(), OPTIMIZERS["sgd"](model.parameters()), torch.ones(4, 4),
            mesh=mesh, batch={"dp": mw.Shard(0)}, passes=[GradientMerge(2, avg=avg)],
        )  # fmt: skip
        step(torch.ones(4, 4))
        return step.micro_step

    assert mw.simulate(lambda: of_no_mean(False), mw.Mesh(axes)) == [1, 1]
    with pytest.raises(PassError, match="weighted"):
        mw.simulate(lambda: of_no_mean(True), mw.Mesh(axes))


def test_one_step_is_the_identity() -> None:
    def run() -> Any:
        model, loss, data, layout, _ = gpt_case({"dp": 2})
        step = compile_step(model, loss, OPTIMIZERS["sgd"](model.parameters()), data(0, 4), mesh=mesh, **layout)
        made, record = GradientMerge(1).apply(step.program)
        assert made is step.program
        assert "stays as it is" in record.summary
        step(data(0, 4))
        return step.micro_step, step.flush(), len(step.split(data(0, 4)))

    mesh = mw.Mesh({"dp": 2})
    assert mw.simulate(run, mesh)[0] == (0, False, 1)


# -- the programs ----------------------------------------------------------------------------------------


def static(k: int = 4, dtype: torch.dtype = torch.float64, training: bool = True, **options: Any) -> Any:
    """A step on simulated ranks, from inside one of them."""
    model, loss, data, layout, _ = gpt_case({"dp": 2}, dtype=dtype)
    model.train(training)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    mesh = mw.Mesh({"dp": 2})
    options = {"passes": [GradientMerge(k)] if k else [], **layout, **options}
    step = compile_step(model, loss, optimizer, data(0, MICRO), mesh=mesh, **options)
    return step, model, optimizer, data


def test_the_program_that_is_given_stays() -> None:
    def run() -> Any:
        step = static(0)[0]
        before = str(step.program)
        made, record = GradientMerge(4, weighted=False).apply(step.program)
        with pytest.raises(PassError, match="does not say what its loss is a mean over: list the pass"):
            GradientMerge(4).apply(step.program)
        assert str(step.program) == before
        assert not step.program.parts
        assert set(made.parts) == {"accumulate", "flush"}
        with pytest.raises(PassError, match="merges 4 micro-steps already"):
            GradientMerge(2).apply(made)
        return record.details, made.parts["accumulate"].kinds, len(list(dict(step.model.named_parameters())))

    details, micro, params = mw.simulate(run, mw.Mesh({"dp": 2}))[0]
    assert details["sums"] == params
    assert micro == {}
    assert details["last"] == {"all_reduce": params} == details["flush"]


def test_the_mean_is_taken_as_sums_are_added_to() -> None:
    """A factor of the op that adds, weighted or not; and sums are divided once per update."""

    def run() -> Any:
        passes = [GradientMerge(4, weighted=False)]
        plain, alike, weighted = static(0)[0].program, static(0, passes=passes)[0].program, static(4)[0].program
        for program in (alike, alike.parts["accumulate"], weighted, weighted.parts["accumulate"]):
            names = {i.name for i in program.inputs if i.kind == "param"}
            sums = {
                n.name for n, i in zip(program.placeholders, program.inputs, strict=True)
                if i.kind == "accumulator" and i.name in names
            }  # fmt: skip
            added = [n for n in program.graph.nodes if n.args and getattr(n.args[0], "name", "") in sums]
            factors = [n.kwargs.get("alpha", n.args[-1]) for n in added if str(n.target).startswith("aten.add")]
            assert len(factors) == len(sums)
            assert len(set(factors)) == 1
        divided = [sum("_foreach_div_" in str(n.target) for n in p.graph.nodes) for p in (weighted, alike)]
        assert divided == [1, 0]
        return [sum("mul" in str(n.target) for n in p.graph.nodes) for p in (plain, alike, alike.parts["accumulate"])]

    plain, last, accumulate = mw.simulate(run, mw.Mesh({"dp": 2}))[0]
    assert last == plain
    assert accumulate <= plain


def test_sums_lie_as_parameters_are_stored() -> None:
    def run() -> Any:
        step, model, _, data = static(2, fsdp="dp")
        step(data(0, MICRO))
        split = 0
        for name, p in model.named_parameters():
            held, spec = step.carrier.sums[name], next(i.spec for i in step.program.inputs if i.name == name)
            assert tuple(held.shape) == p.spec.local_shape(MESH_OF_TWO.coordinate(runtime.RT.rank)), name
            split += held.numel() < p.numel()
            assert spec.layout == p.spec.layout
        return split

    assert min(mw.simulate(run, MESH_OF_TWO)) > 4


MESH_OF_TWO = mw.Mesh({"dp": 2})


class Peak(TorchDispatchMode):
    """Bytes of the storages that ops made and that live, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self.seen = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage()._cdata for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, Tensor):
                self._made(t.untyped_storage(), known)
        return out

    def _made(self, storage: Any, known: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen or key in known:
            return
        self.seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size


def test_memory_of_a_micro_step_does_not_grow_with_k() -> None:
    def run() -> Any:
        peaks = []
        for k in (0, 2, 8):
            step, _, _, data = static(k)
            step(data(0, MICRO))
            for _ in range(max(k, 1) - 1):
                step(data(0, MICRO))
            with Peak() as peak:
                step(data(0, MICRO))
            peaks.append(peak.peak)
            sums = sum(t.nbytes for t in step.carrier.sums.values() if t.ndim)  # and the weights
            assert sums == (sum(p.nbytes for p in step.model.parameters()) if k else 0)
        return peaks

    def added() -> list[bool]:
        """Whether gradients go into their sums as soon as they exist."""
        made = static(2)[0].program.parts["accumulate"]
        given = zip(made.placeholders, made.inputs, strict=True)
        sums = [n for n, i in given if i.kind == "accumulator" and i.spec is not None and i.spec.shape]
        return [n.prev is n.args[1] for n in made.graph.nodes if n.args and n.args[0] in sums]

    assert all(mw.simulate(added, mw.Mesh({"dp": 2}))[0])
    plain, two, eight = mw.simulate(run, mw.Mesh({"dp": 2}))[0]
    assert two == eight
    assert two <= plain


def test_sums_of_half_precision_gradients_are_float32() -> None:
    def run() -> Any:
        step, model, _, data = static(3, torch.bfloat16)
        for i in range(3):
            step(data(i, MICRO))
        assert all(torch.count_nonzero(t) == 0 for t in step.carrier.sums.values())
        step(data(0, MICRO))
        [seed] = [
            n for n in step.program.graph.nodes if "full.default" in str(n.target) and info_of(n).role == "backward"
        ]
        assert not any("mul" in str(u.target) for u in seed.users)  # 1/3 would be rounded: it is in the sums instead
        assert all(p.dtype is torch.bfloat16 for p in model.parameters())
        return {t.dtype for t in step.carrier.sums.values() if t.ndim}

    assert mw.simulate(run, mw.Mesh({"dp": 2}))[0] == {torch.float32}


def test_evaluation_between_micro_steps() -> None:
    def run() -> Any:
        step, model, _, data = static(2)
        other, twin, _, _ = static(2, training=False)  # the user's own switch: the step trains
        for s in (step, other):
            s(data(0, MICRO))
        sums = [s.state_dict()["sums"] for s in (step, other)]
        a = step.eval()(data(5, MICRO)).item()
        step.train()
        assert other.eval(data(5, MICRO)).item() == a
        assert (other.training, twin.training) == (True, False)
        for s, before in zip((step, other), sums, strict=True):
            assert s.micro_step == 1
            after = s.state_dict()["sums"]
            assert before.keys() == after.keys()
            assert all(torch.equal(t, after[n]) for n, t in before.items())
            s(data(1, MICRO))
        assert same(model, twin)
        return a

    assert mw.simulate(run, mw.Mesh({"dp": 2}))[0] > 0


def test_batches_of_other_shapes_share_the_sums() -> None:
    micros = [(0, MICRO), (1, MICRO // 2), (2, MICRO // 2)]
    model, loss, data, _, _ = gpt_case({"dp": 2})
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for update in (micros[:2], micros[2:]):
        for i, rows in update:
            (loss(model, data(i, rows)) * (rows / sum(n for _, n in update))).backward()  # as of all rows
        optimizer.step()
        optimizer.zero_grad()
    wanted = {n: p.detach() for n, p in model.named_parameters()}

    def run() -> Any:
        step, own, _, data = static(2)
        after = []
        for i, rows in micros:
            step(data(i, rows))
            after.append(step.micro_step)
        assert after == [1, 0, 1]
        assert step.flush()
        assert len(step._ready) == 2
        return {n: mw.unshard(p.detach()).clone() for n, p in own.named_parameters()}

    for found in mw.simulate(run, mw.Mesh({"dp": 2})):
        assert difference(found, wanted) < 1e-9


# -- saving and loading ----------------------------------------------------------------------------------


def test_saved_in_mid_merge() -> None:
    def run() -> Any:
        step, model, optimizer, data = static(4)
        for i in range(6):
            step(data(i, MICRO))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict())), step.state_dict()
        losses = [mw.unshard(step(data(i, MICRO))) for i in range(6, 12)]
        other, fresh, states, _ = static(4)
        fresh.load_state_dict(saved[0][0])
        states.load_state_dict(saved[0][1])
        other.load_state_dict(saved[1])  # which the steps in between have not written to
        assert other.micro_step == 2
        for i, loss in enumerate(losses, 6):
            assert torch.equal(mw.unshard(other(data(i, MICRO))), loss)
        return same(model, fresh)

    assert all(mw.simulate(run, mw.Mesh({"dp": 2})))


def test_states_that_do_not_fit() -> None:
    def run() -> Any:
        step, _, _, data = static(4)
        step(data(0, MICRO))
        state = step.state_dict()
        with pytest.raises(ProgramError, match="no state of this step"):
            step.load_state_dict({"model": {}})
        with pytest.raises(ProgramError, match="every 4"):
            step.load_state_dict({**state, "micro_step": 4})
        with pytest.raises(ProgramError, match="another program"):
            step.load_state_dict({**state, "sums": {}})
        with pytest.raises(ProgramError, match="layouts that it was saved on"):
            step.load_state_dict({**state, "sums": {n: t[:1] if t.ndim else t for n, t in state["sums"].items()}})
        with pytest.raises(ProgramError, match=r"is torch.float32 of shape .* here it is torch.float64"):
            step.load_state_dict({**state, "sums": {n: t.float() for n, t in state["sums"].items()}})
        with pytest.raises(DesyncError, match="micro-steps"):
            step.load_state_dict({**state, "micro_step": int(collective.group(step.mesh, (0,)).index)})
        assert step.micro_step == 1
        return True

    assert all(mw.simulate(run, mw.Mesh({"dp": 2})))


# -- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, -1, 2.0, "4", True, None])
def test_bad_k(k: Any) -> None:
    with pytest.raises(PassError, match="k_steps"):
        GradientMerge(k)


def test_other_bad_input() -> None:
    with pytest.raises(PassError, match="avg"):
        GradientMerge(2, avg=1)  # type: ignore[arg-type]
    with pytest.raises(PassError, match="k_steps"):
        parse("gradient-merge")
    with pytest.raises(PassError, match="listed 2 times"):
        PassManager([GradientMerge(2), "gradient-merge:k_steps=3"])
    with pytest.raises(PassError, match="listed before"):
        PassManager([DataParallelOptimization(), GradientMerge(2)], keep_order=True)
    assert [p.name for p in PassManager([DPO, MERGE]).passes] == [MERGE.partition(":")[0], DPO.partition(":")[0]]


def test_a_batch_that_k_does_not_divide() -> None:
    def run() -> Any:
        step, _, _, data = static(3)
        with pytest.raises(ProgramError, match="3 does not divide 8"):
            step.split(data(0, 8))
        return [x[0].shape[0] for x in step.split(data(0, 9))]

    assert mw.simulate(run, mw.Mesh({"dp": 2}))[0] == [3, 3, 3]


def test_programs_that_cannot_be_merged() -> None:
    def run() -> Any:
        step, _, _, data = static(0)
        overlapped = DataParallelOptimization().apply(step.program)[0]
        with pytest.raises(PassError, match="merge first"):
            GradientMerge(2).apply(overlapped)
        step.eval()(data(0, MICRO))
        with pytest.raises(PassError, match="no gradients"):
            GradientMerge(2).apply(step.program)
        return True

    assert all(mw.simulate(run, mw.Mesh({"dp": 2})))


# -- steps by hand ---------------------------------------------------------------------------------------


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 2))


def averaged(g: Tensor) -> Tensor:
    g = g.clone()
    all_reduce(g)
    return g / 2


def written(model: nn.Module, optimizer: Any, x: Tensor, how: str) -> Any:
    """A step by hand, in several ways."""
    loss = model(x).square().mean()
    loss.backward()
    for p in model.parameters() if how != "hooks" else ():
        p.grad = averaged(p.grad)
        if how == "batch":
            p.grad *= x.mean()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    if how == "norm":
        return loss.detach(), norm
    return (model(x).sum() if how == "after" else loss).detach()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("norm", r"the result aux.0 is computed from gradients, which are complete in every 2th call only"),
        ("after", r"test_gradient_merge.py:\d+ reads parameters behind an update of them in the same step"),
        ("batch", r"the update reads batch.0, which only a micro-step has"),
    ],
)
def test_steps_by_hand_that_cannot_be_merged(how: str, message: str) -> None:
    case = by_hand_steps.Case(lambda *args: written(*args, how), two_layers, {"dp": 2})
    with pytest.raises(PassError, match=message):
        GradientMerge(2, weighted=False).apply(by_hand_steps.Captured(case).programs[0])


def test_gradients_that_hooks_sum_are_summed_once_per_update() -> None:
    def setup(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_hook(averaged)

    case = by_hand_steps.Case(lambda *args: written(*args, "hooks"), two_layers, {"dp": 2}, setup)
    made, _ = GradientMerge(2, weighted=False).apply(by_hand_steps.Captured(case).programs[0])
    assert (made.parts["accumulate"].kinds, made.kinds) == ({}, {"all_reduce": 4})


class CNN(nn.Module):
    """A small network with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.norm(self.first(x)).relu()).relu().mean((2, 3)))


def by_hand(passes: Sequence[str]) -> Any:
    """A step by hand, merged, against micro-steps that are added up by hand."""
    mesh = mw.init_mesh({"dp": dist.get_world_size()})
    rank, k, results = dist.get_rank(), 4, []

    def data(i: int) -> Any:
        g = torch.Generator().manual_seed(100 * i + rank)
        return torch.randn(4, 3, 6, 6, dtype=torch.float64, generator=g), torch.randint(0, 5, (4,), generator=g)

    for captured in (False, True):
        torch.manual_seed(0)
        model = CNN().double()
        optimizer = OPTIMIZERS["adamw"](model.parameters())

        def forward(b: Any, model: nn.Module = model) -> Tensor:
            return nn.functional.cross_entropy(model(b[0]), b[1])

        def update(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

        def step(b: Any, forward: Any = forward, update: Any = update) -> Tensor:
            loss = forward(b)
            loss.backward()
            update()
            return loss

        if captured:
            run = capture_local(step, mesh, model=model, optimizer=optimizer, batch=data(0), passes=passes)
            losses = [run(data(i)) for i in range(20 * k)]
        else:
            losses = []
            for i in range(20 * k):
                losses.append(forward(data(i)))
                (losses[-1] / k).backward()
                if i % k == k - 1:
                    update()
        results.append({**model.state_dict(), "losses": torch.stack(losses).detach()})
    return difference(*results)


@pytest.mark.processes
@pytest.mark.parametrize("passes", [(MERGE,), (DPO, MERGE)], ids=["merge", "both"])
@pytest.mark.thin(2)
def test_merged_steps_by_hand(passes: Any) -> None:
    assert max(run_processes(by_hand, 2, passes)) < 1e-9


@pytest.mark.parametrize("rows", [(5, 1), (1, 5), (1, 1), (5, 4), (1, 1, 5, 4)])
def test_micro_batches_of_one_row(rows: tuple[int, ...]) -> None:
    """A dim of one element is not split: gradients lie otherwise, and are not added to the others."""
    mesh = mw.Mesh({"dp": 2})
    batches = [torch.randn(n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in rows]
    loss_fn = lambda m, x: m(x).square().mean()  # noqa: E731

    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(5, 3).double()
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    model, optimizer = made()
    for i in range(0, len(rows), 2):
        for b in batches[i : i + 2]:
            (loss_fn(model, b) * len(b) / sum(rows[i : i + 2])).backward()  # as of all rows
        optimizer.step()
        optimizer.zero_grad()

    def run() -> Any:
        mine, own = made()
        step = mw.compile_step(
            mine, loss_fn, own, batches[0], mesh=mesh, batch={"dp": mw.Shard(0)}, passes=["gradient-merge:k_steps=2"]
        )
        for b in batches:
            step(b)
        return mw.unshard(mine.weight.detach())

    if rows in ((5, 1), (1, 5)):
        with pytest.raises(
            ProgramError, match=r"micro-batches of 1 and of more elements .* the gradient of weight .* step.flush\(\)"
        ):
            mw.simulate(run, mesh)
    else:
        for got in mw.simulate(run, mesh):
            torch.testing.assert_close(got, model.weight.detach())
