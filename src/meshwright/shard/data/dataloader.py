"""``mw.shard_dataloader``: read a dataset row by row on each rank, or wrap a loader of batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

from torch.utils.data import DataLoader

from ...errors import ShardError, takes
from ...layout import Layout, Partial, Replicate, Shard
from ...mesh import Mesh
from ...tensor.api import MESH_WANTED
from .loader import ShardedLoader
from .padding import Padding
from .rows import RowsLoader


@takes(
    ShardError,
    mesh=MESH_WANTED,
    placements=(
        (Mapping, list, tuple, Layout, Shard, Replicate, Partial, NoneType),
        'give axis to placement, e.g. {"dp": mw.Shard(0)}, or key of the batch to such placements',
    ),
)
def shard_dataloader(
    loader: Any,
    mesh: Mesh,
    placements: Any = None,
    *,
    local: bool = False,
    pad_to: Sequence[int] | None = None,
    pad_dim: int = 1,
    pad_value: Any = None,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> ShardedLoader | RowsLoader:
    """Read a dataset, or wrap a data loader, so that batches are DistTensors.

    Iterate over the result as over a `DataLoader`. `Checkpoints` saves its position.

    With `batch_size`, batch k is rows k * batch_size onwards of the order, the same on every mesh, and each rank reads
    its own rows. Each pass is the next epoch. The position is an epoch and a row, so a run resumes on any mesh and
    reads nothing twice. Random transforms draw from generators that are seeded for each row.

    Args:
        loader: With `batch_size`: a dataset, map-style, iterable or of Hugging Face. Without: an iterable of tensors,
            or of nested tuples, lists and dicts; every rank's loader yields the same global batch, and the rank keeps
            its shard. The last batch may be uneven.
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
        batch_size: Rows of a batch over all ranks. Torch: `DataLoader(batch_size=)` times the ranks.
        shuffle: Permute the rows of each epoch by `seed` and epoch, without a list of indices.
        seed: Seed of the order and of random transforms.
        drop_last: Leave out a last batch that is not full.
        options: Of torch's `DataLoader`: `num_workers`, `collate_fn`, `pin_memory`...

    Returns:
        An iterable with the number of batches as its length.

    Raises:
        ShardError: If `pad_to` is invalid, or options do not fit the dataset. While iterating: if a tensor cannot be
            sharded, is longer than `pad_to`, or has `pad_dim` and is not named in `pad_value`; if rows of a later batch
            have another shape than those of the first, without `pad_to`.
        DesyncError: While iterating, if ranks load batches of different shapes, number or values. Compared for the
            first batch of each pass; in check mode for all. With `local`, shapes and the presence of a batch are always
            compared.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})


        def rows():
            loader = mw.shard_dataloader(torch.arange(10.0), mesh, {"dp": mw.Shard(0)}, batch_size=4, shuffle=True)
            return [(mw.unshard(x).tolist(), tuple(x.to_local().shape)) for x in loader]


        (batch, shape), *rest = mw.simulate(rows, mesh)[0]
        assert len(batch) == 4 and shape == (2,) and len(rest) == 2
        ```
    """
    if placements is None:
        placements = {mesh.axes[0]: Shard(0)}
    padding = Padding.of(pad_to, pad_dim, pad_value)
    if batch_size is not None:
        _check_dataset(loader, batch_size, local, options)
        return RowsLoader(loader, mesh, placements, batch_size, seed, shuffle, drop_last, padding, options)
    unused = [*options, *(["shuffle"] if shuffle else []), *(["drop_last"] if drop_last else [])]
    if unused:
        raise ShardError(f"shard_dataloader: {unused[0]}= is for a dataset: pass batch_size= too, and no DataLoader")
    if not hasattr(loader, "__iter__"):
        hint = ": pass batch_size= to read a dataset" if hasattr(loader, "__getitem__") else ""
        kind = type(loader).__name__
        raise ShardError(f"shard_dataloader takes a dataset, a data loader or another iterable, not {kind}{hint}")
    return ShardedLoader(loader, mesh, placements, local, padding)


def _check_dataset(dataset: Any, batch_size: Any, local: bool, options: dict[str, Any]) -> None:
    """Raises ShardError for what cannot be together with ``batch_size``."""
    if type(batch_size) is not int or batch_size < 1:
        raise ShardError(f"shard_dataloader: batch_size={batch_size!r}: pass the rows of a batch over all ranks")
    if isinstance(dataset, DataLoader):
        raise ShardError("shard_dataloader: batch_size= is for a dataset, not a DataLoader: pass its .dataset")
    if local:
        raise ShardError("shard_dataloader: local=True is for loaders; with batch_size= each rank reads its own rows")
    if not hasattr(dataset, "__iter__") and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        kind = type(dataset).__name__
        raise ShardError(f"shard_dataloader: a {kind} has neither rows by number and a length, nor __iter__")
    if isinstance(dataset, Iterator):
        raise ShardError(
            f"shard_dataloader: a {type(dataset).__name__} can be iterated only once: pass an object whose __iter__ "
            "starts again"
        )
    for name in ("sampler", "batch_sampler", "generator"):
        if name in options:
            raise ShardError(f"shard_dataloader: {name}= is set by batch_size=, shuffle= and seed=: leave it out")


__all__ = ["shard_dataloader"]
