"""Batches on a mesh: tensors of nested batches laid out, padded, and compared between ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ... import collective
from ...collective import Fact, differing, together
from ...errors import DesyncError, LayoutError, ShardError
from ...layout import Layout
from ...mesh import Mesh
from ...tensor import DistTensor
from .padding import Padding, shown
from .reading import like_mapping

Tensor = torch.Tensor
SAID = "shard_dataloader: the ranks loaded different batches (batch {count}): {found}"


class BatchesOnMesh:
    """What loaders have in common: what becomes of one batch.

    Attributes:
        local: whether a rank brings a part of a batch, and not the whole.
    """

    local = True

    def __init__(self, mesh: Mesh, placements: Any, padding: Padding | None) -> None:
        self.mesh, self.placements, self.padding = mesh, placements, padding
        self._by_key = isinstance(placements, Mapping) and bool(placements) and not _is_placements(placements, mesh)
        self._parts: dict[tuple[Any, ...], list[Sequence[int]]] = {}  # shapes of the ranks' parts, by path in the batch

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ShardError for a state that cannot be loaded."""
        raise NotImplementedError

    def _part(self, t: Tensor, placements: Any) -> tuple[int, ...]:
        """Which part of the batch this rank brings: the same on ranks that must bring the same values."""
        raise NotImplementedError

    def _brought(self, layout: Layout) -> Collection[int]:
        """Dims of which a rank brings a part."""
        raise NotImplementedError

    def _fix(self) -> str:
        """What to do where ranks loaded different batches."""
        raise NotImplementedError

    def _order(self) -> str:
        """What determines the batches of a pass, the same on all ranks."""
        raise NotImplementedError

    def _each(self, batch: Any, leaf: Callable[..., Any]) -> Any:
        """The batch with ``leaf(tensor, placements, path)`` in place of each tensor."""
        return self._sharded(batch, self.placements if not self._by_key else None, (), leaf)

    def _digests(self, batch: Any) -> list[int]:
        tensors: list[Tensor] = []
        self._sharded(batch, None, (), lambda t, placements, path: tensors.append(t))
        return collective.digests([t for t in tensors if not isinstance(t, DistTensor)])

    def _padded(self, batch: Any) -> Any:
        """The batch with each tensor up to the next of the sizes; of parts, up to that of the longest part."""
        padding = self.padding
        if padding is None:
            return batch
        tensors: list[tuple[tuple[Any, ...], Tensor]] = []

        def note(t: Tensor, placements: Any, path: tuple[Any, ...]) -> None:
            if padding.applies(t):
                tensors.append((path, t))
                brought = () if placements is None else self._brought(self._layout_of(t, placements))
                if padding.dim % t.ndim in brought:
                    raise ShardError(
                        f"shard_dataloader: each rank loads its part of dim {padding.dim} of batch{shown(path)}: "
                        "padding would come between the parts; pad the whole, with local=False"
                    )

        self._each(batch, note)
        lengths = padding.lengths(tensors)
        if self.local:
            lengths = {path: max(shape[padding.dim] for shape in self._parts[path]) for path in lengths}
        return self._sharded(batch, None, (), lambda t, placements, path: padding.padded(t, path, lengths.get(path)))

    def _layout_of(self, t: Tensor, placements: Any) -> Layout:
        return Layout(self.mesh, placements, ndim=t.ndim)

    def _sharded(self, value: Any, placements: Any, path: tuple[Any, ...], leaf: Callable[..., Any]) -> Any:
        """The batch with ``leaf(tensor, placements, path)`` in place of each tensor."""
        if isinstance(value, Tensor):
            return leaf(value, placements, path)
        if isinstance(value, Mapping):
            # In one order on all ranks, whatever that of their dicts: leaves meet in collectives.
            order = sorted(value, key=lambda k: (type(k).__name__, str(k)))
            laid = {k: self._sharded(value[k], self._for(k, placements), (*path, k), leaf) for k in order}
            made = {k: laid[k] for k in value}
            return like_mapping(value, made)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = zip(value._fields, value, strict=True)
            return type(value)(*(self._sharded(v, placements, (*path, name), leaf) for name, v in fields))
        if isinstance(value, (tuple, list)):
            return type(value)(self._sharded(v, placements, (*path, i), leaf) for i, v in enumerate(value))
        return value

    def _for(self, key: Any, placements: Any) -> Any:
        return self.placements.get(key) if self._by_key and placements is None else placements

    def _exchanged(self, batch: Any, count: int) -> dict[tuple[Any, ...], list[Sequence[int]]]:
        """Shapes of all ranks' parts of a batch, by path: one exchange.  ``batch`` is None where the data ended.

        Raises DesyncError where parts do not fit together: they differ along a dim that is not split, or differ where
        ranks bring the same part.  Along a dim that is padded they may.
        """
        facts: list[Fact] = [] if batch is not None else [Fact("no more batch")]
        shapes: dict[tuple[Any, ...], Sequence[int]] = {}

        def note(t: Tensor, placements: Any, path: tuple[Any, ...]) -> None:
            if isinstance(t, DistTensor):
                return
            shapes[path] = tuple(t.shape)
            if self.mesh.size == 1:
                return
            free: set[int] = set()
            if self.padding is not None and self.padding.applies(t):
                free.add(self.padding.dim % t.ndim)
            facts.append(Fact(f"shapes of batch{shown(path)} ({t.dtype}, {t.ndim} dims)"))
            if placements is None or not t.ndim:  # stays as each rank has it
                return
            with contextlib.suppress(LayoutError):  # said where the batch is laid out
                split = self._brought(self._layout_of(t, placements))
                kept = [None if d in free or d in split else n for d, n in enumerate(t.shape)]
                facts.append(Fact(f"sizes of batch{shown(path)} along dims that are not split", kept))
                whole = [None if d in free else n for d, n in enumerate(t.shape)]
                facts.append(Fact(f"shapes of the same part of batch{shown(path)}", whole, self._part(t, placements)))

        if batch is not None:
            self._each(batch, note)
        if self.mesh.size == 1:
            return {path: [shape] for path, shape in shapes.items()}
        doing = f"shard_dataloader, batch {count}"
        everyone = collective.all_gather_object((facts, shapes), collective.group(self.mesh), doing)
        found, _ = differing({rank: of for rank, (of, _) in zip(self.mesh.ranks, everyone, strict=True)})
        if found:
            raise DesyncError(SAID.format(count=count, found=found) + f"; {self._fix()}")
        return {path: [of[path] for _, of in everyone] for path in shapes}

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

        self._each(batch, note)
        said = SAID.format(count=count, found="{}")
        doing = f"shard_dataloader, batch {count}"
        with together(self.mesh, "shard_dataloader", said, self._fix(), doing=doing) as facts:
            facts.append(Fact("no more batch" if batch is None else str(form)))
            facts.append(Fact(self._order()))
            for (path, *_), part, digest in zip(form, parts, collective.digests(tensors), strict=True):
                facts.append(Fact(f"values of {shown(path) or 'the tensor'}", f"digest {digest:x}", part))


def _keys(batch: Any) -> Iterator[Any]:
    """The keys of a batch, nested ones too."""
    if isinstance(batch, Mapping):
        yield from batch
    if isinstance(batch, (Mapping, tuple, list)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _keys(value)


def _is_placements(given: Mapping[Any, Any], mesh: Mesh) -> bool:
    return all(k in mesh.axes for k in given)


__all__ = ["SAID", "BatchesOnMesh"]
