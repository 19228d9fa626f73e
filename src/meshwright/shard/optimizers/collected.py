"""What a step collects before it computes: by the identity of its objects it is known to be what it was."""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import torch

Tensor = torch.Tensor
_DICTS, _STRINGS = {dict}, {str}
_VALUES: Callable[[Any], Iterable[Any]] = operator.methodcaller("values")


def still(now: Iterable[Any], before: Sequence[Any]) -> bool:
    """Whether these are the objects that a list of the same length has."""
    return all(map(operator.is_, now, before))


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether they hold the same objects."""
    return len(a) == len(b) and still(a, b)


def mapped(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Replace what is in (nested) containers, keys of dicts too.  The same object where nothing is replaced."""
    kind = type(value)
    if isinstance(value, dict):
        pairs = [(mapped(k, fn), mapped(v, fn)) for k, v in value.items()]
        if all(k is a and v is b for (k, v), (a, b) in zip(value.items(), pairs, strict=True)):
            return value
        made: dict[Any, Any] = defaultdict(value.default_factory) if isinstance(value, defaultdict) else {}
        made.update(pairs)
        return made
    if kind not in (list, tuple, deque):
        return fn(value)
    items = [mapped(v, fn) for v in value]
    if same(items, value):
        return value
    return deque(items, value.maxlen) if kind is deque else kind(items)


class StateContents:
    """The objects that the state of an optimizer has at a moment, whose they are, and under which names.

    Where all entries have the same names these are not looked at one by one.
    """

    __slots__ = ("kept", "keys", "names", "pick", "size", "values")

    def __init__(self, state: Mapping[Any, Any]) -> None:
        entries = _entries(state)
        self.keys, first = list(state), next(iter(entries), {})
        self.kept = sum(map(bool, state.values()))  # parameters with states
        self.pick: Callable[[Any], Any] | None = None
        if len(first) > 1 and _STRINGS.issuperset(map(type, first)) and all(e.keys() == first.keys() for e in entries):
            self.pick, self.size = operator.itemgetter(*first), len(first) * len(self.keys)
            self.names, self.values = list(first), [*chain.from_iterable(map(self.pick, entries))]
        else:
            self.names, self.values = _listed(entries)

    def still(self, state: Mapping[Any, Any]) -> bool:
        """Whether a state has the same, and no more."""
        if len(state) != len(self.keys) or not still(state, self.keys):
            return False
        entries = _entries(state)
        if self.pick is None:
            names, values = _listed(entries)
            return same(names, self.names) and same(values, self.values)
        try:
            return sum(map(len, entries)) == self.size and still(
                chain.from_iterable(map(self.pick, entries)), self.values
            )
        except KeyError:
            return False


def _listed(entries: Iterable[Mapping[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Names, and the lengths of entries among them; values."""
    names = [*chain.from_iterable(entries), *map(len, entries)]
    return names, [*chain.from_iterable(map(_VALUES, entries))]


def _entries(state: Mapping[Any, Any]) -> Iterable[Mapping[Any, Any]]:
    """What a state has of each parameter; also what an optimizer keeps there that belongs to none."""
    entries = state.values()
    return (
        entries if _DICTS.issuperset(map(type, entries)) else [e if isinstance(e, dict) else {"": e} for e in entries]
    )


class GroupLists:
    """What PyTorch's optimizers list of each group (``_init_group``): parameters with gradients, these, their states.

    Of the same objects the lists are the same but for the gradients, which are new at each step.
    """

    def __init__(self) -> None:
        self.ready = False  # all is known: nobody asks a parameter for its gradient
        self.key: list[Any] = []
        self.known: dict[int, tuple[list[list[Any]], int, Any]] = {}  # of a group; which are gradients; what it returns

    def forget(self) -> None:
        """Parameters or states are others now."""
        self.known, self.ready = {}, False

    def taker(
        self, made: Any, params: Sequence[Tensor], grads: Sequence[Tensor | None], dense: bool
    ) -> Callable[..., Any]:
        """What a step calls in the place of ``_init_group``.

        Args:
            made: what that is called of, whose parameters and states are what they were since :meth:`forget`.
            params, grads: all of its groups, in order.
            dense: all gradients are there, and dense.
        """
        groups, own = made.param_groups, type(made)._init_group
        # Of an option it matters which it is; of a number, which a scheduler may change each time, its sign alone.
        key = [
            v if v.__class__ is not float else (v > 0) - (v < 0) for g in groups for k, v in g.items() if k != "params"
        ]
        key.append(own)
        if not same(key, self.key):
            self.key, self.known = key, {}
        place = {id(g): i for i, g in enumerate(groups)}
        rest = iter(grads)
        of = [list(islice(rest, len(g["params"]))) for g in groups]
        self.ready = dense and len(self.known) == len(groups)

        def known(group: dict[str, Any], *lists: list[Any]) -> Any:
            i = place[id(group)]
            filled, at, answer = self.known[i]
            for a, b in zip(lists, filled, strict=True):
                a.extend(b)
            lists[at].extend(of[i])
            return answer

        def noted(group: dict[str, Any], *lists: list[Any]) -> Any:
            begun = any(lists)
            answer = own(made, group, *lists)
            i = place[id(group)]
            at = next((n for n, a in enumerate(lists) if same(a, of[i])), -1)
            filled = [[] if n == at else a.copy() for n, a in enumerate(lists)]
            fit = {id(None), *map(id, params), *map(id, chain.from_iterable(map(_VALUES, made.state.values())))}
            if at >= 0 and not begun and fit.issuperset(map(id, chain(*filled))):
                self.known[i] = filled, at, answer
            return answer

        return known if self.ready else noted if dense else partial(own, made)


__all__ = ["GroupLists", "StateContents", "mapped", "same", "still"]
