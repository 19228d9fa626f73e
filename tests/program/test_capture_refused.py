"""What acts on autograd or on random generators outside of ops: a captured step follows it, or refuses it by line."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch import Tensor

import meshwright as mw
from meshwright.errors import CaptureError, MeshwrightError
from meshwright.program.capture.build import build
from meshwright.program.capture.refusals import Refused, derived, generators
from meshwright.program.compile import capture_local

MESH = mw.Mesh({"dp": 2})
X = torch.arange(12.0).view(4, 3) / 6
LossFn = Callable[[Any, Any], Any]


def start() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def eager(loss_fn: LossFn, batches: int = 3) -> list[Tensor]:
    model, optimizer = start()
    for _ in range(batches):
        optimizer.zero_grad()
        loss_fn(model, X).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def captured(loss_fn: LossFn, batches: int = 3, batch: Any = None) -> list[Tensor]:
    def rank() -> list[Tensor]:
        model, optimizer = start()
        step = mw.compile_step(model, loss_fn, optimizer, X, mesh=MESH, batch=batch or {"dp": mw.Shard(0)})
        for _ in range(batches):
            step(X)
        return [mw.unshard(p.detach()) if isinstance(p, mw.DistTensor) else p.detach() for p in model.parameters()]

    found: list[list[Tensor]] = mw.simulate(rank, MESH)
    for one in found:
        torch.testing.assert_close(one, found[0])
    return found[0]


def refusal(loss_fn: LossFn) -> str:
    model, optimizer = start()
    with pytest.raises(CaptureError) as error:
        build(model, loss_fn, optimizer, X, MESH)
    assert "test_capture_refused.py:" in str(error.value)
    return str(error.value)


# ---------------------------------------------------------------------------------------------- the table


def provoke(entry: Refused) -> None:
    """What a user would write, with arguments that do not matter: it is refused before it is called."""
    if entry.owner is not Tensor:
        getattr(entry.owner, entry.name)()
    elif entry.name == "requires_grad":
        PARAMETER.requires_grad = False
    else:
        found = getattr(PARAMETER, entry.name)
        found(False) if entry.name == "requires_grad_" else found()


PARAMETER = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("table", [derived, generators])
def test_every_entry_is_refused(table: Callable[[], tuple[Refused, ...]]) -> None:
    entries = [e for e in table() if hasattr(e.owner, e.name)]  # not those of devices that this torch has not
    assert len(entries) > 20
    before = [getattr(e.owner, e.name) for e in entries]
    texts = []

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        for entry in entries:
            with pytest.raises(CaptureError) as error:
                provoke(entry)
            texts.append(str(error.value))
        loss: Tensor = model(x).mean()
        return loss

    model, optimizer = start()
    build(model, lambda m, x: loss_fn(m[0], x), optimizer, X, MESH)
    for entry, text in zip(entries, texts, strict=True):
        assert text.startswith("test_capture_refused.py:")
        assert f"the step calls {entry.what}, {entry.why}" in text
    assert [getattr(e.owner, e.name) for e in entries] == before


def test_torch_itself_goes_on() -> None:
    """A layer of torch that reads, seeds or toggles for itself is not the user's."""

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        model.zero_grad()
        for p in model.parameters():
            p.requires_grad_(True)  # as it is
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model[0](x).square().sum(), x, create_graph=True)
        return model[1](x).square().mean() + slope.square().mean()  # type: ignore[no-any-return]

    torch.testing.assert_close(captured(loss_fn), eager(loss_fn))


# ---------------------------------------------------------------------------------------------- idioms


def hooked(model: Any, x: Tensor) -> Any:
    h = model[0](x)
    h.register_hook(lambda g: -g)
    return h.square().mean()


def hooked_node(model: Any, x: Tensor) -> Any:
    h = model[0](x)
    h.grad_fn.register_prehook(lambda g: (-g[0],))
    return h.square().mean()


def hooked_many(model: Any, x: Tensor) -> Any:
    h = model[0](x)
    torch.autograd.graph.register_multi_grad_hook([h], lambda g: None)
    return h.square().mean()


def retained(model: Any, x: Tensor) -> Any:
    h = model[0](x)
    h.retain_grad()
    return h.square().mean()


def frozen(model: Any, x: Tensor) -> Any:
    model[0].requires_grad_(False)
    loss = (model[0](x) + model[1](x)).square().mean()
    model[0].requires_grad_(True)
    return loss


def saved(model: Any, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return model[0](x).tanh().mean()


def offloaded(model: Any, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return model[0](x).tanh().mean()


def seeded(model: Any, x: Tensor) -> Any:
    torch.manual_seed(5)
    return (model[0](x) * torch.rand(4, 2)).mean()


def forked(model: Any, x: Tensor) -> Any:
    with torch.random.fork_rng():
        return (model[0](x) * torch.rand(4, 2)).mean()


def generated(model: Any, x: Tensor) -> Any:
    return (model[0](x) * torch.rand(4, 2, generator=torch.Generator().manual_seed(3))).mean()


def drawn(model: Any, x: Tensor) -> Any:
    return model[0](x).mean() * random.random()


def drawn_by_numpy(model: Any, x: Tensor) -> Any:
    return model[0](x).mean() * float(np.random.rand())


def read_gradient(model: Any, x: Tensor) -> Any:
    return model[0](x).mean() * (2 if model[0].weight.grad is None else 1)


def inner_backward(model: Any, x: Tensor) -> Any:
    model[0](x).mean().backward()
    return model[1](x).mean()


def module_hook(model: Any, x: Tensor) -> Any:
    model[0].register_full_backward_hook(lambda m, i, o: None)
    return model[0](x).mean()


def slope(model: Any, x: Tensor) -> Any:
    return torch.func.grad(lambda x: model[0](x).square().sum())(x).square().mean()


def mapped(model: Any, x: Tensor) -> Any:
    return torch.func.vmap(lambda row: model[0](row).square().sum())(x).mean() + model[1](x).mean()


def closed_over(model: Any, x: Tensor) -> Any:
    return torch.func.vmap(lambda n: (n * model[0].weight).sum())(torch.arange(4.0)).mean()


def forward_mode(model: Any, x: Tensor) -> Any:
    y, tangent = torch.func.jvp(lambda x: model[0](x).square(), (x,), (torch.ones_like(x),))
    return y.mean() + tangent.square().mean()


def slopes(model: Any, x: Tensor) -> Any:
    return torch.func.vmap(torch.func.grad(lambda row: model[0](row).square().sum()))(x).square().mean()


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (slope, "torch.func"),
        (slopes, "torch.func"),
        (mapped, "torch.func.vmap"),
        (closed_over, "torch.func.vmap"),
        (forward_mode, "forward_ad.make_dual"),
        (hooked, "Tensor.register_hook, which a captured step does not run"),
        (hooked_node, "Tensor.grad_fn"),
        (hooked_many, "register_multi_grad_hook"),
        (retained, "Tensor.retain_grad"),
        (frozen, "Tensor.requires_grad_"),
        (saved, "saved_tensors_hooks"),
        (offloaded, "saved_tensors_hooks"),
        (seeded, "torch.manual_seed"),
        (forked, "fork_rng"),
        (generated, "torch.Generator"),
        (drawn, "random.random"),
        (drawn_by_numpy, "numpy.random.rand"),
        (read_gradient, "Tensor.grad"),
        (inner_backward, "Tensor.backward"),
        (module_hook, "register_full_backward_hook"),
    ],
)
def test_idioms_that_are_refused(loss_fn: LossFn, text: str) -> None:
    message = refusal(loss_fn)
    assert text in message
    assert int(message.split(":")[1]) in range(loss_fn.__code__.co_firstlineno, loss_fn.__code__.co_firstlineno + 5)


def inference(model: Any, x: Tensor) -> Any:
    with torch.inference_mode():
        t = model[0](x)
        with torch.inference_mode(False):
            u = model[0](x)
    return (model[1](x) * t.clone()).mean() + u.square().mean()


def mask_by_vmap(model: Any, x: Tensor) -> Any:
    mask = torch.func.vmap(lambda i: i >= 1)(torch.arange(4))
    return (model[0](x) * mask[:, None]).square().mean()


def functional(model: Any, x: Tensor) -> Any:
    given = {n: p.detach() for n, p in model[0].named_parameters()}
    return (torch.func.functional_call(model[0], given, (x,)) * model[1](x)).mean()


@pytest.mark.parametrize("loss_fn", [inference, mask_by_vmap, functional])
def test_idioms_that_are_right(loss_fn: LossFn) -> None:
    torch.testing.assert_close(captured(loss_fn), eager(loss_fn))


# ---------------------------------------------------------------------------------------------- steps by hand


@pytest.mark.parametrize(
    ("loss_fn", "text"), [(seeded, "manual_seed"), (generated, "torch.Generator"), (drawn, "random")]
)
def test_generators_in_steps_by_hand(loss_fn: LossFn, text: str) -> None:
    def rank() -> None:
        model, optimizer = start()

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = loss_fn(model, x)
            loss.backward()
            optimizer.step()
            return loss

        capture_local(step, MESH, model=model, optimizer=optimizer, batch=X)

    with pytest.raises(CaptureError, match=text):
        mw.simulate(rank, MESH)


@pytest.mark.parametrize(
    "change", [lambda x: x.unsqueeze_(0), lambda x: x.t_(), lambda x: x.transpose_(0, 1), lambda x: x.resize_(2, 3)]
)
def test_another_shape_of_the_batch_in_place_is_named(change: Callable[[Tensor], Tensor]) -> None:
    assert "gives a tensor of the batch another shape in place" in refusal(lambda model, x: change(x).sum() * 1)


def test_shapes_of_other_values_change_in_place() -> None:
    def loss_fn(model: Any, x: Any) -> Any:
        return model[0]((x * 1).unsqueeze_(1).squeeze_(1).t_().t_()).square().mean()

    torch.testing.assert_close(captured(loss_fn), eager(loss_fn))


def test_a_defect_of_capture_is_none_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, with where it is; what the model refuses of its arguments is still the model's."""

    model, optimizer = start()
    with pytest.raises(CaptureError, match="missing 1 required positional argument"):
        build(model, lambda model, x: torch.nn.Module.__call__(model), optimizer, X, MESH)
    with pytest.raises(CaptureError, match=r"test_capture_refused.py:\d"):
        build(model, lambda model, x: [][0], optimizer, X, MESH)
    monkeypatch.setattr(torch.export, "export", iter)  # which takes no such arguments
    with pytest.raises(
        MeshwrightError, match=r"export.py:.*a defect of Meshwright or of torch.export.*report"
    ) as found:
        build(model, lambda model, x: model[0](x).sum(), optimizer, X, MESH)
    assert not isinstance(found.value, CaptureError)
