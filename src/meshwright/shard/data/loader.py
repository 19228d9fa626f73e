"""Sharding of data loaders: batches become DistTensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch

from ... import collective
from ...collective import Fact, differing, together
from ...errors import DesyncError, LayoutError, ShardError, takes
from ...layout import Layout, Partial, Placements, Replicate, Shard
from ...mesh import Mesh
from ...ranks import runtime
from ...tensor import DistTensor
from ...tensor.api import MESH_WANTED, from_local, shard_tensor
from .padding import Padding, shown

Tensor = torch.Tensor
_SAID = "shard_dataloader: the ranks loaded different batches (batch {count}): {found}"


def _fix(local: bool) -> str:
    if local:
        return "each rank must bring its own part of the same batch"
    return (
        "each rank must load the same global batch: use the same seed in the sampler, or local=True if each rank "
        "loads its own part (DistributedSampler)"
    )


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


class ShardedLoader:
    """Iterates over another loader and yields its batches with every tensor laid on the mesh.

    What the loader has otherwise (``dataset``, ``sampler``...) is the wrapped loader's.
    """

    def __init__(
        self, loader: Iterable[Any], mesh: Mesh, placements: Any, local: bool, padding: Padding | None = None
    ) -> None:
        self.loader, self.mesh, self.placements, self.local = loader, mesh, placements, local
        self.padding = padding
        self._by_key = isinstance(placements, Mapping) and bool(placements) and not _is_placements(placements, mesh)
        self._place = LoaderPlace()
        self._pending: LoaderPlace | None = None  # where the next pass goes on
        self._last: Any = None  # the batch that was given last
        self._parts: dict[tuple[Any, ...], list[Sequence[int]]] = {}  # shapes of the ranks' parts, by path in the batch

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
            made = self._sharded(batch, self.placements if not self._by_key else None, (), self._laid)
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

    def _digests(self, batch: Any) -> list[int]:
        tensors: list[Tensor] = []
        self._sharded(batch, None, (), lambda t, placements, path: tensors.append(t))
        return collective.digests([t for t in tensors if not isinstance(t, DistTensor)])

    # -- one batch ------------------------------------------------------------------------------------

    def _padded(self, batch: Any) -> Any:
        """The batch with each tensor up to the next of the sizes; of parts, up to that of the longest part."""
        padding = self.padding
        if padding is None:
            return batch
        tensors: list[tuple[tuple[Any, ...], Tensor]] = []

        def note(t: Tensor, placements: Any, path: tuple[Any, ...]) -> None:
            if padding.applies(t):
                tensors.append((path, t))
                if self.local and placements is not None and self._splits(placements, t, padding.dim):
                    raise ShardError(
                        f"shard_dataloader: each rank loads its part of dim {padding.dim} of batch{shown(path)}: "
                        "padding would come between the parts; pad the whole, with local=False"
                    )

        self._sharded(batch, self.placements if not self._by_key else None, (), note)
        lengths = padding.lengths(tensors)
        if self.local:
            lengths = {path: max(shape[padding.dim] for shape in self._parts[path]) for path in lengths}
        return self._sharded(batch, None, (), lambda t, placements, path: padding.padded(t, path, lengths.get(path)))

    def _splits(self, placements: Any, t: Tensor, dim: int) -> bool:
        return dim % t.ndim in Layout(self.mesh, placements, ndim=t.ndim).dim_axes()

    def _sharded(self, value: Any, placements: Any, path: tuple[Any, ...], leaf: Callable[..., Any]) -> Any:
        """The batch with ``leaf(tensor, placements, path)`` in place of each tensor."""
        if isinstance(value, Tensor):
            return leaf(value, placements, path)
        if isinstance(value, Mapping):
            # In one order on all ranks, whatever that of their dicts: leaves meet in collectives.
            order = sorted(value, key=lambda k: (type(k).__name__, str(k)))
            laid = {k: self._sharded(value[k], self._for(k, placements), (*path, k), leaf) for k in order}
            made = {k: laid[k] for k in value}
            return made if type(value) is dict else _like(value, made)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = zip(value._fields, value, strict=True)
            return type(value)(*(self._sharded(v, placements, (*path, name), leaf) for name, v in fields))
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
                split = Layout(self.mesh, placements, ndim=t.ndim).dim_axes()
                kept = [None if d in free or d in split else n for d, n in enumerate(t.shape)]
                facts.append(Fact(f"sizes of batch{shown(path)} along dims that are not split", kept))
                whole = [None if d in free else n for d, n in enumerate(t.shape)]
                facts.append(Fact(f"shapes of the same part of batch{shown(path)}", whole, self._part(t, placements)))

        if batch is not None:
            self._sharded(batch, self.placements if not self._by_key else None, (), note)
        if self.mesh.size == 1:
            return {path: [shape] for path, shape in shapes.items()}
        doing = f"shard_dataloader, batch {count}"
        everyone = collective.all_gather_object((facts, shapes), collective.group(self.mesh), doing)
        found, _ = differing({rank: of for rank, (of, _) in zip(self.mesh.ranks, everyone, strict=True)})
        if found:
            raise DesyncError(_SAID.format(count=count, found=found) + f"; {_fix(self.local)}")
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

        self._sharded(batch, self.placements if not self._by_key else None, (), note)
        said = _SAID.format(count=count, found="{}")
        doing = f"shard_dataloader, batch {count}"
        with together(self.mesh, "shard_dataloader", said, _fix(self.local), doing=doing) as facts:
            facts.append(Fact("no more batch" if batch is None else str(form)))
            facts.append(Fact(f"{self._length()} batches in all"))
            for (path, *_), part, digest in zip(form, parts, collective.digests(tensors), strict=True):
                facts.append(Fact(f"values of {shown(path) or 'the tensor'}", f"digest {digest:x}", part))

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
    loader: Iterable[Any],
    mesh: Mesh,
    placements: Any = None,
    *,
    local: bool = False,
    pad_to: Sequence[int] | None = None,
    pad_dim: int = 1,
    pad_value: Any = None,
) -> ShardedLoader:
    """Wrap a data loader so that its batches are DistTensors.

    Iterate over the result as over the loader. `Checkpoints` saves its position.

    Args:
        loader: Iterable of tensors, or of nested tuples, lists and dicts. Every rank's loader yields the same global
            batch, and the rank keeps its shard. The last batch may be uneven.
        mesh: The mesh.
        placements: Placements of all tensors, `{"dp": mw.Shard(0)}`. Or, for dict batches, key to placements; tensors
            of other keys stay plain. 0-d tensors are replicated.
        local: Each rank's loader yields only that rank's shard, as with `DistributedSampler`.
        pad_to: Lengths. Each tensor named in `pad_value` is padded at the end of `pad_dim` to the next length; local
            shards to that of the longest. A captured step is then captured once per length.
        pad_dim: Dim of the sequence in each tensor.
        pad_value: Key of the batch (or field, or index) to the value of the padding; `None` leaves the tensor
            unchanged. For batches of one tensor: the value. Labels get what the loss ignores (-100 for
            `cross_entropy`), masks 0 or False, ids any valid id. A loss that ignores nothing, or attention without a
            mask, would count the padding.

    Returns:
        An iterable with the loader's length.

    Raises:
        ShardError: If `pad_to` is invalid. While iterating: if a tensor cannot be sharded, is longer than `pad_to`, or
            has `pad_dim` and is not named in `pad_value`.
        DesyncError: While iterating, if ranks load batches of different shapes, number or values. Compared for the
            first batch of each pass; in check mode for all. With `local`, shapes and the presence of a batch are always
            compared.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})
        data = torch.utils.data.DataLoader(torch.arange(10.0).view(10, 1), batch_size=4)


        def shapes():
            batches = mw.shard_dataloader(data, mesh, {"dp": mw.Shard(0)})
            return [(tuple(x.shape), tuple(x.to_local().shape)) for x in batches]


        assert mw.simulate(shapes, mesh)[0] == [((4, 1), (2, 1)), ((4, 1), (2, 1)), ((2, 1), (1, 1))]
        ```
    """
    if placements is None:
        placements = {mesh.axes[0]: Shard(0)}
    if not hasattr(loader, "__iter__"):
        raise ShardError(f"shard_dataloader takes a data loader or another iterable, not {type(loader).__name__}")
    return ShardedLoader(loader, mesh, placements, local, Padding.of(pad_to, pad_dim, pad_value))


__all__ = ["ShardedLoader", "shard_dataloader"]
