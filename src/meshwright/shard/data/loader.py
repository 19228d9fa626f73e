"""Sharding of data loaders: batches become DistTensors."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import collective
from ...errors import LayoutError, ShardError
from ...layout import Layout, Placements, Replicate
from ...mesh import Mesh
from ...ranks import runtime
from ...tensor import DistTensor
from ...tensor.api import from_local, shard_tensor
from .batches import BatchesOnMesh
from .padding import Padding, shown

Tensor = torch.Tensor


@dataclass
class LoaderPlace:
    """A place in a pass over a loader.

    Attributes:
        batches: global batches that were given; whether they were trained on, only the caller knows.
        epoch: as ``set_epoch`` was told.
        default: state of the default generator where the pass began.
        generators: states of the loader's own ones there.
        last: digests of the batch before this place; None where they are not known.
    """

    batches: int = 0
    epoch: int | None = None
    default: Tensor | None = None
    generators: tuple[Tensor, ...] = ()
    last: list[int] | None = None

    def of(self, loader: Any) -> LoaderPlace:
        """With the generators as they are now."""
        self.default = torch.random.get_rng_state()
        self.generators = tuple(g.get_state() for g in _generators(loader))
        return self

    def own(self, loader: Any) -> list[torch.Generator]:
        """The generators of a loader.  Raises ShardError where these are not as many."""
        own = _generators(loader)
        if len(own) != len(self.generators):
            raise ShardError(f"shard_dataloader: the loader has {len(own)} generators and had {len(self.generators)}")
        return own

    def start(self, loader: Any) -> None:
        """Set the generators of a loader to where the pass began."""
        for generator, state in zip(self.own(loader), self.generators, strict=True):
            generator.set_state(state)


def _generators(loader: Any) -> list[torch.Generator]:
    """What the order of a loader is drawn from, beside the default generator."""
    batches = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = {id(g): g for part in parts if isinstance(g := getattr(part, "generator", None), torch.Generator)}
    return list(found.values())


class ShardedLoader(BatchesOnMesh):
    """Iterates over another loader and yields its batches with every tensor laid on the mesh.

    What the loader has otherwise (``dataset``, ``sampler``...) is the wrapped loader's.
    """

    def __init__(
        self, loader: Iterable[Any], mesh: Mesh, placements: Any, local: bool, padding: Padding | None = None
    ) -> None:
        super().__init__(mesh, placements, padding)
        self.loader, self.local = loader, local
        self._place = LoaderPlace()
        self._pending: LoaderPlace | None = None  # where the next pass goes on
        self._last: Any = None  # the batch that was given last

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
        self._place.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        batches = self._begin()
        place, first = self._place, True
        for batch in batches:
            if first:
                self._check_keys(batch)
            place.batches, self._last = place.batches + 1, batch
            if self.local:  # parts may differ in length until they are padded
                self._parts = self._exchanged(batch, place.batches - 1)
                batch = self._padded(batch)
            if self.mesh.size > 1 and (first or runtime.RT.check):
                self._check(batch, place.batches - 1)
            first = False
            if not self.local:
                batch = self._padded(batch)
            made = self._each(batch, self._distributed)
            runtime.RT.batches.load(self.mesh.ranks, f"batch {place.batches - 1} of a {type(self.loader).__name__}")
            yield made
        if self.local:
            self._exchanged(None, place.batches)
        elif self.mesh.size > 1 and (first or runtime.RT.check):
            self._check(None, place.batches)
        place.batches, self._last = 0, None

    # -- the place in the data ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """How many global batches of this pass were given, and what repeats their order: the same on every mesh.

        Of a loader that has a ``state_dict`` of its own, that.

        Raises:
            ShardError: what can be iterated only once, which cannot be gone through again.
        """
        if hasattr(self.loader, "state_dict"):
            return {"own": self.loader.state_dict()}
        if isinstance(self.loader, Iterator):
            raise ShardError(
                f"shard_dataloader: the place in a {type(self.loader).__name__} cannot be saved: it can be iterated "
                "only once. Wrap a torch DataLoader, or an object whose __iter__ starts anew"
            )
        place = self._place if self._place.batches else LoaderPlace(epoch=self._place.epoch).of(self.loader)
        last = None if self.local or not place.batches else self._digests(self._last)
        return {**place.__dict__, "length": self._length(), "rows": self._rows(), "last": last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next pass go on behind the batches that were given when the state was taken.

        It goes through the earlier batches again, without laying them on the mesh.

        Raises:
            ShardError: the state of a loader of another length, or of another kind.
        """
        self.check_state(state)
        if "own" in state:
            self.loader.load_state_dict(state["own"])  # type: ignore[attr-defined]
            return
        place = LoaderPlace(
            state["batches"], state["epoch"], state["default"], tuple(state["generators"]), state["last"]
        )
        if place.epoch is not None:
            self.set_epoch(place.epoch)
        place.start(self.loader)
        self._pending = place if place.batches else None

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ShardError for a state that :meth:`load_state_dict` cannot take."""
        if "row" in state:
            raise ShardError(
                "shard_dataloader: the state was saved by a loader with batch_size=, which reads a dataset: pass the "
                "dataset and batch_size="
            )
        if ("own" in state) != hasattr(self.loader, "load_state_dict"):
            saved, here = ("a stateful", "no") if "own" in state else ("a stateless", "a")
            raise ShardError(
                f"shard_dataloader: the state was saved with {saved} loader, and this loader has {here} state_dict(). "
                "Wrap the same kind of loader."
            )
        if "own" in state:
            return
        if state["length"] != self._length():
            raise ShardError(
                f"shard_dataloader: the loader had {state['length']} batches when its state was taken and has "
                f"{self._length()}: the data and the size of the global batch must be the same"
            )
        had = state.get("rows")  # not known of earlier versions
        for what, before, now in zip(("its dataset", "its sampler"), had or (), self._rows(), strict=False):
            if before != now:
                raise ShardError(
                    f"shard_dataloader: {what} had {before} rows when the state was taken and has {now}: the data must "
                    "be the same"
                )
        LoaderPlace(generators=tuple(state["generators"])).own(self.loader)

    def _begin(self) -> Iterator[Any]:
        """A pass over the loader, behind what a state said was given already."""
        place, self._pending = self._pending, None
        if place is None:
            self._place = LoaderPlace(epoch=self._place.epoch).of(self.loader)
            return iter(self.loader)
        before = torch.random.get_rng_state()  # of a run that goes on; what follows draws what it drew before
        if place.default is not None:
            torch.random.set_rng_state(place.default)
        place.start(self.loader)
        batches, batch = iter(self.loader), None
        for _ in range(place.batches):
            batch = next(batches, place)
        torch.random.set_rng_state(before)
        if batch is place or (place.last is not None and place.last != self._digests(batch)):
            raise ShardError(
                f"shard_dataloader: batch {place.batches - 1} of this pass is another one than when the state was "
                "taken: the data changed, or its order is drawn from neither torch's default generator nor that "
                "of the DataLoader or its sampler"
            )
        self._place, self._last = place, batch
        return batches

    def _length(self) -> int | None:
        with contextlib.suppress(TypeError, NotImplementedError, AttributeError):  # a DataLoader may not know it
            return len(self)
        return None

    def _rows(self) -> list[int | None]:
        """How many rows the dataset has and the sampler draws, the same on every mesh; None where that is not known."""
        made: list[int | None] = []
        for name in ("dataset", "sampler"):
            made.append(None)
            if not (self.local and name == "sampler"):  # which draws the part of a rank
                with contextlib.suppress(TypeError, NotImplementedError, AttributeError):
                    made[-1] = len(getattr(self.loader, name))
        return made

    # -- one batch ------------------------------------------------------------------------------------

    def _distributed(self, t: Tensor, placements: Any, path: tuple[Any, ...]) -> Tensor:
        if placements is None or isinstance(t, DistTensor):
            return t
        t = t.to(self.mesh.device)
        if not t.dim():  # one number for the whole batch
            return shard_tensor(t, self.mesh, (), check=False)
        try:
            if self.local:
                return self._from_local(t, placements, self._parts[path])
            return shard_tensor(t, self.mesh, placements, check=False)
        except LayoutError as error:
            raise ShardError(f"batch{shown(path)}, of shape {tuple(t.shape)}: {error}") from error

    def _from_local(self, t: Tensor, placements: Placements, shapes: list[Sequence[int]]) -> Tensor:
        """Parts of any length; those that are not torch.chunk's are rearranged."""
        layout = Layout(self.mesh, placements, ndim=t.dim())
        split = layout.dim_axes()
        if not split:
            return from_local(t, self.mesh, layout, check=False)
        (dim, axes), *more = split.items()
        if more:
            return from_local(t, self.mesh, layout)
        group = collective.group(self.mesh, tuple(sorted(axes)))
        sizes = [shapes[self.mesh.ranks.index(rank)][dim] for rank in group.ranks]
        shape = list(t.shape)
        shape[dim] = sum(sizes)
        here = layout.local_shape(shape, self.mesh.coordinate(runtime.RT.rank))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        step = -(-shape[dim] // len(sizes))
        if all(start == min(i * step, shape[dim]) for i, start in enumerate(starts)) and here[dim] == t.shape[dim]:
            return from_local(t, self.mesh, layout, shape=shape, check=False)
        return shard_tensor(collective.all_gather(t, dim, sizes, group), self.mesh, layout, check=False)

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

    def _brought(self, layout: Layout) -> Collection[int]:
        return layout.dim_axes() if self.local else ()

    def _fix(self) -> str:
        if self.local:
            return "each rank must bring its own part of the same batch"
        return (
            "each rank must load the same global batch: use the same seed in the sampler, or local=True if each rank "
            "loads its own part (DistributedSampler)"
        )

    def _order(self) -> str:
        return f"{self._length()} batches in all"


__all__ = ["LoaderPlace", "ShardedLoader"]
