"""An op on simulated ranks against the single device, value and gradient, over many layouts of its inputs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

import meshwright as mw

Tensor = torch.Tensor
MESHES = ((4,), (3,), (2, 2))
WHOLE = False  # pytest --whole: all that a test asks for


def steps(most: int) -> int:
    """How many steps are trained: six show what goes wrong in each, more what adds up."""
    return most if WHOLE else min(most, 6)


def mesh_of(sizes: Sequence[int]) -> mw.Mesh:
    return mw.Mesh({f"a{i}": n for i, n in enumerate(sizes)})


def layouts_of(t: Tensor, axes: int) -> list[tuple[Any, ...]]:
    """Everything that each axis can do to a tensor; a Partial only where there are numbers to add."""
    choices: list[Any] = [mw.Replicate(), *[mw.Shard(d) for d in range(t.ndim)]]
    if t.is_floating_point():
        choices.append(mw.Partial())
    return list(itertools.product(choices, repeat=axes))


def place(t: Tensor, mesh: mw.Mesh, layout: Sequence[Any]) -> tuple[Any, Any]:
    """(leaf, tensor of that layout): a Partial is made of shards where it can, so that all ranks hold something."""
    if not any(isinstance(p, mw.Partial) for p in layout):
        x = mw.shard_tensor(t, mesh, list(layout))
        return x, x
    first = mw.Shard(0) if t.ndim else mw.Replicate()
    leaf = mw.shard_tensor(t, mesh, [first if isinstance(p, mw.Partial) else p for p in layout])
    return leaf, mw.reshard(leaf, list(layout))


def fixed(t: Tensor) -> Tensor:
    """An input without a gradient (PyTorch has none for weights of classes)."""
    t.fixed = True  # type: ignore[attr-defined]
    return t


def outputs_of(made: Any) -> list[Tensor]:
    return [t for t in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(t, torch.Tensor)]


def graded(fn: Callable[..., Any], tensors: Sequence[Any], leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Outputs of ``fn``, and gradients of a weighted sum of them."""
    outs = outputs_of(fn(*tensors))
    smooth = [y for y in outs if y.is_floating_point() and y.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    if not smooth or not wanted:
        return outs, []
    total: Any = 0.0
    for i, y in enumerate(smooth):
        w = torch.sin(torch.arange(y.numel(), dtype=y.dtype) + i + 1).view(y.shape)
        total = total + (y * w).sum()
    return outs, list(torch.autograd.grad(total, wanted, allow_unused=True))


def sweep(
    fn: Callable[..., Any],
    *inputs: Tensor,
    meshes: Sequence[Sequence[int]] = MESHES,
    cases: int = 24,
    tolerance: float = 1e-9,
    same_each_time: int | None = None,
) -> None:
    """Check ``fn`` on ``inputs`` over at most ``cases`` combinations of layouts per mesh, a third of them by default.

    ``same_each_time``: a seed set before each call, for functions that draw random numbers.
    """
    grads = [t.is_floating_point() and not hasattr(t, "fixed") for t in inputs]

    def fresh() -> list[Tensor]:
        return [t.detach().clone().requires_grad_(g) for t, g in zip(inputs, grads, strict=True)]

    own = fresh()
    if same_each_time is not None:
        torch.manual_seed(same_each_time)
    want = graded(fn, own, own)
    for sizes in meshes:
        mesh = mesh_of(sizes)
        combos = list(itertools.product(*[layouts_of(t, len(sizes)) for t in inputs]))
        few = cases if WHOLE else max(2, cases // 3)
        if len(combos) > few:
            combos = random.Random(f"{sizes}{len(combos)}").sample(combos, few)

        def run(mesh: mw.Mesh = mesh, combos: list[Any] = combos) -> None:
            for combo in combos:
                pairs = [place(t, mesh, lay) for t, lay in zip(fresh(), combo, strict=True)]
                if same_each_time is not None:
                    torch.manual_seed(same_each_time)
                try:
                    outs, made = graded(fn, [x for _, x in pairs], [leaf for leaf, _ in pairs])
                    compare(outs, want[0], tolerance)
                    compare(made, want[1], tolerance)
                except Exception as error:
                    raise AssertionError(f"{mesh} {combo}: {type(error).__name__}: {error}") from error

        mw.simulate(run, mesh)


def compare(made: Sequence[Any], want: Sequence[Any], tolerance: float) -> None:
    assert len(made) == len(want)
    for a, b in zip(made, want, strict=True):
        if b is None:
            assert a is None or not mw.unshard(a).any()
            continue
        a = mw.unshard(a) if isinstance(a, mw.DistTensor) else a
        torch.testing.assert_close(a.detach(), b.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
