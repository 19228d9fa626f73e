"""What a rule answers for given specs, without tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import reshard
from ..choose import Choice, Wish, choose, choose_for
from ..errors import RuleError
from ..layout import Spec
from ..rules import RULES, Rule
from ..rules.pointwise import is_pointwise, pointwise_rule
from .calls import Op
from .plans import make_rule, mw_context

Tensor = torch.Tensor


@dataclass(frozen=True)
class Inference:
    """What a rule answers: layouts the inputs must have, layouts the outputs get, how, and at what cost in bytes.

    ``native``: locals run through the op itself, not through a function that the rule brings.
    """

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    strategy: tuple[str, ...]
    bytes: float
    native: bool


def infer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Spec] | None) -> Inference:
    """Shared body of ``infer_forward`` and ``infer_backward``; specs stand in place of tensors."""
    rule_fn = RULES.get(name) or (pointwise_rule if is_pointwise(name) else None)
    if rule_fn is None:
        raise RuleError(f"{name!r} has no rule; the ops that have one: meshwright.rules.RULES")
    specs: list[Spec] = []
    _collect_specs((args, kwargs), specs)
    if not specs:
        raise RuleError(f"{name!r}: give mw.Spec(shape, dtype, layout) in place of each tensor")
    op = Op(None, name, False, False, False, rule_fn, None)
    with mw_context(op, specs):
        stand_in = iter(specs)
        made_args, made_kwargs = _map_specs((args, kwargs), lambda s: _StandIn(next(stand_in)))
        rule = make_rule(op, specs, made_args, made_kwargs)
        if rule is None:
            raise RuleError("the rule has nothing to say for these arguments: the inputs would be gathered")
        dtype = outputs[0].dtype if outputs else specs[0].dtype
        like = [(rule.out_shape(i), dtype) for i in range(len(rule.outputs))]
        choice = _toward(rule, specs, like, outputs) if outputs else choose(rule, specs, like)
    moved = sum(reshard.plan(s, t.with_(undecided=0)).bytes for s, t in zip(choice.sources, choice.inputs, strict=True))
    names = tuple(
        c.factor or ("replicate" if not any("Partial" in repr(p) for p in c.inputs) else "partial")
        for c in choice.strategies
    )
    return Inference(choice.inputs, choice.outputs, names, moved, native=rule.local is None)


def _toward(rule: Rule, specs: Sequence[Spec], like: list[tuple[Any, torch.dtype]], outputs: Sequence[Spec]) -> Choice:
    """The choice for wished outputs.  What is replicated may be asked for sliced: that sends nothing either way, since
    a value of which each rank uses its own part has its gradient reduced where it comes from."""
    free = [s.with_(reduced=(1 << s.mesh.ndim) - 1, undecided=0) for s in specs]
    return choose_for(rule, free, like, Wish(tuple(outputs)))


class _StandIn(torch.Tensor):
    """A tensor without data that carries a spec through :func:`map_tensors`."""

    @staticmethod
    def __new__(cls, spec: Spec) -> _StandIn:
        return torch.Tensor._make_subclass(cls, torch.empty(0, device="meta"))


def _collect_specs(a: Any, found: list[Spec]) -> None:
    if isinstance(a, Spec):
        found.append(a)
    elif isinstance(a, (tuple, list)):
        for x in a:
            _collect_specs(x, found)
    elif isinstance(a, dict):
        for x in a.values():
            _collect_specs(x, found)


def _map_specs(a: Any, fn: Callable[[Spec], Any]) -> Any:
    if isinstance(a, Spec):
        return fn(a)
    if isinstance(a, (tuple, list)):
        return type(a)(_map_specs(x, fn) for x in a)
    if isinstance(a, dict):
        return {k: _map_specs(v, fn) for k, v in a.items()}
    return a
