"""Drawing random programs: each line is tried on one device at once, so that every program is a valid one there."""

from __future__ import annotations

import random
import re
import warnings
from dataclasses import replace
from typing import Any

import torch

from meshwright.layout import Layout, Partial
from meshwright.mesh import Mesh

from .grammar import FAMILIES, WEIGHTS, Filler, Unfit, random_layout
from .judge import differentiate
from .program import Leaf, Program, namespace, run_line, tensors

MESHES: tuple[tuple[dict[str, int], int], ...] = (
    ({"a": 2}, 6), ({"a": 3}, 4), ({"a": 2, "b": 2}, 4), ({"a": 4}, 1), ({"a": 2, "b": 3}, 1),
    ({"a": 2, "b": 2, "c": 2}, 1),
)  # fmt: skip
# Axes of three and four, and dims as long as the mesh, of which conversions may split one that nobody else splits.
WIDE_MESHES: tuple[tuple[dict[str, int], int], ...] = (
    ({"a": 2, "b": 3}, 4), ({"a": 3, "b": 2}, 3), ({"a": 2, "b": 4}, 3), ({"a": 3, "b": 3}, 3), ({"a": 3, "b": 4}, 1),
    ({"a": 2, "b": 3, "c": 2}, 1),
)  # fmt: skip
_LONG = (16, 17, 18, 24, 31, 32, 48, 64)
_SIZES = (0, *[1] * 3, *[2] * 5, *[3] * 6, *[4] * 5, *[5] * 4, 6, 7)
# Whether these give a view or a copy is nobody's promise: what they touch is not written to afterwards.
_EITHER = re.compile(r"reshape|reshard|unshard|contiguous|flatten|type_as|\.to\(|checkpoint|squeeze|expand|\.data")
_NO_CAPTURE = re.compile(
    r"\.item\(\)|masked_select|unshard|float\(|\.detach\(\)\.requires_grad_|\.data"
    r"|^(?!v\d+\[[^=]*\] = ).*\[(mask|[^\]]*mask\(|\(v\d+ > )|\] = .*\[(mask|[^\]]*mask\(|\(v\d+ > )"  # reads of a mask
)
LARGEST = 8192  # elements of a tensor
_ERRORS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)


def draw_program(seed: int, *, static: bool = False, lines: tuple[int, int] = (3, 12)) -> Program:
    """The program of a seed: the same everywhere.

    Args:
        static: only what a captured step may hold.
        lines: fewest and most lines.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _draw(random.Random(seed), static, lines)


def _draw(rng: random.Random, static: bool, lines: tuple[int, int]) -> Program:
    wide = rng.random() < 0.4
    meshes = WIDE_MESHES if wide else MESHES
    axes = rng.choices([m for m, _ in meshes], [w for _, w in meshes])[0]
    sizes = (*rng.sample(_LONG, 2), rng.choice(_SIZES)) if wide else _SIZES  # few lengths, so that operands fit
    program = Program(Mesh(axes), (), ())
    leaves = tuple(_leaf(rng, program.mesh, f"v{i}", static, sizes) for i in range(rng.randint(2 if wide else 1, 3)))
    if not any(leaf.grad for leaf in leaves):
        leaves = (replace(leaves[0], grad=True, layout=_no_selection(leaves[0].layout)), *leaves[1:])
    program = replace(program, leaves=leaves, watch=not static and rng.random() < 0.3)
    program = _with_lines(rng, program, rng.randint(*lines), static)
    return _with_outputs(rng, program, static)


def _leaf(rng: random.Random, mesh: Mesh, name: str, static: bool, sizes: tuple[int, ...]) -> Leaf:
    shape = tuple(
        rng.choice(sizes)
        for _ in range(rng.choices((0, 1, 2, 3, 4), (1, 3, 8, 5, 1) if sizes is _SIZES else (0, 2, 9, 0, 0))[0])
    )
    grad = rng.random() < 0.75
    if not static and rng.random() < 0.15:
        return Leaf(name, shape, torch.float64, rng.randrange(100), None, False)
    partial: tuple[str, ...] = ()
    if not static and rng.random() < 0.3:
        partial = ("sum", "avg") if rng.random() < 0.7 else ("max", "min", "product")
    layout = random_layout(rng, mesh, shape, partial)
    if set(layout.partial.values()) & {"max", "min", "product"}:
        grad = False
    return Leaf(name, shape, torch.float64, rng.randrange(100), layout, grad)


def _no_selection(layout: Layout | None) -> Layout | None:
    if layout is None:
        return None
    return Layout(layout.mesh, [p if not isinstance(p, Partial) else Partial() for p in layout.placements],
                  order=dict(layout.order), ndim=layout.ndim)  # fmt: skip


def _with_lines(rng: random.Random, program: Program, count: int, static: bool) -> Program:
    env = namespace(None)
    env |= {leaf.name: leaf.make(None) for leaf in program.leaves}
    frozen: set[int] = {t.untyped_storage()._cdata for t in tensors(env).values()}  # leaves are not written to
    kept: list[Any] = [t.untyped_storage() for t in tensors(env).values()]  # alive, so that no address comes twice
    lines: list[str] = []
    families, weights = list(WEIGHTS), list(WEIGHTS.values())
    for _ in range(count * 8):
        if len(lines) == count:
            break
        here = tensors(env)
        writable = {n for n, t in here.items() if t.untyped_storage()._cdata not in frozen}
        filler = Filler(rng, program.mesh, env, here, writable, len(here), static)
        try:
            line = filler.fill(rng.choice(FAMILIES[rng.choices(families, weights)[0]]))
        except Unfit:
            continue
        if static and _NO_CAPTURE.search(line):
            continue
        trial = namespace(None) | {leaf.name: leaf.make(None) for leaf in program.leaves}
        try:
            for done in (*lines, line):
                run_line(done, trial)
            for t in tensors(trial).values():
                t.view_as(t)  # one of several views whose base was written to: PyTorch refuses all that is done with it
        except _ERRORS:
            continue
        fresh = [trial[n] for n in filler.made]
        if any(not isinstance(t, torch.Tensor) or t.numel() > LARGEST or t.dim() > 5 for t in fresh):
            continue
        if any(t.is_floating_point() and not (t.detach().abs() < 1e4).all() for t in tensors(trial).values()):
            continue
        lines.append(line)
        run_line(line, env)
        kept += [t.untyped_storage() for t in tensors(env).values()]
        if _EITHER.search(line):
            used = set(re.findall(r"v\d+", line))
            frozen |= {t.untyped_storage()._cdata for n, t in tensors(env).items() if n in used}
    return replace(program, lines=tuple(lines))


def _with_outputs(rng: random.Random, program: Program, static: bool) -> Program:
    """Outputs whose gradient one device can compute."""
    env = namespace(None) | {leaf.name: leaf.make(None) for leaf in program.leaves}
    for line in program.lines:
        run_line(line, env)
    names = [n for n, t in tensors(env).items() if t.requires_grad and t.is_floating_point()]
    for attempt in range(4):
        if not names:
            break
        chosen = rng.sample(names, min(len(names), rng.randint(1, 3)))
        if attempt == 0 and names[-1] not in chosen:
            chosen.append(names[-1])
        made = replace(program, outputs=tuple(sorted(chosen)), second=not static and rng.random() < 0.25)
        env = namespace(None) | {leaf.name: leaf.make(None) for leaf in made.leaves}
        try:
            for line in made.lines:
                run_line(line, env)
            differentiate(made, env, {})
        except _ERRORS:
            continue
        return made
    return replace(program, outputs=())
