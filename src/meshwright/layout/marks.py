"""Marks: what calls on one tensor must know beside its description, in one value with that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from .spec import Spec


@dataclass(frozen=True, slots=True)
class Marks:
    """What is so of one tensor and not of others of its spec.

    ``copied``: it is the result of a view that had to be a copy: writing to it would not reach its base (``View``).
    ``known``: of a Partial that was reduced: its value is at hand in that spec too.
    ``stored``: a parameter for which another tensor may stand in (see ``tensor.substitutes``).
    """

    copied: bool = False
    known: Spec | None = None
    stored: bool = False

    def after_write(self) -> Marks:
        """The marks of the same tensor with other values: what was known of them is no more."""
        return self if self.known is None else replace(self, known=None)


NO_MARKS = Marks()


class MarkedSpec(Spec):
    """A spec with the marks of the tensor that carries it.  Interned, as specs are.

    A tensor carries one value, its Spec or this: calls find their plan by that value alone.  What is derived of it
    (``with_``, ``grad`` and the others) is a plain Spec: :func:`marked` says which marks another one has.
    """

    __slots__ = ("marks", "plain")

    marks: Marks
    plain: Spec

    _marked: ClassVar[WeakValueDictionary[tuple[Spec, Marks], MarkedSpec]] = WeakValueDictionary()

    def __new__(cls, plain: Spec, marks: Marks) -> MarkedSpec:
        found = cls._marked.get((plain, marks))
        if found is None:
            found = object.__new__(cls)
            for name in Spec.__slots__[1:]:  # all but __weakref__
                setattr(found, name, getattr(plain, name))
            found.plain, found.marks = plain, marks
            cls._marked[plain, marks] = found
        return found

    def decided(self) -> Spec:
        """See Spec."""
        return self.plain.decided()

    def invariant(self) -> Spec:
        """See Spec."""
        return self.plain.invariant()

    def __reduce__(self) -> tuple[Any, ...]:
        return MarkedSpec, (self.plain, self.marks)


def marks_of(spec: Spec) -> Marks:
    """The marks of the tensor that carries a spec."""
    return spec.marks if type(spec) is MarkedSpec else NO_MARKS


def marked(spec: Spec, marks: Marks) -> Spec:
    """What a tensor of this spec carries that has these marks, and no others."""
    plain = spec.plain if type(spec) is MarkedSpec else spec
    return MarkedSpec(plain, marks) if marks.copied or marks.stored or marks.known is not None else plain
