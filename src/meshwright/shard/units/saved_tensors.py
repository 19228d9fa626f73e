"""What autograd saves of gathered parameters: a reference instead of the tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ... import compat
from ...dispatch import disabled
from ...local_tensor import Sharing, bare, storage_of
from ...tensor import DistTensor
from ..parameters.versions import is_held, state_of
from .wholes import UnshardedParam

Tensor = torch.Tensor


class Gathered(Protocol):
    """Parameters that can be gathered again."""

    params: list[DistTensor]
    again: bool  # a reference to one of them was saved

    def gather(self, *, keep: bool = False) -> list[Tensor]:
        """The whole parameters."""
        ...


def may_save_references() -> bool:
    """Not inside a backward (a recomputed forward is used at once), nor below somebody else's hooks (a
    checkpoint)."""
    if compat.current_graph_task_id() != -1:
        return False
    top = compat.top_saved_tensors_default_hooks(True)
    return top is None or isinstance(getattr(top[0], "__self__", None), Saver)


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved tensor that looks at a gathered parameter."""

    unit: Gathered
    index: int
    version: int  # of the parameter, when it was gathered
    dtype: torch.dtype
    cast: bool  # autocast made this of it
    state: Any  # of the parameter then, as far as writes that are not counted may have changed it
    kept: Tensor | None  # None: gather again
    again: bool  # gather all the same: the ranks do it together
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class Saver:
    """Saved-tensor hooks of one forward of a unit.

    Args:
        keep: brings what was written to gathered parameters to the parameters.
        again: gather again for the backward, in place of keeping what was gathered.
    """

    def __init__(self, unit: Gathered, keep: Callable[[], None], *, again: bool) -> None:
        self.unit, self.keep, self.again = unit, keep, again
        self.at: dict[int, tuple[int, torch.dtype, Any]] = {}  # parameter, dtype; its state when it was cast
        self.wholes: Sequence[UnshardedParam] = ()
        self.casts: list[Tensor] = []  # their memory is not given to others

    def note(self, wholes: Sequence[UnshardedParam]) -> None:
        """These were gathered."""
        # By storage and not by address: an empty shard has none, and its rank gathers when the others do all the same.
        of_casts = {s: a for s, a in self.at.items() if any(s == storage_of(c) for c in self.casts)}
        seen = [w.seen for w in wholes]
        self.at = {storage_of(t): (i, t.dtype, None) for i, t in enumerate(seen)}
        self.at |= of_casts
        self.wholes = wholes

    def note_cast(self, index: int, cast: Tensor) -> None:
        """This was made of a gathered parameter by autocast."""
        with disabled():
            local = bare(cast)
        self.at[storage_of(local)] = index, local.dtype, state_of(self.unit.params[index])
        self.casts.append(local)

    def pack(self, t: Tensor) -> Any:
        """A reference, if ``t`` looks at a gathered parameter."""
        with disabled():
            found = self.at.get(storage_of(t))
            if found is None or found[1] is not t.dtype:
                return t
            self.keep()
            i, dtype, cast = self.at[storage_of(t)]
            version, *_ = cast or self.wholes[i].state
            p = self.unit.params[i]
            # What ``.data`` may write to meanwhile is cast as it was, and not again from what it is in the backward.
            written = cast is not None and Sharing.counted and is_held(p)
            state, kept = cast or state_of(p), bare(t) if written or not self.again else None
            self.unit.again |= self.again
            where = Tensor.size(t), t.stride(), t.storage_offset()
            return Saved(self.unit, i, version, dtype, cast is not None, state, kept, self.again, *where)

    def unpack(self, saved: Any) -> Tensor:
        """The tensor again."""
        if isinstance(saved, Saved):
            p = saved.unit.params[saved.index]
            if p._version != saved.version:
                name = p.__dict__.get("_param_name", "a parameter")
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{name} is at version {p._version}; expected version {saved.version} instead"
                )
            same = state_of(p) == saved.state
            if saved.kept is not None and (same or saved.cast) and not saved.again:
                return saved.kept
            if saved.cast and not same and saved.kept is None:  # on one device the cast of before is kept
                raise RuntimeError(
                    f"{p.__dict__.get('_param_name', 'a parameter')} was given to .data or .detach() after autocast"
                    " cast it, and may have been written to: its backward needs what it was; do so behind the backward"
                )
            whole = saved.unit.gather(keep=compat.current_graph_task_id() != -1)[saved.index]
            if saved.kept is not None and saved.cast:
                return saved.kept
            with torch.no_grad():
                whole = whole.to(saved.dtype)
                return whole.as_strided(saved.size, saved.stride, saved.offset)
        given: Tensor = saved
        return given

    def push(self) -> None:
        """From now on autograd saves through these hooks."""
        compat.push_saved_tensors_default_hooks(self.pack, self.unpack)

    def pop(self) -> None:
        """No longer (and not at all, below hooks of others that are still there)."""
        # What autograd saved has this object, which is not to hold on to what was gathered.
        self.at, self.casts, self.wholes, self.keep = {}, [], (), _nothing
        top = compat.top_saved_tensors_default_hooks(True)
        if top is not None and getattr(top[0], "__self__", None) is self:
            compat.pop_saved_tensors_default_hooks()


def _nothing() -> None:
    """Nothing is kept: the forward is over."""


__all__ = ["Saver", "may_save_references"]
