"""What a rule answers for given specs, without tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import resharding
from ..choose import Choice, Wanted, choose, choose_for
from ..compat import tree_leaves, tree_map_only
from ..errors import RuleError
from ..layout import Layout, Spec
from ..rules import COMPOSITES, RULES, Rule
from ..rules.book import did_you_mean
from ..rules.pointwise import is_pointwise, pointwise_rule
from .binding import Args, Kwargs
from .calls import Op, function_named
from .plans import make_rule, naming
from .results import global_outputs

Tensor = torch.Tensor


@dataclass(frozen=True)
class Inference:
    """What a rule answers: layouts the inputs must have, layouts the outputs get, how, and at what cost in bytes.

    ``native``: locals run through the op itself, not through a function that the rule brings.  ``kind``: ``"rule"``,
    ``"gathered"`` where there is none (the op runs on every rank, on whole inputs), ``"composite"`` where it is
    computed as other ops (then, too, inputs and outputs are given as whole: each of these ops says what it needs).
    """

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    strategy: tuple[str, ...]
    bytes: float
    native: bool
    kind: str = "rule"


def infer(name: str, args: Args, kwargs: Kwargs, outputs: Sequence[Spec] | None, *, graded: bool = True) -> Inference:
    """Shared body of ``infer_forward`` and ``infer_backward``; specs stand in place of tensors.

    ``graded``: the inputs need gradients, whose bytes count too.
    """
    rule_fn = RULES.get(name) or (pointwise_rule if is_pointwise(name) else None)
    func = _function(name, known=rule_fn is not None)
    specs = [s for s in tree_leaves((args, kwargs)) if isinstance(s, Spec)]
    if not specs:
        raise RuleError(f"{name!r}: give mw.Spec(shape, dtype, layout) in place of each tensor")
    if any(s.mesh != specs[0].mesh for s in (*specs, *(outputs or ()))):
        raise RuleError(f"{name!r}: the specs lie on different meshes")
    op = Op(None, name, False, False, False, rule_fn, None)
    with naming(op, specs):
        made_args, made_kwargs = tree_map_only(Spec, lambda _: torch.empty(0, device="meta"), (args, kwargs))
        real = global_outputs(func, specs, made_args, made_kwargs) if func is not None else None
        rule = make_rule(op, specs, made_args, made_kwargs)
        if rule is None:
            return gathered(name, specs, real, outputs)
        dtype = outputs[0].dtype if outputs else specs[0].dtype
        like: list[tuple[Any, torch.dtype]] = [(rule.out_shape(i), dtype) for i in range(len(rule.outputs))]
        if real is not None and len(real) == len(like):
            if [tuple(s) for s, _ in real] != [s for s, _ in like]:
                raise RuleError(f"the rule says outputs of shapes {[s for s, _ in like]}, the op gives {real}")
            like = list(real)
        _check_wish(outputs, like)
        choice = (
            _toward(rule, specs, like, outputs)
            if outputs
            else choose(rule, specs, like, constants=() if graded else range(len(specs)))
        )
    moved = sum(
        resharding.plan(s, t.with_(undecided=0)).bytes for s, t in zip(choice.sources, choice.inputs, strict=True)
    )
    names = tuple(
        c.factor or ("replicate" if not any("Partial" in repr(p) for p in c.inputs) else "partial")
        for c in choice.strategies
    )
    return Inference(choice.inputs, choice.outputs, names, moved, native=rule.local is None)


def _function(name: str, known: bool) -> Callable[..., Any] | None:
    """The function of a name, to ask PyTorch for its outputs; None for what only the book knows."""
    try:
        return function_named(name)
    except (RuleError, AttributeError):
        if known or name in COMPOSITES:
            return None
        near = did_you_mean(name, {*RULES, *COMPOSITES})
        raise RuleError(f"{name!r} has no rule, and PyTorch no function of that name{near}") from None


def _check_wish(outputs: Sequence[Spec] | None, like: Sequence[tuple[Any, torch.dtype]]) -> None:
    shapes = [tuple(shape) for shape, _ in like]
    if outputs is not None and [tuple(o.shape) for o in outputs] != shapes[: len(outputs)]:
        raise RuleError(f"outputs= has shapes {[tuple(o.shape) for o in outputs]}, the op gives {shapes}")


def gathered(
    name: str,
    specs: Sequence[Spec],
    real: Sequence[tuple[torch.Size, torch.dtype]] | None,
    outputs: Sequence[Spec] | None,
) -> Inference:
    """An op without a rule: every input whole on every rank, and so the outputs."""
    whole = Layout(specs[0].mesh)
    if real is None and outputs is None and name not in COMPOSITES:
        raise RuleError("PyTorch cannot tell the shapes of its outputs for these arguments")
    _check_wish(outputs, real if real is not None else [(o.shape, o.dtype) for o in outputs or ()])
    inputs = tuple(s.with_(layout=whole, reduced=0, undecided=0) for s in specs)
    made = tuple(Spec(shape, dtype, whole) for shape, dtype in real or [(o.shape, o.dtype) for o in outputs or ()])
    moved = sum(resharding.plan(s.with_(undecided=0), t).bytes for s, t in zip(specs, inputs, strict=True))
    kind = "composite" if name in COMPOSITES else "gathered"
    return Inference(inputs, made, ("replicate",) * whole.mesh.ndim, moved, True, kind)


def _toward(rule: Rule, specs: Sequence[Spec], like: list[tuple[Any, torch.dtype]], outputs: Sequence[Spec]) -> Choice:
    """The choice for wished outputs.  What is replicated may be asked for sliced: that sends nothing either way, since
    a value of which each rank uses its own part has its gradient reduced where it comes from."""
    free = [s.with_(reduced=s.mesh.everywhere, undecided=0) for s in specs]
    return choose_for(rule, free, like, Wanted(tuple(outputs)))
