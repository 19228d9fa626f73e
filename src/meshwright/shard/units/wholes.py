"""A parameter as ops see it: memory of its own, and the version of what is stored that this was made of."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from ...dispatch import disabled
from ...errors import ShardError
from ...local_tensor import bare
from ...tensor import OPEN, DistTensor
from ..parameters.packing import own_part
from ..parameters.precision import put
from ..parameters.stored import gather_wire, seen_spec
from ..parameters.versions import state_of

Tensor = torch.Tensor
_VIEWED = "a view of a leaf Variable that requires grad is being used in an in-place operation."


class Shows(Protocol):
    """What has stand-ins that look at wholes."""

    def recorded(self, whole: UnshardedParam) -> bool:
        """Whether gradients are recorded of what was written to a stand-in of this."""
        ...


class UnshardedParam:
    """What ops of this thread see of a parameter, whoever of the forwards that are under way they belong to.

    What is stored may be written to, and so may this: where the one is ahead the other is made anew from it.  So all
    who look at the memory, views included, see what was written last, and what was written is stored.

    Attributes:
        seen: a plain tensor.
        state: of the parameter, when they were alike; ``version``: of ``seen`` then.
        shown: who has stand-ins of it.
    """

    def __init__(self, p: DistTensor, seen: Tensor, state: Any) -> None:
        self.p, self.seen, self.state, self.version = p, seen, state, seen._version
        self.shown: weakref.WeakSet[Shows] = weakref.WeakSet()

    @property
    def written(self) -> bool:
        """Whether it is ahead of what is stored."""
        return self.seen._version != self.version

    def keep(self) -> None:
        """Bring to the parameter what was written to this: through a view, by a lookup that scales the rows that it
        reads.  Each rank has the whole, so nothing is sent.

        Raises:
            RuntimeError: the write is part of what gradients are recorded of, as on one device.
            ShardError: the parameter was written to by itself in between.
        """
        if not self.written:
            return
        p, part, name = self.p, self.seen, self.p.__dict__.get("_param_name", "a parameter")
        if state_of(p) != self.state:
            raise ShardError(
                f"{name} is not computed with as it is stored (split, cast, or elsewhere), and in one forward was "
                "written to both through a view of it and through its detach() or data: say one of them"
            )
        if any(s.recorded(self) for s in self.shown):
            raise RuntimeError(f"{_VIEWED} ({name})")
        with torch.no_grad(), disabled():
            own = bare(p)
            part = own_part(part, seen_spec(p), p._spec)
            put(own, part.to(own.device), gather_wire(p))
        self.state, self.version = state_of(p), self.seen._version

    def refresh_from_shard(self, made: Tensor, state: Any, *, uncounted: bool) -> None:
        """This is how the parameter looks in its present state.

        It is brought to the memory that there is, which others may look at.  ``uncounted``: in the state that it had,
        too, as writes may have gone unseen: no version tells of this one either.
        """
        with torch.no_grad():
            if state != self.state:
                self.seen.copy_(made)
                self.state, self.version = state, self.seen._version
            elif uncounted:
                self.seen.data.copy_(made)


def under_way() -> dict[int, UnshardedParam]:
    """By their ids, the parameters that forwards of this thread see, as the innermost does."""
    found: dict[int, UnshardedParam] = {}
    for scope in OPEN.scopes:
        for seen in (*scope.lent.values(), scope):
            found |= {id(w.p): w for w in seen.wholes}
    return found


__all__ = ["UnshardedParam", "under_way"]
