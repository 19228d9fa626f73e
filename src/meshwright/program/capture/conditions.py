"""For which sizes of a batch the user's code does the same: what ``torch.export`` found while sizes were symbols."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
import torch.nn as nn
from torch.export import Dim

from ...compat import FakeTensor, FakeTensorMode, pytree
from ..ir.sizes import Unlike
from .export import LossFn, ParamDtypes, StepModule, export, fake_of, fake_state

Tensor = torch.Tensor
Open = Mapping[int, Sequence[int]]
Shapes = Sequence[Sequence[int]]

_PLAIN = (sympy.Add, sympy.Mul, sympy.Symbol, sympy.Integer)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_DIVIDED = {"CleanDiv", "FloorDiv", "Mod", "PythonMod"}  # PyTorch's own functions


@dataclass(frozen=True)
class Conditions:
    """What sizes must fulfil, so that the step does what it did when it was captured.

    Attributes:
        sizes: of each tensor of a batch, its sizes as expressions.
        guards: on what the code branched.
        divisor: by how much the code divides sizes, in all.
        calls: its ops, each with its numbers: what of them is a size is an expression.
    """

    sizes: tuple[tuple[Any, ...], ...]
    guards: tuple[Any, ...]
    divisor: int
    calls: tuple[tuple[Any, ...], ...]

    def explain(self, captures: Mapping[Shapes, fx.GraphModule]) -> None:
        """Raises Unlike where numbers of captured graphs differ and do not follow from the sizes.

        Args:
            captures: the shapes of a batch's tensors to the graph for them.
        """
        known = [self._known(shapes) for shapes in captures]
        graphs = [_calls(module) for module in captures.values()]
        if any(len(calls) != len(self.calls) for calls in graphs):
            raise Unlike("with sizes as symbols the code runs other ops")
        for mine, *theirs in zip(self.calls, *graphs, strict=True):
            if any(len(call) != len(mine) for call in theirs):
                raise Unlike(f"with sizes as symbols the code calls {mine[0]} otherwise")
            for symbol, *numbers in zip(mine, *theirs, strict=True):
                made = [symbol.subs(k) if isinstance(symbol, sympy.Basic) else symbol for k in known]
                if len(set(numbers)) > 1 and made != numbers:
                    raise Unlike(f"the code gives {mine[0]} other numbers for other batches, which are no sizes")

    def _pairs(self, shapes: Shapes) -> list[tuple[Any, int]]:
        return [(e, n) for es, ns in zip(self.sizes, shapes, strict=True) for e, n in zip(es, ns, strict=True)]

    def _known(self, shapes: Shapes) -> dict[Any, int]:
        return {e: n for e, n in self._pairs(shapes) if e.is_Symbol}

    def hold(self, shapes: Shapes) -> bool:
        """Whether they are fulfilled by the shapes of a batch's tensors."""
        known = self._known(shapes)
        return all(e.subs(known) == n for e, n in self._pairs(shapes)) and all(
            g.subs(known) == sympy.true for g in self.guards
        )


def conditions(
    model: nn.Module, loss_fn: LossFn | None, batch: Any, device: str, dtypes: ParamDtypes, dims: Open
) -> Conditions:
    """What sizes must fulfil.

    Args:
        dims: of the tensors of a batch, by their number, the dims of which the size is open.

    Raises:
        Unlike: what the step does with sizes is not what a program of many can do.
        CaptureError: as capture does.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    step = StepModule(model, loss_fn, batch, dtypes)
    fakes, _ = fake_state(step, mode, device)
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
    return Conditions(tuple(sizes), guards, divisor, _calls(exported.graph_module))


def _calls(module: fx.GraphModule) -> tuple[tuple[Any, ...], ...]:
    """The ops of a graph, each with its numbers and words."""
    found = []
    for node in module.graph.nodes:
        if node.op != "call_function" or isinstance(node.meta.get("val"), _SYMBOLIC) or "_assert" in str(node.target):
            continue
        found.append((str(node.target), *map(_number, pytree.tree_leaves((node.args, node.kwargs)))))
    return tuple(found)


def _number(a: Any) -> Any:
    if isinstance(a, fx.Node):
        val = a.meta.get("val")
        return _expression(val) if isinstance(val, _SYMBOLIC) else "%"
    return sympy.sympify(a) if type(a) in (int, float) else repr(a)


def _expression(n: Any) -> Any:
    return n.node.expr if isinstance(n, _SYMBOLIC) else sympy.sympify(n)


def _expressions(given: Any) -> list[Any]:
    """The sizes that a value of the graph has, or is."""
    sizes = given.shape if isinstance(given, Tensor) else [given]
    return [_expression(n) for n in sizes if isinstance(n, _SYMBOLIC)]


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
