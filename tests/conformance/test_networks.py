"""Random networks with random layouts: value and every gradient equal those of one device."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, note, reject, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.errors import DispatchError
from tests.support.networks import Leaf, Network, draw_network, interpret, losses
from tests.support.strategies import mesh_of

MESHES = [mesh_of(s) for s in ((4,), (2, 2), (3,), (2, 3))]
EXAMPLES = int(os.environ.get("NETWORKS", "30"))  # how many per test; a long search sets more
SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


def leaves(net: Network, values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [v for c, v in zip(net.calls, values, strict=True) if isinstance(c, Leaf)]


def whole(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else mw.unshard(t).detach()


def run_grad(net: Network, mesh: mw.Mesh | None) -> list[torch.Tensor | None]:
    """All losses added up, torch.autograd.grad."""
    values = interpret(net, mesh)
    total = sum(losses(net, values)[1:], losses(net, values)[0])
    grads = torch.autograd.grad(total, leaves(net, values), allow_unused=True)
    return [whole(t) for t in (*values, total, *grads)]


def run_backward(net: Network, mesh: mw.Mesh | None) -> list[torch.Tensor | None]:
    """One backward per loss; gradients accumulate in the leaves."""
    values = interpret(net, mesh)
    for loss in losses(net, values):
        loss.backward(retain_graph=True)
    return [whole(t) for t in (*values, *[leaf.grad for leaf in leaves(net, values)])]


def run_twice(net: Network, mesh: mw.Mesh | None) -> list[torch.Tensor | None]:
    """The gradient of a gradient penalty."""
    values = interpret(net, mesh)
    total = sum(losses(net, values)[1:], losses(net, values)[0])
    at = leaves(net, values)
    grads = torch.autograd.grad(total, at, allow_unused=True, create_graph=True)
    penalty = sum((g * g).sum() for g in grads if g is not None) + total
    second = torch.autograd.grad(penalty, at, allow_unused=True)
    return [whole(t) for t in (*values, *grads, penalty, *second)]


def run_steps(net: Network, mesh: mw.Mesh | None) -> list[torch.Tensor | None]:
    """Some steps of gradient descent in place, with an evaluation before each."""
    at: list[torch.Tensor] | None = None
    seen: list[torch.Tensor] = []
    for _ in range(3):
        with torch.no_grad():
            seen += losses(net, interpret(net, mesh, at)) if at else []
        values = interpret(net, mesh, at)
        at = at or leaves(net, values)
        for loss in losses(net, values):
            loss.backward(retain_graph=True)
        with torch.no_grad():
            for leaf in at:
                if leaf.grad is not None:
                    leaf.sub_(leaf.grad / (1.0 + leaf.grad.abs().amax()) * 0.125)
                    leaf.grad = None
    return [whole(t) for t in (*seen, *(at or []))]


def compare(run, net: Network) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = run(net, None)
        try:
            got = mw.simulate(lambda: run(net, net.mesh), net.mesh)
        except DispatchError as error:
            # Writing to a view that had to be a copy, or non-linearly to a Partial, is refused on every rank.
            if "in place" not in str(error):
                raise
            reject()
    for rank, mine in enumerate(got):
        for i, (a, b) in enumerate(zip(mine, want, strict=True)):
            assert (a is None) == (b is None), (rank, i, a, b)
            if a is not None and b is not None:
                assert a.shape == b.shape, (rank, i, a.shape, b.shape)
                assert torch.allclose(a, b, rtol=1e-8, atol=1e-9), f"rank {rank}, value {i}:\n{a}\nwanted\n{b}"


@pytest.mark.parametrize("run", [run_grad, run_backward, run_twice, run_steps])
@given(data=st.data())
@settings(SETTINGS, max_examples=EXAMPLES)
def test_equal_to_one_device(run, data):
    net = draw_network(data, data.draw(st.sampled_from(MESHES)))
    note(repr(net))
    compare(run, net)
