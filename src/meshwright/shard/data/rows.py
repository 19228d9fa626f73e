"""Batches of which each rank reads its own rows: the order is a function of epoch, place and seed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ...collective import Fact, together
from ...errors import LayoutError, ShardError
from ...layout import Layout, Replicate, Shard, Spec
from ...mesh import Mesh
from ...ranks import runtime
from ...tensor import DistTensor
from ...tensor.api import shard_tensor
from ...tensor.dist_tensor import wrap
from .batches import SAID, BatchesOnMesh
from .order import RowOrder, mix
from .padding import Padding, shown
from .reading import DatasetRows, Parts, Position, Stream

Tensor = torch.Tensor


class RowsLoader(BatchesOnMesh):
    """Reads a dataset in global batches, of which each rank reads and collates its own rows.

    Iterating is one epoch; iterating again is the next one.

    Args:
        dataset: map-style or iterable.
        batch_size: rows of a batch over all ranks.
        seed: of the order and of random transforms.
        options: of torch's DataLoader.

    Attributes:
        position: where the next batch begins.
        loader: torch's DataLoader, which reads.
    """

    def __init__(
        self, dataset: Any, mesh: Mesh, placements: Any, batch_size: int, seed: int, shuffle: bool, drop_last: bool,
        padding: Padding | None, options: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(mesh, placements, padding)
        self.dataset, self.batch_size, self.seed, self.shuffle = dataset, batch_size, seed, shuffle
        self.drop_last, self.position = drop_last, Position()
        self._midway, self._passes = False, 0  # whether a pass began and did not end; passes that began
        self._form: list[Any] = []  # paths, sizes and dtypes of the batch at hand
        self._compared: list[Any] = []  # those of the first batch of the pass
        self._known: dict[Any, tuple[Spec, list[tuple[int, int, int]]]] = {}
        self._count = 0  # rows of the batch at hand
        self._layout = self._row_layout()
        axes = self._layout.dim_axes().get(0, ())
        self._shared = math.prod(mesh.sizes[a] for a in axes) > 1  # whether ranks have other rows than others
        collate = options.pop("collate_fn", None) or default_collate
        generator = torch.Generator().manual_seed(mix(seed))  # else DataLoader draws from the default one
        self._parts_read: Parts | None = None
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        ):
            self._check_stream(options)
            stream = Stream(dataset, self.position, batch_size, drop_last, self._bounds, collate, seed)
            self.loader: Any = DataLoader(stream, batch_size=None, collate_fn=_same, generator=generator, **options)
            return
        _check_rows(len(dataset), batch_size, drop_last)
        order = RowOrder(len(dataset), seed if shuffle else None)
        self._parts_read = parts = Parts(self.position, order, batch_size, drop_last, self._bounds, seed)
        rows = DatasetRows(dataset, collate)
        sampler: Any = parts  # of parts, not of lists of row numbers
        self.loader = DataLoader(rows, batch_sampler=sampler, collate_fn=_same, generator=generator, **options)

    def _row_layout(self) -> Layout:
        """How rows are split: by the axes that split dim 0, the same for all tensors of a batch."""
        layouts: dict[Any, Layout] = {}
        for key, placements in self.placements.items() if self._by_key else [("", self.placements)]:
            layout = Layout(self.mesh, placements)
            if any(not isinstance(p, (Shard, Replicate)) for p in layout.placements):
                raise ShardError(f"shard_dataloader: {placements!r}: pass Shard or Replicate for rows of a batch")
            axes = layout.dim_axes().get(0, ())
            layouts[key] = Layout(self.mesh, {self.mesh.axes[a]: layout.placements[a] for a in axes})
        first, *others = layouts
        for other in others:
            if layouts[other] != layouts[first]:
                raise ShardError(
                    f"shard_dataloader: {first!r} and {other!r} split dim 0 over different axes, and each rank reads "
                    "its rows once. Split dim 0 of all keys over the same axes, or pass a DataLoader of global batches"
                )
        return layouts[first]

    def _check_stream(self, options: dict[str, Any]) -> None:
        if self.shuffle:
            raise ShardError(
                "shard_dataloader: shuffle=True needs a dataset with rows by number, and this one can only be "
                "iterated. Leave shuffle out, and shuffle in the dataset"
            )
        if options.get("num_workers", 0) > 1 or options.get("persistent_workers"):
            raise ShardError(
                "shard_dataloader: each worker would read all of an iterable dataset. Pass num_workers=1, without "
                "persistent_workers"
            )

    def _bounds(self, count: int) -> tuple[int, int]:
        return self._layout.local_bounds((count,), self.mesh.coordinate(runtime.RT.rank))[0]

    def __len__(self) -> int:
        rows = len(self.dataset)
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of an epoch; a place in it that a state gave stays."""
        if epoch != self.position.epoch or self._midway:
            self.position.epoch, self.position.row = epoch, 0
        self._midway, self._passes = False, self._passes + self._midway

    def __iter__(self) -> Iterator[Any]:
        position = self.position
        if self._midway:  # the last pass was left before its end
            position.epoch, position.row = position.epoch + 1, 0
        self._midway, self._passes = True, self._passes + 1
        this, first, row, index = self._passes, True, position.row, position.row // self.batch_size
        for batch, size in self.loader:
            if this != self._passes:
                raise ShardError(
                    "shard_dataloader: a pass cannot go on after another one began, or after set_epoch() or "
                    "load_state_dict(). Make a second loader"
                )
            self._count = self._counted(size, row, index)
            if first:
                self._check_keys(batch)
            if self.padding is not None:
                self._parts = self._exchanged(batch, index)
                batch = self._padded(batch)
            if first or runtime.RT.check:
                self._check(batch, index)
            self._form = []
            laid = self._each(batch, self._distributed)
            if first:
                self._compared = self._form
            elif self._form != self._compared:
                self._check_form(index)
            first = False
            runtime.RT.batches.load(self.mesh.ranks, f"batch {index} of epoch {position.epoch} of a dataset")
            row, index = row + self._count, index + 1
            position.row = row
            yield laid
        if this != self._passes:
            return
        if self._parts_read is None:
            self._counted(0, row, index)
        elif self.mesh.size > 1 and (first or runtime.RT.check):
            self._check(None, index)
        position.epoch, position.row, self._midway = position.epoch + 1, 0, False

    def _counted(self, count: int | None, row: int, index: int) -> int:
        """Rows of the whole batch.  Ranks compare those of a stream: none knows before its end how long it is."""
        if self._parts_read is not None:
            return self._parts_read.count(row)
        assert count is not None
        said, doing = SAID.format(count=index, found="{}"), f"shard_dataloader, batch {index}"
        with together(self.mesh, "shard_dataloader", said, self._fix(), doing=doing) as facts:
            facts.append(Fact(f"{count} rows" if count else "no more batch"))
        return count

    # -- one batch ------------------------------------------------------------------------------------

    def _check_form(self, index: int) -> None:
        """Raise where this rank's rows have another form than those of the first batch, which ranks have compared."""
        if self.padding is not None or not self._shared:
            return  # padded parts compare their sizes in every batch, and ranks with the same rows need not
        (path, sizes, dtype), *_ = [one for one in self._form if one not in self._compared] or [
            ((), "fewer tensors", "")
        ]
        raise ShardError(
            f"shard_dataloader: rank {runtime.RT.rank}: rows of batch {index}{shown(path)} are {tuple(sizes)} "
            f"{dtype}, and those of the first batch were not. Ranks collate their own rows: pad all to one size "
            "in collate_fn, or pass pad_to="
        )

    def _distributed(self, t: Tensor, placements: Any, path: tuple[Any, ...]) -> Tensor:
        self._form.append((path, t.shape[1:], t.dtype))
        if placements is None or isinstance(t, DistTensor):
            return t
        t = t.to(self.mesh.device)
        if not t.dim():  # one number for all rows, where a rank has them all
            if self._shared:
                raise ShardError(
                    f"shard_dataloader: batch{shown(path)} is one number for the rows of a rank, and ranks have other "
                    "rows. Return a value for each row in collate_fn, or compute the number from the batch"
                )
            return shard_tensor(t, self.mesh, (), check=False)
        key = (path, self._count, t.shape, t.dtype)
        if key not in self._known:
            self._known[key] = self._spec_of(t, placements, path)
        spec, cuts = self._known[key]
        for dim, start, length in cuts:
            t = t.narrow(dim, start, length)
        return wrap(t.contiguous().detach(), spec)

    def _spec_of(self, t: Tensor, placements: Any, path: tuple[Any, ...]) -> tuple[Spec, list[tuple[int, int, int]]]:
        """The spec of the global tensor of which this is the rows of a rank, and what the rank cuts from other dims."""
        shape = (self._count, *t.shape[1:])
        here = self.mesh.coordinate(runtime.RT.rank)
        try:
            layout = Layout(self.mesh, placements, ndim=t.ndim)
            bounds = layout.local_bounds(shape, here)
        except LayoutError as error:
            raise ShardError(f"batch{shown(path)}, of shape {shape}: {error}") from error
        if t.shape[0] != bounds[0][1] - bounds[0][0]:
            raise ShardError(
                f"shard_dataloader: collate_fn returned {t.shape[0]} rows in batch{shown(path)} for "
                f"{bounds[0][1] - bounds[0][0]} rows of the dataset. Return a tensor with a row for each"
            )
        cuts = [(dim, a, b - a) for dim, (a, b) in enumerate(bounds) if dim and b - a != shape[dim]]
        return Spec(shape, t.dtype, layout, undecided_mask=self.mesh.everywhere), cuts

    def _part(self, t: Tensor, placements: Any) -> tuple[int, ...]:
        if not t.dim():
            return ()
        here, axes = self.mesh.coordinate(runtime.RT.rank), self._layout.dim_axes().get(0, ())
        return tuple(here[a] for a in axes)

    def _brought(self, layout: Layout) -> Collection[int]:
        return (0,)

    def _fix(self) -> str:
        return "give every rank the same dataset, seed and options"

    def _order(self) -> str:
        order = f"seed {self.seed}" if self.shuffle else "no shuffle"
        place = f"epoch {self.position.epoch}, row {self.position.row} of {self._rows()}"
        return f"{place}, {order}, batches of {self.batch_size}, drop_last={self.drop_last}"

    # -- the place in the data ------------------------------------------------------------------------

    def _rows(self) -> int | None:
        return None if self._parts_read is None else len(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """Epoch and row of the next batch, the same on every mesh; and what is compared when they are loaded.

        That is the seed of the order, the number of rows, and the digest of a dataset that has one.
        """
        data = getattr(self.dataset, "digest", None)
        return {
            "epoch": self.position.epoch,
            "row": self.position.row,
            "seed": self.seed if self.shuffle else None,
            "rows": self._rows(),
            "data": data if isinstance(data, str) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a state's epoch and row, on any mesh and with any batch size.

        Raises:
            ShardError: If the state is of other data, of another order, or of another kind of loader.
        """
        self.check_state(state)
        self._passes += self._midway  # a pass that is under way does not go on
        self.position.epoch, self.position.row, self._midway = state["epoch"], state["row"], False

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ShardError for a state that :meth:`load_state_dict` cannot take."""
        here = self.state_dict()
        if set(here) != set(state):
            raise ShardError(
                "shard_dataloader: the state was saved without batch_size=, by a wrapped loader. Wrap the same loader, "
                "or leave loader= out when loading"
            )
        names = {"rows": "number of rows", "data": "data (digest)", "seed": "order (seed, None without shuffle)"}
        for key, name in names.items():
            if here[key] != state[key]:
                raise ShardError(
                    f"shard_dataloader: another {name} than when the state was taken: {here[key]}, and was "
                    f"{state[key]}. Pass the same dataset, shuffle and seed"
                )


def _same(batch: Any) -> Any:
    """Batches come collated from :mod:`.reading`."""
    return batch


def _check_rows(rows: int, batch_size: int, drop_last: bool) -> None:
    if not rows:
        raise ShardError("shard_dataloader: the dataset has no rows. Check the files that it reads")
    if drop_last and rows < batch_size:
        raise ShardError(
            f"shard_dataloader: the dataset has {rows} rows, fewer than batch_size={batch_size}, and drop_last=True "
            f"leaves no batch. Pass batch_size={rows} or less"
        )


__all__ = ["RowsLoader"]
