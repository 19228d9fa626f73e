"""Whether a claim about layouts is true: the op run on the shards that it names, against the op run on the whole.

Paddle's rules sometimes name outputs that their inputs do not give (a pending sum of logarithms, convolutions of
shards without their neighbours), or count on a kernel that communicates inside.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from meshwright.layout import Partial, Spec

from .question import Call, Fresh, Made, Result, Steps, fill, slots_in, slots_of

Tensor = torch.Tensor
Coordinate = tuple[int, ...]

# Ops whose arguments state global sizes and places: on a shard they are another call.
_SIZED = frozenset({"reshape", "expand", "split", "chunk", "narrow", "full_like", "unflatten"})
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda t: t.sum(0),
    "avg": lambda t: t.mean(0),
    "max": lambda t: t.amax(0),
    "min": lambda t: t.amin(0),
    "product": lambda t: t.prod(0),
    "any": lambda t: t.any(0),
    "all": lambda t: t.all(0),
}


def tried(call: Call | Steps, inputs: Sequence[Spec], outputs: Sequence[Spec], results: Sequence[Result]) -> str:
    """What comes of the op, run on locals of ``inputs`` (in our dims), if it is to give ``outputs`` (in Paddle's).

    ``"true"``, ``"false"``, ``"refused"``: it runs on the whole and raises on the shards; ``"untried"``: the op is not
    made of functions of PyTorch's, is random, or has arguments that state global sizes.
    """
    ops = [c.op for c in (call.calls if isinstance(call, Steps) else [call])]
    if not all(op and op not in _SIZED and hasattr(torch.ops.aten, op) for op in ops):
        return "untried"
    generator = torch.Generator().manual_seed(0)
    smallest = min((n for s in inputs for n in _local_sizes(s) if n > 1), default=1)
    whole = [_values(s, smallest, generator) for s in inputs]
    if "log" in ops:
        whole = [t.abs() if t.is_floating_point() else t for t in whole]

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [_shown(t, r) for t, r in zip(_made(call, tensors, results), results, strict=True)]

    try:
        expected = run(whole)
        parts = [_parts(t, s, generator) for t, s in zip(whole, inputs, strict=True)]
    except (RuntimeError, IndexError, ValueError):
        return "untried"
    try:
        made = {at: run([p(at) for p in parts]) for at in inputs[0].mesh.coordinates()}
    except (RuntimeError, IndexError, ValueError):
        return "refused"
    if any(map(_is_random, ops)):
        return "untried"
    claims = enumerate(zip(expected, outputs, strict=True))
    holds = all(_holds({at: m[k] for at, m in made.items()}, e, o) for k, (e, o) in claims)
    return "true" if holds else "false"


def _made(call: Call | Steps, tensors: Sequence[Tensor], results: Sequence[Result]) -> list[Tensor]:
    """Our outputs, from Paddle's tensors in the order of :func:`slots_of`."""
    if isinstance(call, Call):
        listed = _called(call, iter(tensors))
        return [listed[i] for i in range(len(results))]
    values: dict[Any, Tensor] = dict(zip(slots_of(call), tensors, strict=True))
    for number, c in enumerate(call.calls):
        operands = slots_in([c.args, c.kwargs])
        given = iter([torch.ones(t.shape, dtype=t.dtype) if isinstance(t, Fresh) else values[t] for t in operands])
        values |= {Made(number, i): t for i, t in enumerate(_called(c, given))}
    return [values[m] for m, _ in call.results]


def _called(call: Call, given: Iterator[Tensor]) -> list[Tensor]:
    made = getattr(torch.ops.aten, call.op)(*fill(call.args, given), **fill(call.kwargs, given))
    return list(made) if isinstance(made, (tuple, list)) else [made]


def _is_random(op: str) -> bool:
    fn = getattr(torch.ops.aten, op)
    return any(torch.Tag.nondeterministic_seeded in getattr(fn, name).tags for name in fn.overloads())


def _local_sizes(spec: Spec) -> Iterator[int]:
    for at in spec.mesh.coordinates():
        yield from spec.local_shape(at)


def _values(spec: Spec, below: int, generator: torch.Generator) -> Tensor:
    if spec.dtype.is_floating_point:
        return torch.randn(spec.shape, dtype=torch.float64, generator=generator)
    if spec.dtype == torch.bool:
        return torch.rand(spec.shape, generator=generator) < 0.5
    # Different numbers where that is possible, and such that every shard has a row of that number.
    return (torch.arange(spec.shape.numel()) % below).reshape(spec.shape).to(spec.dtype)


def _parts(whole: Tensor, spec: Spec, generator: torch.Generator) -> Callable[[Coordinate], Tensor]:
    """What the rank at a coordinate holds; of a pending sum, one of several random terms."""
    pending = [a for a, p in enumerate(spec.layout.placements) if isinstance(p, Partial)]
    if any(spec.layout.placements[a] not in (Partial("sum"), Partial("avg")) for a in pending):
        raise ValueError("terms of other reductions are not made up")
    averages = math.prod(spec.mesh.sizes[a] for a in pending if spec.layout.placements[a] == Partial("avg"))
    places = list(itertools.product(*(range(spec.mesh.sizes[a]) for a in pending)))
    noise = [torch.randn(whole.shape, dtype=torch.float64, generator=generator) for _ in places[1:]]
    terms = dict(zip(places, [whole * averages - sum(noise), *noise] if noise else [whole], strict=True))

    def part(at: Coordinate) -> Tensor:
        return spec.part(terms[tuple(at[a] for a in pending)], at)

    return part


def _shown(made: Tensor, result: Result) -> Tensor:
    """Our result with Paddle's dims."""
    if result.dims is None:
        return made
    kept = [d for d in result.dims if d >= 0]
    made = made.permute([*kept, *(d for d in range(made.ndim) if d not in kept)])
    made = made.flatten(len(kept)).squeeze(-1) if made.ndim > len(kept) else made
    for i, d in enumerate(result.dims):
        made = made.unsqueeze(i) if d < 0 else made
    return made


def _holds(made: Mapping[Coordinate, Tensor], expected: Tensor, claimed: Spec) -> bool:
    """Whether what the ranks made is the expected value, cut and pending as is claimed."""
    pending = [(a, p.op) for a, p in enumerate(claimed.layout.placements) if isinstance(p, Partial)]
    sizes = claimed.mesh.sizes
    for at in made:
        if any(at[a] for a, _ in pending):
            continue  # one rank of those that share a value
        want = claimed.part(expected.reshape(claimed.shape), at)
        held = _reduced(dict(made), list(at), pending, sizes)
        if held.shape != want.shape or not torch.allclose(held.to(want.dtype), want, equal_nan=True):
            return False
    return True


def _reduced(
    made: Mapping[Coordinate, Tensor], at: list[int], pending: Sequence[tuple[int, str]], sizes: Sequence[int]
) -> Tensor:
    if not pending:
        return made[tuple(at)]
    (axis, op), rest = pending[-1], pending[:-1]
    terms = []
    for i in range(sizes[axis]):
        at[axis] = i
        terms.append(_reduced(made, list(at), rest, sizes))
    return _REDUCTIONS[op](torch.stack(terms))
