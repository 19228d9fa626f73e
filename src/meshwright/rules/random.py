"""Random ops: replicas agree, shards differ, and a seed gives the same values whatever the layout and the mesh.

Two mechanisms.  *Fills* (``uniform_``, ``randn_like``, ``bernoulli``...) give exactly what one device draws from the
same generator (:mod:`meshwright.generator.stream`).  *Dropout* does not draw a stream: it takes one seed from the
generator and hashes global indices (:mod:`meshwright.generator.counter`), which is work for own elements only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..generator.dropout import KERNELS, Kernel
from ..generator.stream import Draw, Generator, draw_own, drawing, fill, one_holder
from .dims import nothing
from .factor_notation import Arg, Local, LocalFn, Rule, args_in, notation, rule

Tensor = torch.Tensor
LINEAR = {"dropout", "feature_dropout"}  # given the mask: Partial passes, as all ranks have the same mask


def _dropout(kernel: Kernel, inplace: bool, outputs: int, linear: bool) -> Callable[..., Rule]:
    def local(ctx: Local) -> LocalFn:
        at = ctx.place()
        if inplace:
            return lambda x, *args, **named: x.copy_(kernel(at, x, *args, **named))
        return lambda x, *args, **named: kernel(at, x, *args, **named)

    return lambda x, *args, **named: notation(
        {x: x.letters}, *[x.letters] * outputs, linear=[x] if linear else [], local=local
    )


for _name, _kernel in KERNELS.items():
    _outputs = 2 if _name == "native_dropout" else 1
    rule(_name)(_dropout(_kernel, False, _outputs, _name in LINEAR))
    if _outputs == 1:
        rule(f"{_name}_")(_dropout(_kernel, True, 1, _name in LINEAR))


# ------------------------------------------------------------------------------------------------ fills


def _elementwise(x: Arg, local: Callable[[Local], LocalFn | None]) -> Rule:
    """Every dim free; what was in ``x`` does not matter, so a Partial may stay one."""
    return notation({x: x.letters}, x.letters, linear=[x], moves=True, local=local)


def _inplace_fill(kind: str) -> None:
    def local(ctx: Local) -> LocalFn:
        def run(x: Tensor, *args: Any, generator: Generator | None = None, **named: Any) -> Tensor:
            if kind == "normal_" and x.is_complex():
                draw = drawing(kind, (*args, *named.values()), True)
            else:
                method = getattr(Tensor, kind)

                def draw(scratch: Tensor, g: Generator | None) -> Any:
                    return method(scratch, *args, **named, generator=g)

            return fill(x, ctx.outputs[0], ctx.here, draw, kind, generator)

        return run

    rule(kind)(lambda x, *args, **named: _elementwise(x, local))


for _kind in ("uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"):
    _inplace_fill(_kind)


def _like(kind: str) -> Callable[..., Rule]:
    """Rule of ``rand_like`` and its kin: ``kind`` with the op's own numbers, on a new tensor."""

    def local(ctx: Local) -> LocalFn:
        def run(x: Tensor, *given: int, generator: Generator | None = None, **named: Any) -> Tensor:
            numbers = (*given, *[named[k] for k in ("low", "high") if k in named])
            if kind == "random_" and len(numbers) < 2:
                numbers = (0, *numbers)
            dtype, device = named.get("dtype") or x.dtype, named.get("device") or x.device
            kept = named.get("memory_format") or torch.preserve_format
            made = torch.empty_like(x, dtype=dtype, device=device, requires_grad=False, memory_format=kept)
            draw: Draw = drawing(kind, numbers, made.is_complex())
            fill(made, ctx.outputs[0], ctx.here, draw, kind, generator)
            return made.requires_grad_(bool(named.get("requires_grad")))

        return run

    return lambda x, *given, **named: _elementwise(x, local)


for _name, _kind in {"rand_like": "uniform_", "randn_like": "normal_", "randint_like": "random_"}.items():
    rule(_name)(_like(_kind))


@rule("normal")
def normal(mean: Arg | float, std: Arg | float = 1.0, *, generator: Generator | None = None) -> Rule:
    """``torch.normal`` with means, deviations or both from tensors."""

    def local(ctx: Local) -> LocalFn:
        def run(mean: Any, std: Any = 1.0, *, generator: Generator | None = None) -> Tensor:
            given = [t for t in (mean, std) if isinstance(t, Tensor)]
            made = torch.empty(ctx.out_shape(), dtype=torch.result_type(given[0], given[-1]), device=given[0].device)
            scale = 1.0 if isinstance(std, Tensor) else std
            fill(made, ctx.outputs[0], ctx.here, drawing("normal_", (0.0, scale)), "normal_", generator)
            with torch.no_grad():
                if isinstance(std, Tensor):
                    made.mul_(std)
                made.add_(mean)
            return _tracked(made, given)

        return run

    return notation(dict.fromkeys(args_in((mean, std)), "..."), "...", local=local)


def _tracked(made: Tensor, given: Sequence[Tensor]) -> Tensor:
    """With the gradient that PyTorch gives: of zeros, as a drawn number depends on nothing smoothly."""
    tracked = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    return made + nothing((), *given) if tracked else made


def _bernoulli(ctx: Local, out: Tensor, p: Any, generator: Generator | None) -> Tensor:
    if not isinstance(p, Tensor):
        return fill(out, ctx.outputs[0], ctx.here, drawing("bernoulli_", (p,)), "bernoulli_", generator)
    # With probabilities from a tensor, PyTorch compares one uniform number each, of this dtype.
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    drawn = torch.empty(out.shape, dtype=dtype, device=out.device)
    draw_own(drawn, ctx.outputs[0], ctx.here, drawing("uniform_", ()), "uniform_", generator)
    return one_holder(out.copy_(drawn < p), ctx.outputs[0], ctx.here)


@rule("bernoulli")
def bernoulli(x: Arg, p: Arg | float | None = None, *, generator: Generator | None = None) -> Rule:
    """``torch.bernoulli(probabilities)`` and ``x.bernoulli(p)``."""

    def local(ctx: Local) -> LocalFn:
        def run(x: Tensor, p: Any = None, *, generator: Generator | None = None) -> Tensor:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            with torch.no_grad():
                _bernoulli(ctx, out, x if p is None else p, generator)
            return _tracked(out, [t for t in (x, p) if isinstance(t, Tensor)])

        return run

    return notation("... -> ...", x, local=local) if p is None else _with_probability(x, p, local)


@rule("bernoulli_")
def bernoulli_(x: Arg, p: Arg | float = 0.5, *, generator: Generator | None = None) -> Rule:
    """``x.bernoulli_(p)``: nothing of ``x`` is read."""

    def local(ctx: Local) -> LocalFn:
        def run(x: Tensor, p: Any = 0.5, *, generator: Generator | None = None) -> Tensor:
            with torch.no_grad():
                return _bernoulli(ctx, x, p, generator)

        return run

    return _with_probability(x, p, local)


def _with_probability(x: Arg, p: Arg | float, local: Callable[[Local], LocalFn]) -> Rule:
    if not isinstance(p, Arg):
        return _elementwise(x, local)
    return notation("..., ... -> ...", x, p, linear=[x], moves=True, local=local)
