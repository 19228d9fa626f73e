"""The optimizer that a step runs on in the place of the real one, which never shows anything but its parameters.

It is of the same class, over plain stand-ins: of a parameter whose states are split its own chunk, of others the local
tensor that it is.  Native kernels read long lists of plain tensors several times faster than of distributed ones, and
what its code asks of each costs no call of ours.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ...local_tensor import PLAIN, plain_of, set_grad
from ...tensor import DistTensor
from .states import Chunks

Tensor = torch.Tensor
_OWN = ("param_groups", "state")
_PLAIN: Callable[[Any], Any] = operator.attrgetter(PLAIN)


_END = (object(),)
_VALUES = operator.methodcaller("values")


def values_of(state: Mapping[Any, Any]) -> Iterable[Any]:
    """All values that a state has at a moment, and an end."""
    return chain(chain.from_iterable(map(_VALUES, _entries(state))), _END)


def contents_of(state: Mapping[Any, Any]) -> Iterable[Any]:
    """The same with whose they are, and under which names."""
    return chain(state, chain.from_iterable(_entries(state)), values_of(state))


def _entries(state: Mapping[Any, Any]) -> Iterable[Mapping[Any, Any]]:
    """What a state has of each parameter; also what an optimizer keeps there that belongs to none."""
    entries = state.values()
    return (
        entries if _DICTS.issuperset(map(type, entries)) else [e if isinstance(e, dict) else {"": e} for e in entries]
    )


_DICTS = {dict}


def still(now: Iterable[Any], before: Sequence[Any]) -> bool:
    """Whether these are the objects that a list has: of lists as long as each other, or that have an end."""
    return all(map(operator.is_, now, before))


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether they hold the same objects."""
    return len(a) == len(b) and still(a, b)


def plain_ones(tensors: Sequence[Any]) -> list[Any]:
    """Distributed tensors among others as the plain ones that they are."""
    try:
        return list(map(_PLAIN, tensors))
    except AttributeError:
        return [plain_of(t) if isinstance(t, DistTensor) else t for t in tensors]


class Shadow:
    """The optimizer of a step, which is kept for the next one: what is the same objects there is not made again.

    Args:
        opt: the real one.
        chunks: the parameters whose chunks stand in for them; None: there are none.
    """

    def __init__(self, opt: Optimizer, chunks: Chunks | None) -> None:
        self.opt, self.chunks = opt, chunks
        self.made: Any = object.__new__(type(opt))
        self.made.param_groups, self.made.state = [], defaultdict(dict)
        self.stale = True
        self.params: list[Tensor] = []  # all, in order
        self.stand_ins: list[Tensor] = []  # of each
        self.plain: list[Tensor] = []  # those that stand in for parameters with gradients to be laid
        # Distributed tensors that are seen as plain ones; those of states by these.
        self.seen: list[DistTensor] = []
        self.aliases: list[Tensor] = []
        self.real: dict[int, DistTensor] = {}
        self.before: list[Any] = []
        self.after: list[Any] = [None]

    def load(
        self, params: list[Tensor], contents: list[Any], whole: Sequence[DistTensor], grads: Sequence[Tensor | None]
    ) -> None:
        """Take what the real optimizer has.  What is known stays the same object.

        Args:
            params: all parameters: the same list as long as they are the same.
            contents: of the real state: the same object as long as that is the same, and all :meth:`in_place`.
            whole: the distributed ones of them that have no chunks.
            grads: of these.
        """
        opt, made = self.opt, self.made
        if self.stale or self.chunks is not None or params is not self.params or contents is not self.before:
            self._make(params, whole)
            self.before, self.after, self.stale = contents, list(values_of(made.state)), False
        stand_ins = iter(self.stand_ins)
        groups, state = made.param_groups, made.state
        listed = [islice(stand_ins, len(g["params"])) for g in opt.param_groups]
        groups[:] = [{**g, "params": list(own)} for g, own in zip(opt.param_groups, listed, strict=True)]
        made.__dict__ = {**opt.__dict__, "param_groups": groups, "state": state}
        _set_grads(self.plain, plain_ones(grads))

    def in_place(self) -> bool:
        """Whether all that is seen as plain has the memory that it had."""
        try:
            return still(map(_PLAIN, self.seen), self.aliases)
        except AttributeError:
            return False

    def _make(self, params: list[Tensor], whole: Sequence[DistTensor]) -> None:
        self.params, self.plain = params, list(map(plain_of, whole))
        own: dict[int, Tensor] = dict(zip(map(id, whole), self.plain, strict=True))
        self.stand_ins = [self._stand_in(p, own) for p in params]
        self.seen, self.aliases, self.real = list(whole), list(self.plain), {}
        self.made.state.clear()
        of = dict(zip(map(id, params), self.stand_ins, strict=True))
        for p, entry in self.opt.state.items():
            stand_in = of.get(id(p), p)
            self.made.state[stand_in] = entry if stand_in is p else {k: self._alias(v) for k, v in entry.items()}

    def _stand_in(self, p: Tensor, own: Mapping[int, Tensor]) -> Tensor:
        if id(p) in own:
            return own[id(p)]
        # Asked first: what a chunk is follows from the size that the parameter has now.
        if self.chunks is None or not isinstance(p, DistTensor) or self.chunks.spec(p) is None:
            return p
        return self.chunks.prepare(p)

    def _alias(self, value: Any) -> Any:
        if not isinstance(value, DistTensor):
            return value
        made = plain_of(value)
        self.seen.append(value)
        self.aliases.append(made)
        self.real[id(made)] = value
        return made

    def settle(self) -> bool:
        """After a step: what it left behind goes to the real optimizer; whether its state has other objects now."""
        opt, made = self.opt, self.made
        for group, shadowed in zip(opt.param_groups, made.param_groups, strict=True):
            group.update({k: v for k, v in shadowed.items() if k != "params"})
        for k in opt.__dict__.keys() - made.__dict__.keys():
            del opt.__dict__[k]
        opt.__dict__.update({k: v for k, v in made.__dict__.items() if k not in _OWN})
        if still(values_of(made.state), self.after):
            return False
        of = dict(zip(map(id, self.stand_ins), self.params, strict=True))
        for stand_in, entry in made.state.items():
            p = of.get(id(stand_in), stand_in)
            if p is stand_in:
                opt.state[p] = entry
            else:
                held = {k: self.real.get(id(v), v) for k, v in entry.items()}
                kept = opt.state.setdefault(p, entry)
                kept.clear()
                kept.update(held)
        self.stale = True
        return True

    def updated(self, everything: bool) -> list[DistTensor]:
        """The parameters whose chunks a step has updated.

        Args:
            everything: those without a gradient, too.
        """
        return [p for p, own in self.chunked() if everything or own.grad is not None]

    def release(self) -> None:
        """Gradients are nobody's but the parameters' again."""
        _set_grads([*self.plain, *(own for _, own in self.chunked())], repeat(None))

    def chunked(self) -> list[tuple[DistTensor, Tensor]]:
        """Parameters and their own chunks, which the step is on."""
        if self.chunks is None:
            return []
        whole = set(map(id, self.plain))
        pairs = zip(self.params, self.stand_ins, strict=True)
        return [(p, own) for p, own in pairs if own is not p and id(own) not in whole]  # type: ignore[misc]


def _set_grads(tensors: Sequence[Tensor], grads: Iterable[Tensor | None]) -> None:
    for _ in map(set_grad, tensors, grads):
        pass


__all__ = ["Shadow", "contents_of", "same", "still"]
