"""What an op does to layouts, in factor notation.

A rule function has the signature of its op.  It gets an :class:`Arg` in place of each tensor and returns what
:func:`notation` makes of one line such as ``"... k, n k, n -> ... n"``.  A *factor* names an index of the op, as in
einops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..errors import RuleError, near
from ..layout import Spec
from .strategies import Dims, Local, LocalFn, Native, Rule, Strategy


@dataclass(frozen=True, slots=True)
class Arg:
    """Stands for a tensor argument inside a rule function: global shape and dtype, never values."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec | None = field(default=None, compare=False)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def dim(self, d: int) -> int:
        """``d`` made non-negative (0 for a scalar's 0 or -1, as PyTorch has it)."""
        return d % max(self.ndim, 1)

    @property
    def letters(self) -> list[str]:
        """One fresh factor per dim, ``1`` for dims of size 1: the names that generic rules start from."""
        return ["1" if n == 1 else f"d{i}" for i, n in enumerate(self.shape)]


def args_in(value: Any) -> Iterator[Arg]:
    """All tensors among (nested) arguments of a rule, in order."""
    if isinstance(value, Arg):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from args_in(v)
    elif isinstance(value, dict):
        yield from args_in(list(value.values()))


# ---------------------------------------------------------------------------------------------- notation

Letters = str | Sequence[str | Sequence[str]]  # of one tensor: a text, or a factor (or several, or "1", "...") per dim
Entry = tuple[Any, ...]  # the same, read: per dim its factors, or an ellipsis


def notation(
    line: str | Mapping[Any, Letters],
    *given: Any,
    sizes: Mapping[str, int] | None = None,
    whole: str | Iterable[str] = "",
    reduced: str | Iterable[str] | Mapping[str, str] = "",
    op: str = "sum",
    linear: Sequence[Any] = (),
    moves: bool = False,
    heavy: bool = False,
    padded: bool = False,
    lends: Sequence[Arg] = (),
    local: Callable[[Local], LocalFn | None] | None = None,
    decompose: Callable[..., Any] | None = None,
    joint: Sequence[tuple[int, Strategy]] = (),
    crossing: Mapping[str, int] | None = None,
    joined: Mapping[str, Sequence[tuple[str, int]]] | None = None,
    blockwise: bool = False,
) -> Rule:
    """A rule from one line of factor notation.

    Args:
        line: ``"inputs -> outputs"``; tensors are separated by commas, dims by spaces; ``(h d)`` is a dim made of two
            factors, ``h`` major; ``1`` is a dim of size one; ``...`` any leading dims, the same for all (inputs with
            fewer of them, or of size 1, broadcast).  Or the letters of each input: a mapping from the tensors.
        given: with a text, the tensors in its order; a ``None`` drops its entry, a sequence takes as many entries.
            With a mapping, the letters of each output.
        sizes: sizes of factors that no plain dim gives.
        whole: factors that must not be split, separated by spaces or listed.
        reduced: factors that may be split leaving the outputs Partial by ``op``, or a mapping to the reductions.  A
            factor that is in no output and not listed here is whole.
        op: how the factors in ``reduced`` are reduced.
        linear: groups of tensors in which the op is jointly linear (those of masks only do not count: a bool is never
            a part of a sum).
        moves: the op only moves elements: Partial of any reduction passes.
        heavy: the op contracts: computing it whole on every rank costs more than bytes tell.
        padded: the op refuses parts without elements: a rank that has one runs it on one element more.
        lends: tensors that only lend their shape: they hint at splits and stay as they are.
        local: called once per plan with a :class:`Local`; returns the function to run on locals instead of the op.
        decompose: called with the op's own arguments when a whole factor is split: the op as a composition.
        joint: axes of the mesh, each with a strategy that it may take beside those of its factors, for which ``local``
            sends what is needed: to be given where that is less than what the others would send.
        crossing: factors that may be split though values cross the borders of parts, which ``local`` then brings; to
            each, its size in the outputs, which may be another one.
        joined: whole factor to the whole factors, with their sizes, of which it is a sequence (``""``: of what is
            dropped): where each of these is split, it is split by blocks.
        blockwise: ``local`` serves dims that are split by blocks, too.

    Raises:
        RuleError: the line does not fit the tensors.
    """
    text, entries, made = _read(line, given)
    found = dict(sizes or {})
    inputs, outputs = _factors(entries, made, found, text)
    in_outputs = _names(outputs)
    named = _names(inputs) | in_outputs
    if missing := sorted(named - set(found)):
        raise RuleError(f"notation {text!r}: give the size of {', '.join(missing)}")
    reductions = dict(reduced) if isinstance(reduced, Mapping) else dict.fromkeys(_words(reduced), op)
    reductions = {f: op for f, op in reductions.items() if f in named}
    whole = (named & set(_words(whole))) | (named - in_outputs - set(reductions))
    groups = [list(args_in(group)) for group in linear]
    told = [g for g in groups if g and (moves or any(t.dtype != torch.bool for t in g))]
    return Rule(
        inputs, outputs, {f: found[f] for f in sorted(named)}, frozenset(whole), reductions,
        tuple(frozenset(t.index for t in g) for g in told), moves, heavy, padded, frozenset(t.index for t in lends),
        local, decompose, text, tuple(joint), dict(crossing or {}),
        {f: tuple(parts) for f, parts in (joined or {}).items()}, blockwise,
    )  # fmt: skip


def _names(tensors: Sequence[Dims]) -> set[str]:
    return {f for dims in tensors for dim in dims for f in dim}


def _factors(
    entries: list[tuple[Arg, Entry]], made: Sequence[Entry], found: dict[str, int], text: str
) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """The factors of inputs and outputs, ellipses written out; sizes go to ``found``."""
    if not found:
        ones = tuple([(t.index, dims, tuple([n == 1 for n in t.shape])) for t, dims in entries])
        plain = _plain_factors(ones, tuple(made))
        if plain is not None and _sized(plain[2], [t.shape for t, _ in entries], found):
            return plain[:2]
    lead = _lead_sizes(entries, text)
    inputs = {t.index: _bound(dims, t, len(lead), found, text) for t, dims in entries}
    found.update((f"~{i}", n) for i, n in enumerate(lead) if n != 1)
    if sorted(inputs) != list(range(len(inputs))):
        raise RuleError(f"notation {text!r} does not cover every tensor argument")
    return tuple(inputs[i] for i in range(len(inputs))), tuple(_with_lead(dims, lead) for dims in made)


Places = tuple[tuple[str, tuple[tuple[int, int], ...]], ...]  # of each factor: entries, and dims of these, that are it


@lru_cache(maxsize=8192)
def _plain_factors(
    entries: tuple[tuple[int, Entry, tuple[bool, ...]], ...], made: tuple[Entry, ...]
) -> tuple[tuple[Dims, ...], tuple[Dims, ...], Places] | None:
    """Factors of inputs and outputs of these dims, whatever their sizes are but for those that are one; None where that
    is not all: a dim is made of several factors, or something is wrong."""
    spelled: list[list[Any]] = []
    widths = [len(ones) - len([d for d in dims if d is not ...]) for _, dims, ones in entries]
    width = max([w for w, (_, dims, _) in zip(widths, entries, strict=True) if ... in dims], default=0)
    lead = [1] * width
    for n, (_, dims, ones) in zip(widths, entries, strict=True):
        if n < 0 or (n and ... not in dims) or sorted(i for i, _, _ in entries) != list(range(len(entries))):
            return None
        spelled.append([x for dim in dims for x in (range(width - n, width) if dim is ... else (dim,))])
        for dim, one in zip(spelled[-1], ones, strict=True):
            if isinstance(dim, int):
                lead[dim] = lead[dim] if one else 2
            elif len(dim) > 1 or (not dim and not one):
                return None
    places: dict[str, list[tuple[int, int]]] = {}
    inputs: dict[int, Dims] = {}
    for e, (t, _, ones) in enumerate(entries):
        written = [(() if one else (f"~{dim}",)) if isinstance(dim, int) else dim
                   for dim, one in zip(spelled[e], ones, strict=True)]  # fmt: skip
        for d, dim in enumerate(written):
            for f in dim:
                places.setdefault(f, []).append((e, d))
        inputs[t] = tuple(written)
    outputs = tuple(_with_lead(dims, lead) for dims in made)
    return tuple(inputs[i] for i in range(len(inputs))), outputs, tuple((f, tuple(at)) for f, at in places.items())


def _sized(places: Places, shapes: Sequence[tuple[int, ...]], found: dict[str, int]) -> bool:
    """Note the sizes of factors; whether each is the same everywhere."""
    for f, at in places:
        sizes = {shapes[e][d] for e, d in at}
        if len(sizes) > 1:
            found.clear()
            return False
        found[f] = sizes.pop()
    return True


def _words(listed: str | Iterable[str]) -> Iterable[str]:
    return listed.split() if isinstance(listed, str) else listed


def _read(
    line: str | Mapping[Any, Letters], given: tuple[Any, ...]
) -> tuple[str, list[tuple[Arg, Entry]], Sequence[Entry]]:
    """The line as text, the inputs with their dims, and the dims of the outputs."""
    if isinstance(line, str):
        ins, outs = _parse(line)
        ins = ins if given or ins != ((),) else ()
        if len(ins) != len(given):
            raise RuleError(f"notation {line!r} names {len(ins)} inputs, the rule gave {len(given)}")
        return line, [(t, dims) for dims, g in zip(ins, given, strict=True) for t in args_in(g)], outs
    tensors = [(t, letters) for t, letters in line.items() if t is not None]
    text, entries, made = _entries(_frozen([letters for _, letters in tensors]), _frozen(given))
    return text, [(t, entry) for (t, _), entry in zip(tensors, entries, strict=True)], made


def _frozen(tensors: Sequence[Letters]) -> tuple[Letters, ...]:
    def dims(letters: Letters) -> Letters:
        return letters if isinstance(letters, str) else tuple([d if isinstance(d, str) else tuple(d) for d in letters])

    return tuple(map(dims, tensors))


@lru_cache(maxsize=8192)
def _entries(ins: tuple[Letters, ...], outs: tuple[Letters, ...]) -> tuple[str, list[Entry], list[Entry]]:
    """The letters of inputs and outputs: as a text, and read."""
    read, made = ([_entry(letters) for letters in side] for side in (ins, outs))
    return f"{', '.join(map(_shown, read))} -> {', '.join(map(_shown, made))}", read, made


def _entry(letters: Letters) -> Entry:
    if isinstance(letters, str):
        return _parse_tensor(letters, letters)
    return tuple(
        ... if dim == "..." else tuple(f for f in ([dim] if isinstance(dim, str) else dim) if f != "1")
        for dim in letters
    )


def _shown(dims: Entry) -> str:
    return " ".join(
        "..." if dim is ... else f"({' '.join(dim)})" if len(dim) > 1 else dim[0] if dim else "1" for dim in dims
    )


@lru_cache(maxsize=8192)
def _parse(text: str) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """``"a (b c), d -> a"`` as nested tuples: tensors, dims, factors."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"notation {text!r} has no '->'")
    ins, outs = (tuple(_parse_tensor(part, text) for part in side.split(",")) for side in (left, right))
    return ins, outs


@lru_cache(maxsize=8192)
def _parse_tensor(part: str, text: str) -> Entry:
    dims: list[Any] = []
    inside: list[str] | None = None
    for token in part.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(" and inside is None:
            inside = []
        elif token == ")" and inside is not None:
            dims.append(tuple(f for f in inside if f != "1"))
            inside = None
        elif inside is not None:
            inside.append(token)
        else:
            dims.append(... if token == "..." else () if token == "1" else (token,))
    if inside is not None:
        raise RuleError(f"notation {text!r}: a bracket is not closed")
    return tuple(dims)


def _hidden(dims: Entry, t: Arg, text: str) -> int:
    """How many dims of a tensor its ellipsis stands for."""
    plain = len([d for d in dims if d is not ...])
    if ... in dims:
        if t.ndim < plain:
            raise RuleError(f"notation {text!r}: a tensor of shape {t.shape} has too few dims")
        return t.ndim - plain
    if t.ndim != plain:
        raise RuleError(f"notation {text!r}: a tensor of shape {t.shape} has {t.ndim} dims, {plain} were named")
    return 0


def _lead_sizes(entries: Sequence[tuple[Arg, Entry]], text: str) -> list[int]:
    """The sizes that the ellipses have in common."""
    hidden = [t.shape[(at := dims.index(...)) : at + _hidden(dims, t, text)] if ... in dims else ()
              for t, dims in entries]  # fmt: skip
    lead = [1] * max(map(len, hidden), default=0)
    for shape in hidden:
        for j, size in enumerate(shape, len(lead) - len(shape)):
            if size != 1 and lead[j] not in (1, size):
                raise RuleError(f"notation {text!r}: leading dims {lead[j]} and {size} do not broadcast")
            lead[j] = size if size != 1 else lead[j]
    return lead


def _with_lead(dims: Entry, lead: list[int]) -> Dims:
    written = tuple((f"~{i}",) if n != 1 else () for i, n in enumerate(lead))
    return tuple(x for dim in dims for x in (written if dim is ... else (dim,)))


def _bound(dims: Entry, t: Arg, width: int, found: dict[str, int], text: str) -> Dims:
    """The dims of a tensor without the ellipsis; sizes of their factors go to ``found``."""
    n = _hidden(dims, t, text)
    spelled = [x for dim in dims for x in (range(width - n, width) if dim is ... else (dim,))]
    made: list[tuple[str, ...]] = []
    for dim, size in zip(spelled, t.shape, strict=True):
        if isinstance(dim, int):
            made.append(() if size == 1 else (f"~{dim}",))
            continue
        made.append(dim)
        if len(dim) == 1 and found.setdefault(dim[0], size) == size:
            continue
        unknown = [f for f in dim if f not in found]
        known = math.prod(found[f] for f in dim if f in found)
        if len(unknown) == 1:
            if known and size % known:
                raise RuleError(f"notation {text!r}: {size} is not a multiple of {known} in {' '.join(dim)}")
            found[unknown[0]] = size // known if known else 0
        elif unknown:
            raise RuleError(f"notation {text!r}: give the size of {' or '.join(unknown)}")
        elif known != size:
            raise RuleError(f"notation {text!r}: {' '.join(dim) or '1'} is {known} in one place and {size} in another")
    return tuple(made)


# ---------------------------------------------------------------------------------------------- registry

RuleFn = Callable[..., Rule | None]
RULES: dict[str, RuleFn] = {}
COMPOSITES: dict[str, Callable[..., Any]] = {}


def rule(*names: str) -> Callable[[RuleFn], RuleFn]:
    """Register a rule function for ops, by ATen name before autograd (``"linear"``) or ``"lib::op"``.

    The function has the op's signature, with an :class:`Arg` for each tensor, and returns what
    :func:`notation` made, or None where it has no rule for these arguments (they are then gathered).

    Raises:
        RuleError: a name that has a rule already.
    """

    def register(fn: RuleFn) -> RuleFn:
        for name in names:
            if name in RULES:
                raise RuleError(f"{name!r} has a rule already; remove it first with meshwright.rules.RULES.pop(...)")
            RULES[name] = fn
        return fn

    return register


def lines(table: Mapping[str, RuleFn]) -> None:
    """Register rules of one line: names of ops, separated by spaces, to the function."""
    for names, fn in table.items():
        rule(*names.split())(fn)


class RequestedStrategy(NamedTuple):
    """What is asked of an op along an axis: ``"gather"``, ``"gather:max_bytes=1000000"``, ``":max_bytes=1000000"``."""

    name: str
    max_bytes: int | None = None

    @classmethod
    def of(cls, text: str) -> RequestedStrategy:
        """Raises RuleError for what is none."""
        name, colon, rest = text.partition(":")
        key, _, number = rest.partition("=")
        if not colon:
            return cls(name)
        try:
            most = int(number)
        except ValueError:
            most = 0
        if key != "max_bytes" or most < 1:
            raise RuleError(f"strategies: {text!r} sets no bound of bytes: give {name}:max_bytes=1000000, say")
        return cls(name, most)


IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {}  # of ops that can be computed in several ways, the names of these
APPLIES_TO: dict[str, str] = {}  # of these, what an axis must split for there to be a choice
ACCEPTS_MAX_BYTES: set[str] = set()  # of these, the ones that take a bound of memory


def checked_strategies(requested_strategy: Mapping[str, Mapping[str, str]], axes: Iterable[str] | None = None) -> None:
    """Raises RuleError for a strategy that does not exist, naming what there is."""
    for op, by_axis in requested_strategy.items():
        if op not in IMPLEMENTATIONS:
            raise RuleError(f"strategies: {op!r} is computed in one way{near(op, IMPLEMENTATIONS)}")
        if not isinstance(by_axis, Mapping):
            raise RuleError(f'strategies: give axes and names for {op!r}: {{"cp": {IMPLEMENTATIONS[op][0]!r}}}')
        for axis, text in by_axis.items():
            if axes is not None and axis not in axes:
                raise RuleError(f"strategies: the mesh has no axis {axis!r}{near(axis, axes)}")
            name, most = RequestedStrategy.of(text)
            if name not in IMPLEMENTATIONS[op] and (name or most is None):
                raise RuleError(f"strategies: {op!r} has no strategy {name!r}{near(name, IMPLEMENTATIONS[op])}")
            if most is not None and op not in ACCEPTS_MAX_BYTES:
                raise RuleError(f"strategies: {op!r} takes no max_bytes: leave it out of {text!r}")


def composite(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an op that is always computed as a composition of others, on distributed tensors."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            COMPOSITES[name] = fn
        return fn

    return register


__all__ = [
    "ACCEPTS_MAX_BYTES",
    "APPLIES_TO",
    "COMPOSITES",
    "IMPLEMENTATIONS",
    "RULES",
    "Arg",
    "Letters",
    "Local",
    "LocalFn",
    "Native",
    "RequestedStrategy",
    "Rule",
    "RuleFn",
    "args_in",
    "checked_strategies",
    "composite",
    "lines",
    "notation",
    "rule",
]  # fmt: skip
