"""data-parallel-optimization of steps as people write them: each part of it alone, and all, beside the step itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from meshwright import collective
from meshwright.compat import FakeTensorMode
from meshwright.errors import CaptureError, PassError
from meshwright.program import Program
from meshwright.program.ir.linear import is_zero, lends_shape, linear_in, scale_of
from meshwright.program.ir.nodes import info_of
from meshwright.program.ir.trace import Recorder
from tests.support.by_hand import Captured, Case, all_reduce, apart, as_written

Tensor = torch.Tensor
PASS = "data-parallel-optimization"
PRUNE, OVERLAP, FUSE = f"{PASS}:fuse=no,overlap=no", f"{PASS}:fuse=no,prune=no", f"{PASS}:overlap=no,prune=no"
ALL, SMALL = f"{PASS}:bucket_bytes=1000000", f"{PASS}:bucket_bytes=200"
N = 2


class Net(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean()
    return out


Grads = list[Any]  # parameters, all of which have a gradient


def grads(model: nn.Module) -> Grads:
    return list(model.parameters())


# -- how people sum ----------------------------------------------------------------------------------------


def mean(ps: Grads) -> None:
    for p in ps:
        all_reduce(p.grad)
        p.grad /= N


def averaged(ps: Grads) -> None:
    for p in ps:
        all_reduce(p.grad, op="avg")


def divided_first(ps: Grads) -> None:
    for p in ps:
        p.grad.mul_(1 / N)
        all_reduce(p.grad)


def divided_together(ps: Grads) -> None:
    for p in ps:
        all_reduce(p.grad)
    torch._foreach_div_([p.grad for p in ps], N)


def mean_twice(ps: Grads) -> None:
    for p in ps:
        for _ in range(2):
            all_reduce(p.grad)
            p.grad /= N


def scaled_all_over(ps: Grads) -> None:
    for p in ps:
        p.grad.mul_(0.25).mul_(4 / 3)
        all_reduce(p.grad)
        p.grad.mul_(3).div_(N)


SYNCS = [mean, averaged, divided_first, divided_together, mean_twice, scaled_all_over]

# -- what they do with gradients before -------------------------------------------------------------------


def each(edit: Callable[[Any], Any]) -> Callable[[Grads], None]:
    """What gives a new gradient of a parameter, or changes it (None), for all."""

    def edited(ps: Grads) -> None:
        for p in ps:
            made = edit(p)
            p.grad = p.grad if made is None else made

    return edited


def sloppy(p: Any) -> Any:
    return p.grad + 0.1 * p  # with gradients on


EDITS: dict[str, Callable[[Grads], None]] = {
    "decay": each(lambda p: p.grad.add_(p.detach(), alpha=0.1)),
    "sloppy": each(sloppy),
    "constant": each(lambda p: p.grad.add_(0.01)),
    "reversed": each(lambda p: 0.01 - p.grad),
    "clamp": each(lambda p: p.grad.clamp_(-0.01, 0.01)),
    "squared in place": each(lambda p: p.grad.square_()),
    "power": each(lambda p: p.grad.pow_(3)),
    "sign": each(lambda p: p.grad.sign_()),
    "where": each(lambda p: torch.where(p.grad > 0, p.grad, 0.5)),
    "filled": each(lambda p: p.grad.masked_fill_(p.grad > 0.01, 0.3)),
    "lerp": each(lambda p: p.grad.lerp_(p.detach(), 0.1)),
    "addcmul": each(lambda p: p.grad.addcmul_(p.detach(), p.detach(), value=0.1)),
    "square": each(lambda p: p.grad * p.grad),
    "third": each(lambda p: p.grad / 3),
    "integers": each(lambda p: (p.grad * 1000).int().double() / 1000),
    "foreach": lambda ps: torch._foreach_add_([p.grad for p in ps], 0.01),
    "foreach decay": lambda ps: torch._foreach_add_([p.grad for p in ps], [p.detach() for p in ps], alpha=0.1),
    "clipped": lambda ps: nn.utils.clip_grad_norm_(ps, 0.05) and None,
}

Steps = Callable[[nn.Module, Tensor, Callable[[Grads], None]], Tensor]


def once(model: nn.Module, x: Tensor, sync: Callable[[Grads], None]) -> Tensor:
    loss = loss_of(model, x)
    loss.backward()  # type: ignore[no-untyped-call]
    sync(grads(model))
    return loss


def micro_steps(model: nn.Module, x: Tensor, sync: Callable[[Grads], None]) -> Tensor:
    """Each adds to what was summed and averaged before."""
    for part in (x[:1], x[1:2], x[2:]):
        loss = once(model, part, sync)
    return loss


def local_after(model: nn.Module, x: Tensor, sync: Callable[[Grads], None]) -> Tensor:
    """A second backward, that nobody sums."""
    loss = once(model, x, sync)
    model(torch.ones_like(x)).sum().backward()
    return loss


def micro_mean_after(model: nn.Module, x: Tensor, sync: Callable[[Grads], None]) -> Tensor:
    """The mean of what is summed and what is not: both have the factor."""
    loss = local_after(model, x, sync)
    for p in grads(model):
        p.grad /= 2
    return loss


def started_by_a_value(model: nn.Module, x: Tensor, sync: Callable[[Grads], None]) -> Tensor:
    """The backward starts from what differs between ranks."""
    loss = loss_of(model, x)
    loss.backward(x.abs().mean() * 2)  # type: ignore[no-untyped-call]
    sync(grads(model))
    return loss


def started_by_rows(model: nn.Module, x: Tensor, sync: Callable[[Grads], None]) -> Tensor:
    """The backward starts from a view, of a value that is read behind it, too."""
    out, weights = model(x), x.square()
    out.backward(weights[:, :1])
    sync(grads(model))
    return out.detach().sum() + weights.sum()


def on_constant(model: nn.Module, x: Tensor, sync: Callable[[Grads], None]) -> Tensor:
    """Autograd adds to what is no gradient."""
    for p in grads(model):
        p.grad = 0.1 * p.detach()
    return once(model, x, sync)


def on_zeros(model: nn.Module, x: Tensor, sync: Callable[[Grads], None]) -> Tensor:
    for p in grads(model):
        p.grad = torch.zeros_like(p)
    return once(model, x, sync)


def added(model: nn.Module, x: Tensor, sync: Callable[[Grads], None]) -> Tensor:
    """Sums of micro-steps, each averaged alone, added by foreach."""
    ps = grads(model)
    total = [torch.zeros_like(p) for p in ps]
    for part in x.chunk(2):
        loss = once(model, part, sync)
        torch._foreach_add_(total, [p.grad for p in ps])
        for p in ps:
            p.grad = None
    for p, t in zip(ps, total, strict=True):
        p.grad = t
    return loss


def penalty(model: nn.Module, x: Tensor, sync: Callable[[Grads], None]) -> Tensor:
    x = x.clone().requires_grad_()
    loss = loss_of(model, x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    loss = loss + slope.square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    sync(grads(model))
    return loss


def unused(model: Any, x: Tensor, sync: Callable[[Grads], None]) -> Tensor:
    """Parameters that have no gradient get zeros, so that all ranks sum alike."""
    loss: Tensor = model.c(x[:, :4]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    for p in grads(model):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    sync(grads(model))
    return loss


def exchanged(model: nn.Module, x: Tensor, sync: Callable[[Grads], None]) -> Tensor:
    """The gradient of a parameter is made of another's."""
    loss = loss_of(model, x)
    loss.backward()  # type: ignore[no-untyped-call]
    ps = grads(model)
    ps[5].grad, ps[3].grad = ps[3].grad[:1].clone(), ps[5].grad.expand(4).clone()
    sync(ps)
    return loss


def own_part(model: nn.Module, x: Tensor, sync: Callable[[Grads], None]) -> Tensor:
    """The sum, and some of what the rank had itself."""
    loss = loss_of(model, x)
    loss.backward()  # type: ignore[no-untyped-call]
    own = [p.grad.clone() for p in grads(model)]
    sync(grads(model))
    for p, g in zip(grads(model), own, strict=True):
        p.grad += 0.1 * g
    return loss


def decayed_weights(model: nn.Module, x: Tensor, sync: Callable[[Grads], None]) -> Tensor:
    loss = once(model, x, sync)
    with torch.no_grad():
        for p in grads(model)[::2]:
            p.mul_(0.99)
        torch._foreach_mul_(grads(model)[1::2], 0.98)
    return loss


def read_between(model: Any, x: Tensor, sync: Callable[[Grads], None]) -> Tensor:
    """Sums of some gradients are used before the others exist, and again by the update."""
    first, rest = grads(model)[4:], grads(model)[:4]
    for p, g in zip(first, torch.autograd.grad(loss_of(model, x), first), strict=True):
        p.grad = g
    sync(first)
    size = torch.stack([p.grad.norm() for p in first]).sum()
    loss = loss_of(model, x * size)
    for p, g in zip(rest, torch.autograd.grad(loss, rest), strict=True):
        p.grad = g
    sync(rest)
    return loss


def written_into_a_buffer(model: nn.Module, x: Tensor, sync: Callable[[Grads], None]) -> Tensor:
    loss = loss_of(model, x)
    loss.backward()  # type: ignore[no-untyped-call]
    ps, at = grads(model), 0
    flat = torch.empty(sum(p.numel() for p in ps), dtype=x.dtype)
    for p in ps:
        flat[at : at + p.numel()].copy_(p.grad.view(-1))
        at += p.numel()
    all_reduce(flat)
    flat /= N
    for p, part in zip(ps, flat.split([p.numel() for p in ps]), strict=True):
        p.grad = part.view_as(p)
    return loss


def case(
    steps: Steps = once,
    sync: Callable[[Grads], None] = mean,
    edit: Callable[[Grads], None] = lambda ps: None,
    setup: Callable[[nn.Module], Any] | None = None,
    **more: Any,
) -> Case:
    """A step: gradients are made, edited and summed, as often as ``steps`` says, and the model is updated."""

    def summed(ps: Grads) -> None:
        edit(ps)
        sync(ps)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = steps(model, x, summed)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Case(step, Net, {"dp": N}, setup, **more)


def checked(given: Case, *passes: str) -> list[dict[str, Any]]:
    """A step with each of these lists of passes is what it is as written; details of their records."""
    want, captured = as_written(given), Captured(given)
    assert apart(captured.run([])[0], want) < 1e-10
    details = []
    for one in passes:
        made, _, (record,) = captured.run([one])
        assert apart(made, want) < 1e-10, one
        details.append(dict(record.details))
    return details


@pytest.mark.parametrize("sync", SYNCS, ids=lambda f: f.__name__)
def test_however_the_mean_is_written(sync: Callable[[Grads], None]) -> None:
    (alone, fused) = checked(case(sync=sync), PRUNE, ALL)
    twice = 2 if sync is mean_twice else 1
    assert alone["folded"] == fused["folded"] == 1 / N**twice
    assert alone["pruned"] == fused["pruned"] == {scaled_all_over: 24, mean_twice: 12}.get(sync, 6)
    assert not alone["rescaled"]
    assert (fused["before"], fused["after"]) == (6 * twice, twice)


def test_all_programs_of_a_merge_that_update_are_pruned() -> None:
    captured, merge = Captured(case(sync=mean)), "gradient-merge:k_steps=2,weighted=false"
    plain, before, _ = captured.run([merge])
    made, after, _ = captured.run([merge, PRUNE])
    assert apart(made, plain) < 1e-10

    def scales(program: Program) -> int:
        return sum(scale_of(n) is not None for n in program.graph.nodes)

    for old, new in zip(before, after, strict=True):
        assert scales(old) - scales(new) == scales(old.parts["flush"]) - scales(new.parts["flush"]) == 6
        assert scales(old.parts["accumulate"]) == scales(new.parts["accumulate"])


def test_several_factors_stay_behind_a_sum_as_one() -> None:
    for sync in (scaled_all_over, averaged):
        for found in checked(case(on_constant, sync), PRUNE, ALL):
            assert found["rescaled"] == {0.5: 6}


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("steps", "starts", "sums"),
    [
        (micro_steps, (0.125, 0.25, 0.5), 18),
        (local_after, 0.5, 6),
        (micro_mean_after, 0.5, 6),
        (started_by_a_value, 1.0, 6),
        (started_by_rows, 1.0, 6),
        (on_constant, 1.0, 6),
        (on_zeros, 0.5, 6),
        (added, 0.5, 12),
        (penalty, 0.5, 6),
        (unused, 0.5, 6),
        (exchanged, 0.5, 6),
        (own_part, 1.0, 6),
        (decayed_weights, 0.5, 6),
        (written_into_a_buffer, 1.0, 1),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_whatever_gradients_are_added_to(steps: Steps, starts: Any, sums: int) -> None:
    """What a backward starts from where factors can go; otherwise they stay behind the sums."""
    alone, every = checked(case(steps), PRUNE, ALL)
    assert alone["folded"] == every["folded"] == starts
    assert bool(every["rescaled"]) == (starts == 1.0)
    assert every["before"] == sums
    assert every["after"] == {micro_steps: 3, added: 2}.get(steps, 1)


@pytest.mark.thin(25)
@pytest.mark.parametrize("steps", [micro_steps, local_after, on_constant, added, penalty], ids=lambda f: f.__name__)
@pytest.mark.parametrize("sync", SYNCS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("edit", ["third", "decay", "constant", "foreach"])
def test_edits_and_micro_steps(steps: Steps, sync: Callable[[Grads], None], edit: str) -> None:
    checked(case(steps, sync, EDITS[edit]), PRUNE, OVERLAP, FUSE, SMALL, ALL)


@pytest.mark.thin(4)
@pytest.mark.parametrize("edit", EDITS)
def test_edited_gradients_are_fused_and_overlapped(edit: str) -> None:
    given = case(edit=EDITS[edit])
    want, captured = as_written(given), Captured(given)
    for one in (PRUNE, SMALL, ALL):
        made, (program, *_), (record,) = captured.run([one])
        assert apart(made, want) < 1e-10
        assert record.details["before"] == 6
    assert program.kinds == {"all_reduce": 1}
    if edit not in ("clipped", "sloppy"):  # of which the norm needs all
        assert early(captured, SMALL)


def early(captured: Captured, one: str) -> bool:
    """Whether a sum starts while the backward has ops of autograd left."""
    _, (program, *_), _ = captured.run([one])
    place = {n: i for i, n in enumerate(program.graph.nodes)}
    starts = [i for n, i in place.items() if n.target in collective.STARTS.values()]
    return min(starts) < max(i for n, i in place.items() if info_of(n).transposed)


def test_a_sum_is_under_way_during_a_backward_that_adds_to_it() -> None:
    for option in ("no", "yes"):
        _, (program, *_), _ = Captured(case(local_after)).run([f"{ALL},prune={option}"])
        place = {n: i for i, n in enumerate(program.graph.nodes)}
        (start,) = (i for n, i in place.items() if n.target in collective.STARTS.values())
        (wait,) = (i for n, i in place.items() if n.target is collective.WAIT_OP)
        between = [n for n, i in place.items() if start < i < wait and info_of(n).role == "forward"]
        assert len(between) == 4, "the second forward"


def test_sums_that_are_used_before_other_gradients_exist() -> None:
    (fused, every) = checked(case(read_between, averaged), FUSE, ALL)
    assert fused["after"] == every["after"] == 2


@pytest.mark.parametrize("left_out", ["", "prune", "overlap", "fuse"])
def test_a_part_that_is_left_out_is_not_done(left_out: str) -> None:
    captured = Captured(case())
    _, (plain, *_), _ = captured.run([])
    _, (program, *_), (record,) = captured.run([ALL + (f",{left_out}=no" if left_out else "")])
    divisions = [n for n in program.graph.nodes if n.target is torch.ops.aten.div.Tensor]
    assert len(divisions) == (6 if left_out == "prune" else 0)
    assert plain.kinds == {"all_reduce": 6}
    assert program.kinds == {"all_reduce": 6 if left_out == "fuse" else 1}
    assert early(captured, SMALL + (f",{left_out}=no" if left_out else "")) == (left_out != "overlap")
    assert record.details["pruned"] == (0 if left_out == "prune" else 6)


# -- hooks: what is linear -------------------------------------------------------------------------------

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "g + 0.01": lambda g: g + 0.01,
    "0.01 + g": lambda g: 0.01 + g,
    "g - 0.01": lambda g: g - 0.01,
    "0.01 - g": lambda g: 0.01 - g,
    "g + 0": lambda g: g + 0,
    "g + g": lambda g: g + g,
    "add alpha": lambda g: torch.add(g, g, alpha=2),
    "add tensor": lambda g: g + torch.full_like(g, 0.01),
    "add zeros": lambda g: g + torch.zeros_like(g),
    "add number as tensor": lambda g: g + torch.full((), 0.01, dtype=g.dtype),
    "g * 2": lambda g: g * 2,
    "2 * g": lambda g: 2 * g,
    "g / 3": lambda g: g / 3,
    "-g": lambda g: -g,
    "0.01 / g": lambda g: 0.01 / (g.abs() + 1),
    "g * g": lambda g: g * g,
    "g / g": lambda g: g / (g + 2),
    "pow": lambda g: g**3,
    "pow 1": lambda g: g**1,
    "square": torch.square,
    "abs": torch.abs,
    "sign": torch.sign,
    "clamp": lambda g: g.clamp(-0.01, 0.01),
    "floor": lambda g: torch.div(g, 0.01, rounding_mode="floor"),
    "remainder": lambda g: torch.remainder(g, 0.01),
    "round": torch.round,
    "where 0.5": lambda g: torch.where(even(g), g, 0.5),
    "where 0": lambda g: torch.where(even(g), g, 0.0),
    "where self": lambda g: torch.where(g > 0, g, torch.zeros_like(g)),
    "masked_fill 0.5": lambda g: g.masked_fill(even(g), 0.5),
    "masked_fill 0": lambda g: g.masked_fill(even(g), 0.0),
    "lerp to ones": lambda g: g.lerp(torch.ones_like(g), 0.1),
    "lerp to itself": lambda g: torch.lerp(g, g * 2, 0.5),
    "addcmul": lambda g: torch.addcmul(g, g, g),
    "addcmul of ones": lambda g: torch.addcmul(g, torch.ones_like(g), torch.ones_like(g), value=0.1),
    "addcdiv": lambda g: torch.addcdiv(g, g, torch.full_like(g, 2.0)),
    "cat": lambda g: torch.cat([g, g])[:3],
    "cat ones": lambda g: torch.cat([g[:1], torch.ones_like(g)[1:]]),
    "stack": lambda g: torch.stack([g, -g])[0],
    "pad 0.5": lambda g: F.pad(g[..., 1:], (1, 0), value=0.5),
    "pad 0": lambda g: F.pad(g[..., 1:], (1, 0)),
    "flip": lambda g: g.flip(0),
    "roll": lambda g: g.roll(1, 0),
    "tril": torch.tril,
    "float32": lambda g: g.float().double(),
    "int": lambda g: (g * 100).int().double(),
    "bool": lambda g: (g > 0).double(),
    "bfloat16": lambda g: g.bfloat16().double(),
    "mm": lambda g: g @ torch.ones(4, 4, dtype=g.dtype),
    "mm itself": lambda g: (g @ g.T) @ g,
    "addmm onto": lambda g: torch.addmm(torch.ones(3, 4, dtype=g.dtype), g, torch.ones(4, 4, dtype=g.dtype)),
    "addmm of": lambda g: torch.addmm(g, torch.ones(3, 2, dtype=g.dtype), torch.ones(2, 4, dtype=g.dtype)),
    "softmax": lambda g: g.softmax(0),
    "relu": torch.relu,
    "threshold": lambda g: F.threshold(g, 0.0, 0.1),
    "maximum": lambda g: torch.maximum(g, -g),
    "less its mean": lambda g: g - g.mean(),
    "by its norm": lambda g: g / (g.norm() + 1),
    "index": lambda g: g[torch.tensor([2, 1, 0])],
    "index_fill": lambda g: g.index_fill(0, torch.tensor([0]), 0.5),
    "select_scatter": lambda g: torch.select_scatter(g, torch.full_like(g[0], 0.3), 0, 0),
    "full_like": lambda g: torch.full_like(g, 0.3),
    "zeros_like": torch.zeros_like,
    "view as int": lambda g: g.view(torch.int64).view(torch.float64),
    "cumsum": lambda g: g.cumsum(0),
}
# What must be known, or pruning is of no use.
KNOWN = {
    *("g + 0", "g + g", "add alpha", "add zeros", "g * 2", "2 * g", "g / 3", "-g", "where 0", "masked_fill 0"),
    *("lerp to itself", "addcdiv", "cat", "stack", "flip", "float32", "bfloat16", "mm", "index"),
}


def even(g: Tensor) -> Tensor:
    return torch.arange(g.numel()).view(g.shape) % 2 == 0


def found_linear(form: Callable[[Tensor], Tensor]) -> bool:
    """Whether all that a form makes of a gradient is known to be linear in it."""
    recorder = Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        g = torch.empty(3, 4, dtype=torch.float64)
        start = recorder.placeholder("g", g)
        with recorder:
            made = form(g)
        end = recorder.node_of(made)
    assert mode
    reached = {start}
    for node in recorder.graph.nodes:
        above = reached.intersection(node.all_input_nodes)
        if above and not lends_shape(node):
            reached.add(node)
            groups = [group for group in linear_in(node) if group >= above]
            if not any(all(n in above or is_zero(n) for n in group) for group in groups):
                return False
    return end in reached or is_zero(end)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_linear(form: str) -> None:
    g = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    known = found_linear(FORMS[form])
    if known:
        torch.testing.assert_close(FORMS[form](4 * g), 4 * FORMS[form](g))
    assert known or form not in KNOWN


def on_gradients(hook: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def setup(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_hook(hook)

    return setup


def on_a_value(hook: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    return lambda model: model.a.register_forward_hook(lambda m, i, out: out.register_hook(hook) and None)


def of_a_module(hook: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    return lambda model: model.b.register_full_backward_hook(lambda m, given, _: (hook(given[0]),))


def in_a_function(hook: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            return hook(g)

    return lambda model: model.a.register_forward_hook(lambda m, i, out: Own.apply(out))


HOOKS = [on_gradients, on_a_value, of_a_module, in_a_function]


@pytest.mark.thin(8)
@pytest.mark.parametrize("form", ["g + 0.01", "0.01 - g", "int", "clamp", "where 0.5", "g * 2"])
@pytest.mark.parametrize("where", HOOKS, ids=lambda f: f.__name__)
def test_hooks(where: Callable[..., Any], form: str) -> None:
    (alone, _) = checked(case(setup=where(FORMS[form])), PRUNE, ALL)
    assert alone["folded"] == (0.5 if form == "g * 2" else 1.0)


def reduced(g: Tensor) -> Tensor:
    g = g.clone()
    all_reduce(g)
    return g / N


@pytest.mark.parametrize("when", ["hook", "accumulated"])
def test_sums_in_hooks(when: str) -> None:
    def setup(model: nn.Module) -> None:
        for p in model.parameters():
            if when == "hook":
                p.register_hook(reduced)
            else:
                p.register_post_accumulate_grad_hook(lambda p: mean([p]))

    for steps in (once, micro_steps):
        (made,) = checked(case(steps, lambda ps: None, setup=setup), ALL)
        assert made["folded"] == (0.5 if steps is once or when == "hook" else (0.125, 0.25, 0.5))


# -- groups, dtypes --------------------------------------------------------------------------------------


def levels(ps: Grads) -> None:
    """Sums within, then between; an expert's within only."""
    for p in ps[:2]:
        all_reduce(p.grad, (0,))
        p.grad /= 2
    for p in ps[2:]:
        all_reduce(p.grad, (0,))
        all_reduce(p.grad, (1,))
        p.grad /= 4


def level_by_level(ps: Grads) -> None:
    """A mean of means; of two parameters in another order."""
    for i, p in enumerate(ps):
        for axes, n in ((0,), 2), ((1,), 3), ((0,), 2):
            all_reduce(p.grad, axes if i > 1 else (1 - axes[0],))
            p.grad /= n


@pytest.mark.parametrize("steps", [once, on_constant, local_after], ids=lambda f: f.__name__)
def test_sums_of_sums(steps: Steps) -> None:
    given = Case(case(steps, level_by_level).step, Net, {"dp": 2, "ep": 3})
    want, captured = as_written(given), Captured(given)
    for one in ([], [PRUNE], [FUSE], [SMALL], [ALL]):
        assert apart(captured.run(one)[0], want) < 1e-10, one


@pytest.mark.parametrize("steps", [once, micro_steps], ids=lambda f: f.__name__)
def test_groups(steps: Steps) -> None:
    given = Case(case(steps, levels).step, Net, {"dp": 2, "ep": 2})
    want, captured = as_written(given), Captured(given)
    for one in (PRUNE, FUSE, ALL):
        made, (program, *_), (record,) = captured.run([one])
        assert apart(made, want) < 1e-10
        scaled = [n for n in program.graph.nodes if n.target is torch.ops.aten._foreach_mul_.Scalar]
        if one is not FUSE and steps is once:
            assert record.details["rescaled"] == {0.5: 2, 0.25: 4}
            assert len(scaled) == 2, "one op for each factor"
    if steps is once:
        assert program.kinds == {"all_reduce": 2}


def test_halves_are_divided_where_the_step_says() -> None:
    """Who divides in front of a sum of halves does so that it does not overflow; small ones would vanish."""
    for dtype, pruned in ((torch.float16, 0), (torch.bfloat16, 6)):
        (record,) = Captured(case(sync=divided_first, dtype=dtype)).run([PRUNE])[2]
        assert record.details["pruned"] == pruned
        (record,) = Captured(case(sync=averaged, dtype=dtype)).run([PRUNE])[2]
        assert record.details["pruned"] == pruned


# -- reasons ---------------------------------------------------------------------------------------------


def test_records_say_why() -> None:
    (record,) = Captured(case(edit=EDITS["decay"])).run([ALL])[2]
    why = [line for line in record.lines if "the backward cannot start from that" in line]
    assert why
    assert "test_passes_by_hand.py" in why[0]
    (record,) = Captured(case(sync=lambda ps: None)).run([ALL])[2]
    assert "no gradient is summed over ranks: nothing to do" in record.summary


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (case(edit=EDITS["clamp"]), "is not linear in gradients alone"),
        (case(edit=EDITS["decay"]), "adds what does not follow on the backward"),
        (case(micro_mean_after, edit=EDITS["third"]), ""),
        (case(dtype=torch.float16), "is torch.float16, of which small numbers vanish"),
    ],
    ids=["clamp", "decay", "third", "halves"],
)
def test_why_factors_stay_behind_the_sums(given: Case, why: str) -> None:
    (record,) = Captured(given).run([PRUNE])[2]
    assert (f" {why}" in " ".join(record.lines)) if why else record.details["folded"] != 1.0
    assert bool(record.details["rescaled"]) == bool(why)


@pytest.mark.parametrize("factor", [1 / N, 1 / 3])
@pytest.mark.parametrize("left_out", ["the sum", "the factor", "neither"])
def test_what_is_divided_by_ranks_is_summed_over_them(left_out: str, factor: float) -> None:
    """A gradient that has the others' factor and not their sum is a mistake; any other factor is the step's own."""

    def sync(ps: Grads) -> None:
        for i, p in enumerate(ps):
            if i != 2 or left_out != "the sum":
                all_reduce(p.grad)
            if i != 2 or left_out != "the factor":
                p.grad.mul_(factor * 5)
                p.grad.mul_(1 / 5)

    given = case(sync=sync)
    if left_out == "the sum" and factor == 1 / N:
        with pytest.raises(PassError, match=r"the gradient of b.weight is scaled by 1/2 at .* but never summed"):
            Captured(given).run([PRUNE])
    else:
        checked(given, PRUNE, ALL)


def test_sparse_gradients_are_refused_by_name() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 4, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.table((x.abs() * 2).long().clamp(max=5))  # type: ignore[no-any-return]

    given = Case(case().step, Table, {"dp": N})
    with pytest.raises(CaptureError, match=r"a sparse tensor of shape \(6, 4\).*sparse=False"):
        Captured(given)
