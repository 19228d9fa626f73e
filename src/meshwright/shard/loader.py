"""Sharding of data loaders: batches become DistTensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType
from typing import Any

import torch

from .. import collective, runtime
from ..api import MESH_WANTED, from_local, shard_tensor
from ..errors import DesyncError, LayoutError, ShardError, takes
from ..layout import Layout, Partial, Placements, Replicate, Shard
from ..mesh import Mesh
from ..tensor import DistTensor

Tensor = torch.Tensor


class ShardedLoader:
    """Iterates over another loader and yields its batches with every tensor laid on the mesh.

    What the loader has otherwise (``dataset``, ``sampler``, ``state_dict``...) is the wrapped loader's.
    """

    def __init__(self, loader: Iterable[Any], mesh: Mesh, placements: Any, local: bool) -> None:
        self.loader, self.mesh, self.placements, self.local = loader, mesh, placements, local
        self._by_key = isinstance(placements, Mapping) and bool(placements) and not _is_placements(placements, mesh)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, or its sampler, which epoch begins."""
        for target in (
            self.loader,
            getattr(self.loader, "sampler", None),
            getattr(self.loader, "batch_sampler", None),
        ):
            tell = getattr(target, "set_epoch", None)
            if tell is not None:
                tell(epoch)

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for batch in self.loader:
            if not count:
                self._check_keys(batch)
            if self.mesh.size > 1 and (not count or runtime.RT.check):
                self._check(batch, count)
            count += 1
            yield self._sharded(batch, self.placements if not self._by_key else None, (), self._laid)
        if self.mesh.size > 1 and (not count or runtime.RT.check):
            self._check(None, count)

    # -- one batch ------------------------------------------------------------------------------------

    def _sharded(self, value: Any, placements: Any, path: tuple[Any, ...], leaf: Callable[..., Any]) -> Any:
        """The batch with ``leaf(tensor, placements, path)`` in place of each tensor."""
        if isinstance(value, Tensor):
            return leaf(value, placements, path)
        if isinstance(value, Mapping):
            made = {k: self._sharded(v, self._for(k, placements), (*path, k), leaf) for k, v in value.items()}
            return made if type(value) is dict else _like(value, made)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._sharded(v, placements, (*path, i), leaf) for i, v in enumerate(value)))
        if isinstance(value, (tuple, list)):
            return type(value)(self._sharded(v, placements, (*path, i), leaf) for i, v in enumerate(value))
        return value

    def _for(self, key: Any, placements: Any) -> Any:
        return self.placements.get(key) if self._by_key and placements is None else placements

    def _laid(self, t: Tensor, placements: Any, path: tuple[Any, ...]) -> Tensor:
        if placements is None or isinstance(t, DistTensor):
            return t
        t = t.to(self.mesh.device)
        if not t.dim():  # one number for the whole batch
            return shard_tensor(t, self.mesh, (), check=False)
        try:
            if self.local:
                return self._from_local(t, placements)
            return shard_tensor(t, self.mesh, placements, check=False)
        except LayoutError as error:
            where = "".join(f"[{k!r}]" for k in path)
            raise ShardError(f"batch{where}, of shape {tuple(t.shape)}: {error}") from error

    def _from_local(self, t: Tensor, placements: Placements) -> Tensor:
        """Parts of any length: lengths are exchanged, and parts that are not torch.chunk's rearranged."""
        layout = Layout(self.mesh, placements, ndim=t.dim())
        split = layout.dim_axes()
        if not split:
            return from_local(t, self.mesh, layout, check=False)
        (dim, axes), *more = split.items()
        if more:
            return from_local(t, self.mesh, layout)
        group = collective.group(self.mesh, tuple(sorted(axes)))
        sizes = collective.all_gather_object(t.shape[dim], group)
        shape = list(t.shape)
        shape[dim] = sum(sizes)
        here = layout.local_shape(shape, self.mesh.coordinate(runtime.RT.rank))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        step = -(-shape[dim] // len(sizes))
        if all(start == min(i * step, shape[dim]) for i, start in enumerate(starts)) and here[dim] == t.shape[dim]:
            return from_local(t, self.mesh, layout, shape=shape, check=False)
        return shard_tensor(collective.all_gather(t, dim, sizes, group), self.mesh, layout, check=False)

    def _check_keys(self, batch: Any) -> None:
        """Names that are neither axes nor keys of the batch would lay nothing, without a word."""
        if not self._by_key:
            return
        keys = set(_keys(batch))
        unknown = [k for k in self.placements if k not in keys]
        if unknown:
            has = f"has the keys {', '.join(map(repr, sorted(keys, key=str)))}" if keys else "has no keys"
            raise ShardError(
                f"shard_dataloader: {unknown[0]!r} is no axis of {self.mesh!r}, and the batch {has}: placements are "
                f'{{"{self.mesh.axes[0]}": mw.Shard(0)}} for all tensors, or key to placements'
            )

    def _check(self, batch: Any, count: int) -> None:
        """Ranks must have batches of the same form, and the same values where they have the same part.

        Once per pass over the data, and in check mode for each batch; ``batch`` is None where the data ended.
        """
        form, tensors, parts = [], [], []

        def note(t: Tensor, placements: Any, path: tuple[Any, ...]) -> Tensor:
            if not isinstance(t, DistTensor):
                form.append((path, tuple(t.shape[1:] if self.local else t.shape), str(t.dtype)))
                tensors.append(t)
                parts.append(self._part(t, placements))
            return t

        self._sharded(batch, self.placements if not self._by_key else None, (), note)
        length = None
        with contextlib.suppress(TypeError, NotImplementedError, AttributeError):  # a DataLoader may not know it
            length = len(self)
        own = (form if batch is not None else "no more batch", length, parts, collective.digests(tensors))
        group = collective.group(self.mesh, tuple(range(self.mesh.ndim)))
        seen = collective.all_gather_object(own, group)
        what = self._difference(seen)
        if what:
            fix = (
                "each rank must bring its own part of the same batch"
                if self.local
                else "each rank must load the same global batch: use the same seed in the sampler, or local=True if "
                "each rank loads its own part (DistributedSampler)"
            )
            raise DesyncError(f"shard_dataloader: the ranks loaded different batches (batch {count}: {what}); {fix}")

    def _part(self, t: Tensor, placements: Any) -> tuple[int, ...]:
        """Which part of the batch this rank brings: the same on ranks that must bring the same values."""
        if not self.local or placements is None or not t.dim():
            return ()
        try:
            layout = Layout(self.mesh, placements, ndim=t.dim())
        except LayoutError:  # said where the batch is laid out
            return (runtime.RT.rank,)
        here = self.mesh.coordinate(runtime.RT.rank)
        return tuple(-1 if isinstance(p, Replicate) else i for p, i in zip(layout.placements, here, strict=True))

    def _difference(self, seen: list[Any]) -> str:
        for index in (0, 1):
            if any(s[index] != seen[0][index] for s in seen):
                texts = [s[0] if not index else f"{s[1]} batches in all" for s in seen]
                return "; ".join(f"rank {r}: {text}" for r, text in zip(self.mesh.ranks, texts, strict=True))
        first: dict[Any, tuple[int, int]] = {}
        for rank, (form, _, parts, marks) in zip(self.mesh.ranks, seen, strict=True):
            for i, (part, mark) in enumerate(zip(parts, marks, strict=True)):
                other, known = first.setdefault((i, part), (rank, mark))
                if known != mark:
                    where = "".join(f"[{k!r}]" for k in form[i][0]) or "the tensor"
                    return f"values of {where}, digest {known:x} on rank {other}, {mark:x} on rank {rank}"
        return ""


def _keys(batch: Any) -> Iterator[Any]:
    """The keys of a batch, nested ones too."""
    if isinstance(batch, Mapping):
        yield from batch
    if isinstance(batch, (Mapping, tuple, list)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _keys(value)


def _is_placements(given: Mapping[Any, Any], mesh: Mesh) -> bool:
    return all(k in mesh.axes for k in given)


def _like(value: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    try:
        return type(value)(made)  # type: ignore[call-arg]
    except TypeError:
        return made


@takes(
    ShardError,
    mesh=MESH_WANTED,
    placements=(
        (Mapping, list, tuple, Layout, Shard, Replicate, Partial, NoneType),
        'give axis to placement, e.g. {"dp": mw.Shard(0)}, or key of the batch to such placements',
    ),
)
def shard_dataloader(
    loader: Iterable[Any], mesh: Mesh, placements: Any = None, *, local: bool = False
) -> ShardedLoader:
    """Wrap a data loader so that its batches come as DistTensors.

    Args:
        loader: anything to iterate over that yields tensors, or tuples, lists and dicts of them.  Every
            rank's loader yields the same global batch, of which the rank keeps its part; uneven last batches
            are fine.
        mesh: the mesh.
        placements: for all tensors, e.g. ``{"dp": mw.Shard(0)}``; or, for batches that are dicts, key to
            placements (tensors of keys that are not named stay plain).  0-d tensors are replicated.
        local: each rank's loader yields only the rank's own part (``DistributedSampler``).

    Raises:
        ShardError: (while iterating) a tensor that cannot be laid out so.
        DesyncError: (while iterating) ranks that load batches of different shapes or numbers, or different values
            of the same part: compared for the first batch of each pass, in check mode for all.
    """
    if placements is None:
        placements = {mesh.axes[0]: Shard(0)}
    if not hasattr(loader, "__iter__"):
        raise ShardError(f"shard_dataloader takes a data loader or another iterable, not {type(loader).__name__}")
    return ShardedLoader(loader, mesh, placements, local)


__all__ = ["ShardedLoader", "shard_dataloader"]
