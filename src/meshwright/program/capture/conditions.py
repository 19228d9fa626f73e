"""For which sizes of a batch the user's code does the same: what ``torch.export`` found while sizes were symbols."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.nn as nn
from torch.export import Dim

from ...compat import FakeTensor, FakeTensorMode, pytree
from ..ir.sizes import Unlike
from .export import Dtypes, LossFn, StepModule, export, fake_of, fake_state

Tensor = torch.Tensor
Open = Mapping[int, Sequence[int]]

_PLAIN = (sympy.Add, sympy.Mul, sympy.Symbol, sympy.Integer)
_DIVIDED = {"CleanDiv", "FloorDiv", "Mod", "PythonMod"}  # PyTorch's own functions


@dataclass(frozen=True)
class Conditions:
    """What sizes must fulfil, so that the step does what it did when it was captured.

    Attributes:
        sizes: of each tensor of a batch, its sizes as expressions.
        guards: on what the code branched.
        divisor: by how much the code divides sizes, in all.
    """

    sizes: tuple[tuple[Any, ...], ...]
    guards: tuple[Any, ...]
    divisor: int

    def hold(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether they are fulfilled by the shapes of a batch's tensors."""
        pairs = [(e, n) for es, ns in zip(self.sizes, shapes, strict=True) for e, n in zip(es, ns, strict=True)]
        known: dict[Any, int] = {}
        if any(e.is_Symbol and known.setdefault(e, n) != n for e, n in pairs):
            return False
        return all(e.subs(known) == n for e, n in pairs) and all(g.subs(known) == sympy.true for g in self.guards)


def conditions(
    model: nn.Module, loss_fn: LossFn | None, batch: Any, device: str, dtypes: Dtypes, dims: Open
) -> Conditions:
    """What sizes must fulfil.

    Args:
        dims: of the tensors of a batch, by their number, the dims of which the size is open.

    Raises:
        Unlike: what the step does with sizes is not what a program of many can do.
        CaptureError: as capture does.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    step = StepModule(model, loss_fn, batch)
    fakes, _ = fake_state(step, mode, device, dtypes)
    leaves = pytree.tree_leaves(batch)
    given = [fake_of(leaves[i], mode, device) for i in step.tensors]
    dynamic = (tuple(dict.fromkeys(dims.get(i, ()), Dim.AUTO) for i, _ in enumerate(step.tensors)),)
    exported, _ = export(step, model, fakes, given, dynamic)
    values = [t for n in exported.graph.nodes for t in pytree.tree_leaves(n.meta.get("val"))]
    names = [s.arg.name for s in exported.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
    by_name = {n.name: n.meta["val"] for n in exported.graph.nodes if n.op == "placeholder"}
    env = next(t.fake_mode.shape_env for t in values if isinstance(t, FakeTensor))
    expressions = {e for t in values for e in _expressions(t)}
    guards = () if env is None else tuple({g.expr.subs(env.replacements) for g in env.guards} - {sympy.true})
    divisor = math.prod({d for e in expressions for d in _divisors(e)})
    sizes = [tuple(map(_expression, by_name[n].shape)) for n in names]
    if all(e.is_Integer for es in sizes for e in es):
        raise Unlike("the code takes a size as a number (int(x.shape[1]), range(), len())")
    return Conditions(tuple(sizes), guards, divisor)


def _expression(n: Any) -> Any:
    return n.node.expr if isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) else sympy.sympify(n)


def _expressions(given: Any) -> list[Any]:
    """The sizes that a value of the graph has, or is."""
    sizes = given.shape if isinstance(given, Tensor) else [given]
    return [_expression(n) for n in sizes if isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool))]


def _divisors(expression: Any) -> set[int]:
    """By what sizes are divided.  Raises Unlike for what is no sum, product or division by a number."""
    found: set[int] = set()
    for e in sympy.preorder_traversal(expression):
        power = isinstance(e, sympy.Pow) and e.exp.is_Integer and e.exp > 0
        if type(e).__name__ in _DIVIDED and e.args[1].is_Integer:
            found.add(int(e.args[1]))
        elif not power and not isinstance(e, _PLAIN):
            raise Unlike(f"the code computes {expression} of a size")
    return found


__all__ = ["Conditions", "Open", "conditions"]
