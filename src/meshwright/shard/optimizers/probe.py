"""Whether an optimizer's update takes together what a word says it does not: its class runs on small tensors."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ...compat import TorchDispatchMode
from ...dispatch import disabled
from .collected import mapped

Tensor = torch.Tensor
_LARGEST, _LONGEST = 8, 64  # of a dim of a stand-in; of the steps of a probe
_CLOSE = {"element": 1e-6, "parameter": 0.03}  # of the largest update: batched kernels in bfloat16 round differently


def refuted(opt: Optimizer, by: str) -> str:
    """Why a word does not hold for an optimizer, in words; empty where its steps do not show that.

    Its class steps on stand-ins together and one by one (shards of one, or one of several), in float64 on the CPU.
    """
    if by == "model":
        return ""
    try:
        together, apart = _sides(opt, by)
    except _SendsError:
        return "calls torch.distributed itself"
    except Exception:  # a class that needs more than stand-ins, or rounds by blocks: the word stands
        return ""
    if together is None or apart is None:
        return ""
    moved, read = together
    other, also = apart
    pairs = [(x, y, before) for (x, before), (y, _) in zip(moved, other, strict=True) if x.numel()]
    largest = float(torch.stack([(x - before).abs().max() for x, _, before in pairs]).max()) if pairs else 0.0
    off = float(torch.stack([(x - y).abs().max() for x, y, _ in pairs]).max()) if pairs else 0.0
    what = "shards of a parameter" if by == "element" else "parameters one by one"
    if not off <= _CLOSE[by] * largest:  # also what is not a number
        return f"does not update {what} as it does all together (it is {off / (largest or 1):.0e} of an update off)"
    if by == "element" and read != also:
        return f"reads values (.item()) that are not the same of {what} as of all together"
    return ""


Side = tuple[list[tuple[Tensor, Tensor]], set[float]]  # parameters after and before; values that were read


class _SendsError(Exception):
    """A step calls torch.distributed itself: it counts on all parameters being there on each rank."""


class _Coded(Exception):
    """States are codes (integers, float8), which each rank makes of its shards: results differ by rounding."""


def _sides(opt: Optimizer, by: str) -> tuple[Side | None, Side | None]:
    """What comes of stand-ins together, and one by one."""
    seeds = torch.Generator().manual_seed(0)
    shapes = [_shapes(g["params"], by == "element") if i < 4 else [] for i, g in enumerate(opt.param_groups)]
    drawn = lambda shape: torch.randn(shape, generator=seeds, dtype=torch.float64)  # noqa: E731
    values = [[drawn(s) for s in of] for of in shapes]
    steps = min(_LONGEST, 2 + max((v for g in opt.param_groups for v in g.values() if type(v) is int), default=1))
    # Gradients of very different sizes show what is shared by parameters.
    grads = [[[drawn(s) * 10**i for i, s in enumerate(of)] for of in shapes] for _ in range(max(steps, 3))]
    if not any(values):
        return None, None
    if by == "element":
        longest = lambda t: max(range(t.ndim), key=t.shape.__getitem__)  # noqa: E731
        halves = lambda t: t.tensor_split(2, longest(t))  # noqa: E731
        parts = [[[halves(v)[k] for v in of] for of in values] for k in (0, 1)]
        (a, read), (b, other) = (
            _run(opt, parts[k], [[[halves(g)[k] for g in of] for of in step] for step in grads]) for k in (0, 1)
        )
        flat = [v for of in values for v in of]
        joined = [(torch.cat([x, y], longest(v)), v) for (x, _), (y, _), v in zip(a, b, flat, strict=True)]
        return _run(opt, values, grads), (joined, read | other)
    single: list[tuple[Tensor, Tensor]] = []
    for place in ((i, k) for i, of in enumerate(values) for k in range(len(of))):
        only = lambda listed: [[t for k, t in enumerate(of) if (i, k) == place] for i, of in enumerate(listed)]  # noqa: B023, E731
        single += _run(opt, only(values), [only(step) for step in grads])[0]
    return _run(opt, values, grads), (single, set())


def _shapes(params: Sequence[Tensor], split: bool) -> list[tuple[int, ...]]:
    """Shapes of stand-ins: small ones of as many dims as the parameters have, two of each.

    Args:
        split: only of those that can be.
    """
    found: dict[int, list[tuple[int, ...]]] = {}
    for p in params:
        of = found.setdefault(p.ndim, [])
        if len(of) < 2 and (not split or max(p.shape, default=0) > 1):
            of.append(tuple(min(n, _LARGEST - len(of)) for n in p.shape))
    return [shape for of in found.values() for shape in of]


class _Reads(TorchDispatchMode):
    """Notes the values that a step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.values: set[float] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise _SendsError
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default and not isinstance(made, complex):
            self.values.add(float(f"{made:.6g}"))
        return made


def _run(opt: Optimizer, values: Sequence[Sequence[Tensor]], grads: Sequence[Sequence[Sequence[Tensor]]]) -> Side:
    """Steps of the class on copies of values."""
    kind: Any = type(opt)
    made = object.__new__(kind)
    stand_ins = [[v.clone() for v in of] for of in values]
    every = [p for of in stand_ins for p in of]
    params = {id(p) for g in opt.param_groups for p in g["params"]}

    def own(value: Any) -> Any:
        """An attribute of the stand-in: its own methods, its own parameters."""
        if isinstance(value, MethodType) and value.__self__ is opt:
            return MethodType(value.__func__, made)
        if type(value) in (list, tuple) and any(id(v) in params for v in value):
            return type(value)(every)
        found = mapped(value, lambda v: every[0] if every and id(v) in params else v)
        return copy.copy(found) if isinstance(found, (list, dict, set, deque)) else found  # the step may add to it

    groups = [
        {**{k: copy.deepcopy(v) for k, v in g.items() if k != "params"}, "params": list(of)}
        for g, of in zip(opt.param_groups, stand_ins, strict=True)
        if of
    ]
    attributes = {k: own(v) for k, v in opt.__dict__.items() if not k.endswith("_hooks") and k != "step"}
    made.__dict__ = {**attributes, **_hooks(), "param_groups": groups, "state": defaultdict(dict)}
    made.__dict__.pop("_meshwright", None)
    step, reads = inspect.unwrap(kind.step), _Reads()
    with torch.random.fork_rng(devices=[]), disabled(), torch.no_grad():
        torch.manual_seed(0)
        for now in grads:
            for p, g in zip(every, (g for of in now for g in of), strict=True):
                p.grad = g.clone()
            with reads:
                step(made)
    mapped(dict(made.state), _check_state)
    before = [v for of in values for v in of]
    return list(zip(every, before, strict=True)), reads.values


def _check_state(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() > 1 and value.dtype is not torch.bool:
        wide = (value.is_floating_point() and value.itemsize > 1) or value.is_complex()
        if not wide or type(value) is not Tensor:
            raise _Coded
    return value


def _hooks() -> dict[str, Any]:
    names = ("step", "state_dict", "load_state_dict")
    return {f"_optimizer_{name}_{when}_hooks": OrderedDict() for name in names for when in ("pre", "post")}


__all__ = ["refuted"]
