"""The mesh: a named grid of ranks.  Pure: it describes, it never communicates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import NoneType
from typing import TYPE_CHECKING, Any

from . import drawing
from .errors import MeshError
from .torch_changes import on_first_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MOST_DRAWN = 1024  # ranks of a mesh that notebooks draw


class Mesh:
    """A grid of ranks with a name for each axis.

    It does no communication by itself. `init_mesh` connects one to processes, `simulate` to simulated ranks. Meshes
    with equal axes, device and ranks are equal and have equal hashes.

    DTensor: `DeviceMesh`.

    Args:
        axes: Axis name to size, outermost first: `{"dp": 2, "tp": 4}`.
        device: `"cpu"` or `"cuda"`: where local tensors live.
        ranks: Global ranks in row-major order. Default: 0 to size - 1.

    Raises:
        MeshError: If there are no axes, a size is below 1, a name is unusable, or `ranks` do not fill the grid.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2, "tp": 4})
        assert mesh.size == 8
        assert mesh.coordinate(5) == (1, 1)  # rank 5 is dp=1, tp=1
        ```
    """

    __slots__ = ("__dict__", "_hash", "axes", "device", "ranks", "size", "sizes")

    def __init__(self, axes: Mapping[str, int], *, device: str = "cpu", ranks: Sequence[int] | None = None) -> None:
        if not isinstance(axes, Mapping):
            raise MeshError(f'{axes!r} names no axes: give each a name and a size, e.g. Mesh({{"dp": 2, "tp": 2}})')
        if not isinstance(ranks, (Sequence, NoneType)):
            raise MeshError(f"ranks={ranks!r}: the global ranks in row-major order were expected, e.g. ranks=[0, 1]")
        if not isinstance(device, str):
            raise MeshError(f'device={device!r}: the type of device as a word was expected, e.g. "cpu" or "cuda"')
        if not axes:
            raise MeshError('a mesh needs at least one axis, e.g. Mesh({"dp": 2})')
        for name, n in axes.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise MeshError(f"axis name {name!r} is not usable: take an identifier such as 'dp'")
            if not isinstance(n, int) or isinstance(n, bool) or n < 1:
                raise MeshError(f"axis {name!r} has size {n!r}: a whole number of at least 1 was expected")
        self.axes = tuple(axes)
        self.sizes = tuple(axes.values())
        self.size = math.prod(self.sizes)
        self.device = device
        self.ranks = tuple(range(self.size)) if ranks is None else tuple(int(r) for r in ranks)
        if len(self.ranks) != self.size or len(set(self.ranks)) != self.size:
            raise MeshError(
                f"mesh {dict(axes)} has {self.size} places but {len(set(self.ranks))} distinct ranks were given"
            )
        self._hash = hash((self.axes, self.sizes, self.device, self.ranks))
        on_first_mesh()

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.sizes)

    @cached_property
    def everywhere(self) -> int:
        """The set of all axes of several ranks, as the mask of bits in which specs name axes."""
        return sum(1 << a for a, n in enumerate(self.sizes) if n > 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes (the name that torch's DeviceMesh uses)."""
        return self.sizes

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mesh):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.axes == other.axes
            and self.sizes == other.sizes
            and self.device == other.device
            and self.ranks == other.ranks
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        inner = ", ".join(f"{a}={n}" for a, n in zip(self.axes, self.sizes, strict=True))
        return f"Mesh({inner})" if self.device == "cpu" else f"Mesh({inner}, device={self.device!r})"

    def _repr_html_(self) -> str:
        """The ranks as a grid, for notebooks: the last axis across, the others down."""
        across = self.sizes[-1] if self.sizes else 1
        if self.size > _MOST_DRAWN:
            return drawing.heading(repr(self))
        ranks = [(str(r), drawing.tint(i // across)) for i, r in enumerate(self.ranks)]
        rows = [ranks[i : i + across] for i in range(0, len(ranks), across)]
        places = [at[:-1] for at in self.coordinates()[::across]]
        down = [", ".join(f"{a}={n}" for a, n in zip(self.axes, at, strict=False)) for at in places]
        columns = [f"{self.axes[-1]}={i}" for i in range(across)] if self.axes else []
        return drawing.heading(f"{self!r}: ranks") + drawing.grid(rows, columns, down if len(rows) > 1 else [])

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (dict(zip(self.axes, self.sizes, strict=True)), self.device, self.ranks)

    def axis_index(self, axis: str | int) -> int:
        """Index of an axis given by name or by index.  Raises MeshError for an unknown one."""
        if isinstance(axis, str):
            if axis in self.axes:
                return self.axes.index(axis)
        elif isinstance(axis, int) and -self.ndim <= axis < self.ndim:
            return axis % self.ndim
        raise MeshError(f"unknown axis {axis!r}: {self!r} has the axes {', '.join(self.axes)}")

    def axis_size(self, axis: str | int) -> int:
        """Number of ranks along an axis."""
        return self.sizes[self.axis_index(axis)]

    @cached_property
    def _places(self) -> dict[int, tuple[int, ...]]:
        return dict(zip(self.ranks, self.coordinates(), strict=True))

    def coordinates(self) -> list[tuple[int, ...]]:
        """All coordinates in row-major order, i.e. in the order of ``ranks``."""
        return list(itertools.product(*(range(n) for n in self.sizes)))

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Coordinate of a global rank, one number per axis.  Raises MeshError if it is not in the mesh."""
        try:
            return self._places[rank]
        except KeyError:
            raise MeshError(f"rank {rank} is not in {self!r} (its ranks: {list(self.ranks)})") from None

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Global rank at a coordinate."""
        i = 0
        for c, n in zip(coordinate, self.sizes, strict=True):
            i = i * n + c
        return self.ranks[i]

    def group_ranks(self, rank: int, axes: Sequence[int]) -> tuple[int, ...]:
        """Global ranks that share all coordinates with ``rank`` but those along ``axes`` (row-major)."""
        here = self.coordinate(rank)
        spans = [range(n) if i in axes else (here[i],) for i, n in enumerate(self.sizes)]
        return tuple(self.rank_at(c) for c in itertools.product(*spans))

    def device_mesh(self) -> DeviceMesh:
        """The same grid as torch's DeviceMesh (connects: every rank must call it together)."""
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        world = dist.group.WORLD if dist.is_initialized() else None
        kept, made = self.__dict__.get("_device_mesh", (None, None))
        if made is None or kept is not world:  # it belongs to the process group that it was made under
            grid = torch.tensor(self.ranks).reshape(self.sizes)
            made = DeviceMesh(self.device, grid, mesh_dim_names=self.axes)
            self.__dict__["_device_mesh"] = (dist.group.WORLD, made)
        connected: DeviceMesh = made
        return connected


def _rebuild(axes: dict[str, int], device: str, ranks: tuple[int, ...]) -> Mesh:
    return Mesh(axes, device=device, ranks=ranks)


def mesh_data(mesh: Mesh) -> dict[str, Any]:
    """A mesh as files have it: dicts, lists, words and numbers."""
    return {"axes": dict(zip(mesh.axes, mesh.sizes, strict=True)), "device": mesh.device, "ranks": list(mesh.ranks)}


def mesh_from(data: Mapping[str, Any]) -> Mesh:
    """The mesh that :func:`mesh_data` wrote."""
    return Mesh(data["axes"], device=data["device"], ranks=list(data["ranks"]))


def parse_mesh(text: str, *, device: str = "cpu") -> Mesh:
    """``"dp=2,tp=4"`` as a mesh.  Raises MeshError, naming the part that could not be read."""
    axes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, sep, size = part.partition("=")
        if not sep or not size.strip().isdigit():
            raise MeshError(f"cannot read {part!r} in mesh {text!r}: write axis=size, e.g. dp=2,tp=4")
        if name.strip() in axes:
            raise MeshError(f"axis {name.strip()!r} appears twice in mesh {text!r}")
        axes[name.strip()] = int(size)
    return Mesh(axes, device=device)
