"""The libraries that are compared, behind one interface."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .traffic import Traffic, as_exchange

# A placement of one tensor on one mesh axis: "R" (a copy everywhere), "P" (parts to be summed), or the dim to split.
Place = str | int

# Parts of a Partial per rank: they sum to one, and are exact in floating point.
PARTS = (0.5, 0.25, 0.125, 0.125)


class Contender(Protocol):
    """A library for distributed tensors."""

    name: str

    def mesh(self, shape: Sequence[int]) -> Any:
        """A mesh over all ranks; the process group is there."""

    def distribute(self, tensor: torch.Tensor, mesh: Any, places: Sequence[Place], grad: bool) -> Any:
        """A leaf from the full tensor, which is the same on all ranks."""

    def full(self, obj: Any) -> torch.Tensor:
        """The global value as a plain tensor, differentiable."""

    def summed(self, obj: Any) -> Any:
        """The same value without Partial; splits stay."""

    def like(self, grad: Any, leaf: Any) -> Any:
        """A gradient in the layout of its leaf, as an optimizer needs it."""

    def owns(self, obj: Any) -> bool:
        """Whether ``obj`` is a distributed tensor of this library."""

    def missing(self, error: BaseException) -> bool:
        """Whether the error says that the library does not have the op at all."""

    def traffic(self) -> contextlib.AbstractContextManager[Callable[[], float]]:
        """Counts the bytes that this rank sends, as rings would; gives a function that tells them."""


class Meshwright:
    """This library."""

    name = "meshwright"

    def mesh(self, shape: Sequence[int]) -> Any:
        import meshwright as mw

        return mw.init_mesh({f"axis{i}": n for i, n in enumerate(shape)})

    def distribute(self, tensor: torch.Tensor, mesh: Any, places: Sequence[Place], grad: bool) -> Any:
        import meshwright as mw

        said = [mw.Replicate() if p == "R" else mw.Partial() if p == "P" else mw.Shard(int(p)) for p in places]
        full = tensor.detach()
        if "P" in places:
            made = mw.from_local(full * PARTS[dist.get_rank()], mesh, said, check=False)
        else:
            made = mw.shard_tensor(full, mesh, said, check=False)
        return made.requires_grad_(grad)

    def full(self, obj: Any) -> torch.Tensor:
        import meshwright as mw

        return mw.unshard(obj)

    def summed(self, obj: Any) -> Any:
        import meshwright as mw

        said = [mw.Replicate() if isinstance(p, mw.Partial) else p for p in obj.placements]
        return obj if tuple(said) == tuple(obj.placements) else mw.reshard(obj, said)

    def like(self, grad: Any, leaf: Any) -> Any:
        import meshwright as mw

        partial = any(isinstance(p, mw.Partial) for p in leaf.placements)
        return grad if partial else mw.reshard(grad, leaf.placements)

    def owns(self, obj: Any) -> bool:
        import meshwright as mw

        return isinstance(obj, mw.DistTensor)

    def missing(self, error: BaseException) -> bool:
        return isinstance(error, NotImplementedError)

    @contextlib.contextmanager
    def traffic(self) -> Iterator[Callable[[], float]]:
        from meshwright.ranks import runtime

        # Its own count: gloo has no reduce-scatter, so that what goes through the process group is an all-reduce.
        counts = runtime.RT.counts
        before = counts.copy()
        yield lambda: float(sum(nbytes for _, nbytes in counts.since(before).table.values()))


class DTensor:
    """``torch.distributed.tensor``."""

    name = "dtensor"

    def mesh(self, shape: Sequence[int]) -> Any:
        placement_types: Any = importlib.import_module("torch.distributed.tensor.placement_types")

        # Without an exchange on the CPU, it gathers all and takes a part: counted as the exchange of other devices.
        exchange = placement_types.shard_dim_alltoall
        if not hasattr(exchange, "__wrapped__"):
            placement_types.shard_dim_alltoall = functools.wraps(exchange)(
                lambda x, gather_dim, shard_dim, mesh, axis: as_exchange(
                    x, mesh.size(axis), exchange, x, gather_dim, shard_dim, mesh, axis
                )
            )
        return dist.device_mesh.init_device_mesh("cpu", tuple(shape))

    def distribute(self, tensor: torch.Tensor, mesh: Any, places: Sequence[Place], grad: bool) -> Any:
        from torch.distributed import tensor as dt

        said = [dt.Replicate() if p == "R" else dt.Partial() if p == "P" else dt.Shard(int(p)) for p in places]
        full = tensor.detach()
        if "P" in places:
            made = dt.DTensor.from_local(full * PARTS[dist.get_rank()], mesh, said, run_check=False).detach()
        else:
            made = dt.distribute_tensor(full, mesh, said, src_data_rank=None).detach()
        return made.requires_grad_(grad)

    def full(self, obj: Any) -> torch.Tensor:
        made: torch.Tensor = obj.full_tensor()
        return made

    def summed(self, obj: Any) -> Any:
        from torch.distributed import tensor as dt

        return obj.redistribute(obj.device_mesh, [dt.Replicate() if p.is_partial() else p for p in obj.placements])

    def like(self, grad: Any, leaf: Any) -> Any:
        if any(p.is_partial() for p in leaf.placements):
            return grad
        return grad.redistribute(leaf.device_mesh, leaf.placements)

    def owns(self, obj: Any) -> bool:
        from torch.distributed.tensor import DTensor as Kind

        return isinstance(obj, Kind)

    def missing(self, error: BaseException) -> bool:
        return isinstance(error, NotImplementedError) or "sharding strategy registered" in str(error)

    @contextlib.contextmanager
    def traffic(self) -> Iterator[Callable[[], float]]:
        with Traffic() as traffic:
            yield lambda: traffic.bytes


CONTENDERS: dict[str, type[Contender]] = {"meshwright": Meshwright, "dtensor": DTensor}

__all__ = ["CONTENDERS", "Contender", "Place"]
