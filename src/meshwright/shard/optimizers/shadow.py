"""The optimizer that a step runs on in the place of the real one, which never shows anything but its parameters.

It is of the same class, over plain stand-ins: of a parameter whose states are split its own chunk, of others the local
tensor that it is.  Native kernels read long lists of plain tensors several times faster than of distributed ones, and
what its code asks of each costs no call of ours.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import islice, repeat
from types import MethodType, NoneType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ...errors import ShardError
from ...local_tensor import PLAIN, Aliases, is_sparse, plain_of, plain_of_all, set_grad
from ...tensor import DistTensor
from .collected import GroupLists, StateContents, mapped, same, still
from .owners import Wholes
from .states import Chunks

Tensor = torch.Tensor
_OWN = ("param_groups", "state", "_shadow", "_init_group")
_PLAIN: Callable[[Any], Any] = operator.attrgetter(PLAIN)


def plain_ones(tensors: Sequence[Any]) -> list[Any]:
    """Distributed tensors among others as the plain ones that they are."""
    kinds = set(map(type, tensors))
    if kinds == _PLAIN_KIND:  # as autograd has made them
        return list(tensors)
    if kinds == _KIND and not any(PLAIN in t.__dict__ for t in tensors):
        return plain_of_all(tensors)
    return [plain_of(t) if isinstance(t, DistTensor) else t for t in tensors]


_KIND, _PLAIN_KIND = {DistTensor}, {Tensor}


class _Asking:
    """Notes that a step asks for its states: what has not may have changed values there, and nothing else."""

    _shadow: Shadow
    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> dict[Any, Any]:
        self._shadow.asked = True
        return self._shadow.state


@cache
def _asking(kind: Any) -> Any:
    return type(kind.__name__, (_Asking, kind), {"__module__": kind.__module__})


class Shadow:
    """The optimizer of a step, which is kept for the next one: what is the same objects there is not made again.

    Args:
        opt: the real one, whose step takes elements one by one, or which has chunks.
        chunks: the parameters whose chunks stand in for them; None: there are none.
    """

    def __init__(self, opt: Optimizer, chunks: Chunks | None) -> None:
        self.opt, self.chunks = opt, chunks
        self.wholes = chunks if isinstance(chunks, Wholes) else None
        kind: Any = type(opt)
        self.made: Any = object.__new__(kind if chunks is not None else _asking(kind))
        self.groups: list[dict[str, Any]] = []
        self.state: dict[Any, Any] = defaultdict(dict)
        self.stale = True
        self.asked = True  # whether the step may have put others in the place of states
        self.params: list[Tensor] = []  # all, in order
        self.stand_ins: list[Tensor] = []  # of each
        self.plain: list[Tensor] = []  # those that stand in for parameters with gradients to be laid
        # Distributed tensors that are seen as plain ones; those of states by these.
        self.seen: list[DistTensor] = []
        self.aliases: list[Tensor] = []
        self.real: dict[int, DistTensor] = {}
        self.methods: dict[str, Any] = {}  # of the made one, in the place of the real one's
        self.looked: Any = None  # what ``Aliases`` was when these were looked at
        self.before: Any = None
        self.after = StateContents({})
        self.lists = GroupLists()

    def load(
        self, params: list[Tensor], contents: StateContents, whole: Sequence[DistTensor], grads: Sequence[Tensor | None]
    ) -> None:
        """Take what the real optimizer has.  What is known stays the same object.

        Args:
            params: all parameters: the same list as long as they are the same.
            contents: of the real state: the same object as long as that is the same, and all :meth:`in_place`.
            whole: the distributed ones of them that have no chunks.
            grads: of these.
        """
        opt = self.opt
        if self.stale or self.chunks is not None or params is not self.params or contents is not self.before:
            self._make(params, whole)
            self.before, self.after, self.stale = contents, StateContents(self.state), False
            self.lists.forget()
        stand_ins = iter(self.stand_ins)
        listed = [islice(stand_ins, len(g["params"])) for g in opt.param_groups]
        self.groups[:] = [{**g, "params": list(own)} for g, own in zip(opt.param_groups, listed, strict=True)]
        self.methods = {} if self.chunks is None else self._methods()  # PyTorch's own have none
        groups = self.groups if self.wholes is None else self._owned()
        own = {**opt.__dict__, **self.methods, "param_groups": groups, "state": self.state}
        self.made.__dict__ = own
        self.asked = self.chunks is not None
        try:
            laid, dense = list(map(_PLAIN, grads)), True  # kept of dense ones alone
        except AttributeError:
            laid = plain_ones(grads)
            dense = NoneType not in set(map(type, laid)) and not any(map(is_sparse, laid))
        if not self.asked:
            own["_shadow"] = self
            if len(self.plain) == len(self.stand_ins) and "_init_group" not in opt.__dict__:
                own["_init_group"] = self.lists.taker(self.made, self.stand_ins, laid, dense)
        if not self.lists.ready:
            _set_grads(self.plain, laid)

    def _methods(self) -> dict[str, Any]:
        """What an optimizer has of itself (``self.update = self._update_foreach``), asking this one for states."""
        found = {
            k: MethodType(v.__func__, self.made)
            for k, v in self.opt.__dict__.items()
            if v.__class__ is MethodType and v.__self__ is self.opt
        }
        if "_init_group" in self.opt.__dict__.keys() - found:
            raise ShardError(
                f"shard_optimizer: {type(self.opt).__name__}._init_group was patched on the instance, which fails "
                "with shard_states and offload_states. Override it in a subclass and pass by='element'."
            )
        return found

    def _owned(self) -> list[dict[str, Any]]:
        """The groups that have parameters which are updated here, with these alone; attributes name them too."""
        assert self.wholes is not None
        at = iter(zip(self.params, self.stand_ins, strict=True))
        for group, real in zip(self.groups, self.opt.param_groups, strict=True):
            pairs = list(islice(at, len(real["params"])))
            group["params"] = [own for p, own in pairs if self.wholes.has(p)]
        of = {id(p): own for p, own in zip(self.params, self.stand_ins, strict=True)}
        for k, v in self.opt.__dict__.items():
            if k not in _OWN and (own := mapped(v, lambda t: of.get(id(t), t))) is not v:
                self.methods[k] = own
        return [g for g in self.groups if g["params"]]

    def _name_parameters(self, names: Sequence[str]) -> None:
        """Bring back what a step has written to containers that name its parameters."""
        of = {id(own): p for p, own in zip(self.params, self.stand_ins, strict=True)}
        for k in names:
            real = mapped(self.made.__dict__[k], lambda t: of.get(id(t), t))
            if not _same_items(real, self.opt.__dict__[k]):
                self.opt.__dict__[k] = real

    def in_place(self) -> bool:
        """Whether all that is seen as plain has the memory that it had."""
        now = Aliases.now
        if now is self.looked:
            return True
        try:
            found = still(map(_PLAIN, self.seen), self.aliases)
        except AttributeError:
            return False
        self.looked = now if found else None
        return found

    def _make(self, params: list[Tensor], whole: Sequence[DistTensor]) -> None:
        self.params, self.plain = params, list(map(plain_of, whole))
        own: dict[int, Tensor] = dict(zip(map(id, whole), self.plain, strict=True))
        self.stand_ins = [self._stand_in(p, own) for p in params]
        self.seen, self.aliases, self.real, self.looked = list(whole), list(self.plain), {}, None
        self.state.clear()
        of = dict(zip(map(id, params), self.stand_ins, strict=True))
        for p, entry in self.opt.state.items():
            stand_in = of.get(id(p), p)
            if stand_in is p:
                self.state[p] = entry
            elif self.wholes is None:
                self.state[stand_in] = {k: self._alias(v) for k, v in entry.items()}
            elif self.wholes.has(p):
                self.state[stand_in] = {k: mapped(v, self._alias) for k, v in entry.items()}

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
        opt, left = self.opt, self.made.__dict__
        for group, shadowed in zip(opt.param_groups, self.groups, strict=True):
            group.update({k: v for k, v in shadowed.items() if k != "params"})
        for k in opt.__dict__.keys() - left.keys():
            del opt.__dict__[k]
        made = [k for k, v in self.methods.items() if left.get(k) is v]
        opt.__dict__.update({k: v for k, v in left.items() if k not in _OWN and k not in made})
        if self.wholes is not None:
            self._name_parameters([k for k in made if not isinstance(left[k], MethodType)])
        if self.wholes is None and (not self.asked or self.after.still(self.state)):
            return False
        of = dict(zip(map(id, self.stand_ins), self.params, strict=True))
        for stand_in, entry in self.state.items():
            p = of.get(id(stand_in), stand_in)
            if p is stand_in:
                opt.state[p] = entry
            else:
                held = {k: mapped(v, self._real) for k, v in entry.items()}
                kept = opt.state.setdefault(p, entry)
                kept.clear()
                kept.update(held)
        self.stale = True
        return True

    def _real(self, value: Any) -> Any:
        return self.real.get(id(value), value)

    def updated(self, everything: bool) -> list[DistTensor]:
        """The parameters whose chunks a step has updated.

        Args:
            everything: those without a gradient, too.
        """
        return [p for p, own in self.chunked() if everything or own.grad is not None]

    def release(self) -> None:
        """Gradients are nobody's but the parameters' again."""
        # What has gradients, or has the made one, goes; the rest stays, for a step that calls that of its base.
        left = self.made.__dict__
        left.pop("_init_group", None)
        left.update({k: v for k, v in self.opt.__dict__.items() if k in self.methods})
        if not self.lists.ready:
            _set_grads([*self.plain, *(own for _, own in self.chunked())], repeat(None))

    def chunked(self) -> list[tuple[DistTensor, Tensor]]:
        """Parameters and their own chunks, which the step is on."""
        if self.chunks is None:
            return []
        whole = set(map(id, self.plain))
        pairs = zip(self.params, self.stand_ins, strict=True)
        return [(p, own) for p, own in pairs if own is not p and id(own) not in whole]  # type: ignore[misc]


def _same_items(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return same([*a, *a.values()], [*b, *b.values()])
    return same(a, b)


def _set_grads(tensors: Sequence[Tensor], grads: Iterable[Tensor | None]) -> None:
    for _ in map(set_grad, tensors, grads):
        pass


__all__ = ["Shadow"]
