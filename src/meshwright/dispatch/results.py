"""What an op gives: global shapes and dtypes.  PyTorch is asked for them once; of other sizes the rule's line says it.

PyTorch is asked by a run on meta tensors, which costs more than all the rest of a plan.  Its answer is remembered by
all that it can hang on but for sizes: function, arguments, dtypes, the factors of the line, and how the size of each
factor compares with what a call may compare it with: 0 to 4, the numbers among the arguments and their sums, the other
sizes.  That holds where the line gives every size of the outputs from dims of the inputs; of others PyTorch is asked
each time.  A first run compares what it gives with the line once more, on every rank (``Execution.finish``).
"""

from __future__ import annotations

import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any

import torch

from ..compat import disable_current_modes
from ..errors import RuleError
from ..layout import Spec
from ..local_tensor import storage_of
from ..ranks.runtime import LEAST, MOST, Recent
from ..rules import Rule
from . import autocast
from .binding import Args, Kwargs
from .calls import Op, disabled, map_tensors, tensors_in
from .keys import key_part

Tensor = torch.Tensor
Outputs = list[tuple[torch.Size, torch.dtype]]
VERIFY = False  # ask PyTorch all the same, and compare: of tests

_MOST_NUMBERS = 4  # of more, every size up to their sum is a case of its own


@dataclass(frozen=True, slots=True)
class Result:
    """What PyTorch answers: None for ``outputs`` where it cannot tell them without values.

    ``views``: an output shares memory with an input.  ``refused``: it refuses the arguments.
    """

    outputs: Outputs | None
    views: bool = False
    refused: bool = False


# The same for all ranks: no plan, and no communication, depends on whether something is in it.
_TOLD = Recent(LEAST, limit=MOST)


def kind_of(func: Any, rule: Rule, specs: Sequence[Spec], args: Args, kwargs: Kwargs) -> Any:
    """What an answer hangs on; None where the line does not give the sizes of the outputs."""
    given = {dim[0] for dims in rule.inputs for dim in dims if len(dim) == 1}
    if any(f not in given for dims in rule.outputs for dim in dims for f in dim):
        return None
    numbers: list[int] = []
    fixed = _fixed((args, kwargs), func, numbers)
    sizes = list(rule.sizes.values())
    order = sorted(set(sizes))
    compared = tuple(map(_place_among(tuple(numbers)), sizes)), tuple(map(order.index, sizes))
    kinds = tuple([(s.dtype, s.ndim) for s in specs])
    mode = torch.get_default_dtype(), autocast.active() and autocast.state()
    return (func, fixed, mode, kinds, rule.inputs, rule.outputs, compared)


@lru_cache(maxsize=4096)
def _place_among(numbers: tuple[int, ...]) -> Callable[[int], int]:
    """What a size is beside numbers that ops know by themselves, and the sums of some of these: less, equal or more."""
    sums = {0}
    for n in numbers[:_MOST_NUMBERS]:
        sums |= {n + m for m in sums}
    order = sorted({*range(5), *sums}) if len(numbers) <= _MOST_NUMBERS else range(5 + sum(numbers))
    return lambda n: bisect_left(order, n) + bisect_right(order, n)


def _fixed(a: Any, func: Any, numbers: list[int]) -> Any:
    """Arguments without tensors; whole numbers among them go to ``numbers``."""
    if isinstance(a, Tensor):
        return Tensor
    if a.__class__ is int:
        numbers.append(abs(a))
        return a
    if a is None:
        return None
    if isinstance(a, (tuple, list)):
        return (a.__class__, *[_fixed(x, func, numbers) for x in a])
    if isinstance(a, dict):
        return (dict, *[(k, _fixed(v, func, numbers)) for k, v in a.items()]) if a else dict
    if isinstance(a, slice):
        return (slice, *[_fixed(x, func, numbers) for x in (a.start, a.stop, a.step)])
    if a.__class__ is not bool and isinstance(a, Integral):  # those of NumPy, too
        numbers.append(abs(int(a)))
        return int(a)
    return (float, a) if a.__class__ is float else key_part(a, func)  # 2.0 is equal to 2, and promotes otherwise


def told(kind: Any, rule: Rule | None) -> Result | None:
    """The answer that was given for such a call of other sizes, with these sizes; None where there was none."""
    if kind is None or rule is None:
        return None
    found = _TOLD.find(kind)
    if found is None:
        return None
    dtypes, views = found
    return Result([(torch.Size(rule.out_shape(i)), dtype) for i, dtype in enumerate(dtypes)], views)


def remember(kind: Any, result: Result) -> None:
    """Keep an answer that the rule's line agrees with."""
    if kind is not None and result.outputs is not None:
        _TOLD.keep(kind, (tuple([dtype for _, dtype in result.outputs]), result.views))


def on_meta(func: Any, args: Args, kwargs: Kwargs, device: str) -> tuple[Any, Args, Kwargs]:
    """A call on this device as the same on meta tensors: what stays where it is stays there."""
    name = getattr(func, "__name__", "")
    kwargs = {k: "meta" if k == "device" or isinstance(v, torch.device) else v for k, v in kwargs.items()}
    devices = (torch.device, str) if name == "to" else torch.device
    args = tuple("meta" if isinstance(a, devices) else a for a in args)
    return (Tensor.to, (args[0], "meta"), {}) if name == device else (func, args, kwargs)  # x.cpu() is x


def ask(func: Any, specs: Sequence[Spec], args: Args, kwargs: Kwargs) -> Result:
    """PyTorch's answer, from a run on meta tensors."""
    given: list[Tensor] = []

    def meta(t: Tensor) -> Tensor:
        s = specs[len(given)]
        given.append(torch.empty(s.shape, dtype=s.dtype, device="meta"))
        return given[-1]

    try:
        with disabled(), torch.no_grad(), warnings.catch_warnings(), disable_current_modes():
            warnings.simplefilter("ignore")
            func, args, kwargs = on_meta(func, args, kwargs, specs[0].mesh.device)
            made = func(*map_tensors(args, meta), **map_tensors(kwargs, meta))
            return _described(made, specs, given)
    except NotImplementedError:
        return Result(None)
    except Exception:
        return Result(None, refused=True)


def _described(made: Any, specs: Sequence[Spec], given: Sequence[Tensor]) -> Result:
    outputs = tensors_in(made)
    memory = {storage_of(t) for t in given}
    views = any(storage_of(t) in memory for t in outputs)
    if isinstance(made, (Tensor, tuple, list)):
        return Result([(t.shape, t.dtype) for t in outputs], views)
    return Result(None if made is not None else [(specs[0].shape, specs[0].dtype)], views)


def global_outputs(func: Any, specs: Sequence[Spec], args: Args, kwargs: Kwargs) -> Outputs | None:
    """Global shape and dtype of each output as PyTorch tells them; None where it cannot."""
    return ask(func, specs, args, kwargs).outputs


def check(op: Op, rule: Rule, outputs: Outputs) -> None:
    """Raises RuleError where the line says other shapes than PyTorch."""
    said = [rule.out_shape(i) for i in range(len(rule.outputs))]
    real = [tuple(shape) for shape, _ in outputs]
    if said != real:
        raise RuleError(
            f"the rule of {op.name!r} ({rule.text}) says its outputs have shapes {said}, the op gives {real}: "
            "correct the rule"
        )


def compare(op: Op, known: Result | None, asked: Result) -> None:
    """Raises AssertionError where an answer taken for known is another than PyTorch's (``VERIFY``)."""
    if known is not None and known != asked:
        raise AssertionError(f"{op.name}: {known} was taken for known, PyTorch says {asked}")
