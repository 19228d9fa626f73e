"""How a parameter is kept, where that is not as ops see it: one record, which all who ask have from the parameter.

What was said (``Storage``) becomes a record of each parameter (``Stored``), in eager and in captured steps alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Any

import torch

from ...errors import ShardError
from ...layout import Replicate, Spec, Wire
from ...mesh import Mesh
from ...ranks import runtime
from .host import HOST, check_device
from .names import Names
from .packing import axes_of, cut, whole_over
from .precision import Dtypes

Tensor = torch.Tensor
STORED = "_stored"  # in the dict of a parameter: its record


@dataclass(frozen=True)
class Stored:
    """How a parameter is kept.

    Attributes:
        axes: indices of the mesh axes that it is stored split over, and that ops see it whole on.
        device: ``"cpu"``, where it is stored in memory of the host; None: on the mesh's device.
        dtypes: in which ops see it and its gradient is reduced, with what travels; None: all as it is stored.
        unit: name of the module with whose other parameters it is gathered.
    """

    axes: tuple[int, ...] = ()
    device: str | None = None
    dtypes: Dtypes | None = None
    unit: str = ""

    def text(self, mesh: Mesh) -> str:
        """In words: for errors and explanations."""
        over = f"split over {', '.join(mesh.axes[a] for a in self.axes)}" if self.axes else "whole"
        on = "the host" if self.device else "the mesh's device"
        return f"stored on {on}, {over}{f', {self.dtypes}' if self.dtypes else ''}"


UNSHARDED = Stored()


def stored(p: Tensor) -> Stored:
    """How a parameter is kept."""
    found: Stored = p.__dict__.get(STORED, UNSHARDED)
    return found


def on_host(p: Tensor) -> bool:
    """Whether a parameter was told to be stored on the host."""
    return stored(p).device is not None


def seen_spec(p: Tensor, learning: bool = True) -> Spec:
    """Spec of a parameter as ops see it; its gradient is Partial on the axes that it is stored over."""
    how, spec = stored(p), p._spec  # type: ignore[attr-defined]
    layout, dtype, sums = whole_over(spec, how.axes), compute_dtype(p), how.dtypes and how.dtypes.accumulate
    if not learning:
        return Spec(spec.shape, dtype, layout, undecided_mask=spec.mesh.everywhere, accumulate_dtype=sums)
    split = sum(1 << a for a in how.axes)
    return Spec(
        spec.shape,
        dtype,
        layout,
        spec.grad_partial_mask | split,
        spec.undecided_mask,
        accumulate_dtype=sums,
        comm_formats=spec.comm_formats,
    )


def compute_dtype(p: Tensor) -> torch.dtype:
    """In which ops see a parameter."""
    found = stored(p).dtypes
    return p.dtype if found is None else found.compute


def reduce_dtype(p: Tensor) -> torch.dtype:
    """In which the gradient of a parameter is reduced."""
    found = stored(p).dtypes
    return p.dtype if found is None else found.reduce


def gather_wire(p: Tensor) -> Wire | None:
    """In what a parameter that is stored split travels to where it is used; None: as ops see it."""
    found = stored(p).dtypes
    return None if found is None else found.gather


def near(p: Tensor, g: Tensor) -> Tensor:
    """A gradient of a parameter where ranks meet.  Dispatch must be disabled."""
    if not on_host(p):
        return g
    runtime.RT.counts.add_copy("to_device", g.nbytes)
    return g.to(p._spec.mesh.device)  # type: ignore[attr-defined]


def home(p: Tensor, g: Tensor) -> Tensor:
    """A gradient of a parameter where that is stored, at once; differentiable.  Dispatch must be disabled."""
    if not on_host(p):
        return g
    runtime.RT.counts.add_copy("to_host", g.nbytes)
    return g.to(HOST)


# ---------------------------------------------------------------------------------------------- what was said


Axes = str | Sequence[str]
Over = Axes | Mapping[str, Axes]
OVER_WANTED = (
    (str, list, tuple, Mapping, NoneType),
    "give an axis, a list of several, or a dict, glob of names of parameters or modules to those",
)
ON_WANTED = ((str, Mapping, NoneType), 'give "cpu", or a dict, glob of names of parameters or modules to that')


@dataclass(frozen=True, kw_only=True)
class Storage:
    """What was said of how parameters are kept: options of ``shard_module`` and of ``compile_step``, by their names.

    Attributes:
        fsdp: axis, or axes, that they are stored split over, or glob of names to those.
        offload: device that they are stored on, or glob of names to device.
    """

    fsdp: Over | None = None
    offload: str | Mapping[str, str] | None = None

    def options(self) -> dict[str, Any]:
        """What was said, by name."""
        return {f.name: getattr(self, f.name) for f in fields(Storage)}

    def records(
        self, names: Names, mesh: Mesh, plan: dict[str, Spec], dtypes: Mapping[str, Dtypes]
    ) -> dict[str, Stored]:
        """The records of the parameters that are kept otherwise than ops see them, by their first names.

        Args:
            plan: first name to the spec as ops see it, in the stored dtype; becomes that of what is stored.
            dtypes: what was said of precisions, by first names.

        Raises:
            ShardError: an axis that splits what ops see; another device; globs that match nothing.
        """
        axes, hosted, units = self._axes(names, mesh, plan), self.hosted(names), names.units()
        found = {}
        for n, spec in plan.items():
            said, plain = (
                dtypes.get(n),
                Dtypes(spec.dtype, spec.dtype, grad_comm=spec.grad_comm_format),
            )  # its spec has the wire
            if said is not None and n not in axes:
                said = said._replace(gather=None)
            record = Stored(axes.get(n, ()), HOST if n in hosted else None, None if said == plain else said)
            if record != UNSHARDED:
                found[n] = replace(record, unit=units[n])
        return found

    def _axes(self, names: Names, mesh: Mesh, plan: dict[str, Spec]) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        said = {names.all[n]: axes_of(mesh, a) for n, a in names.said(_globs(self.fsdp), "fsdp").items()}
        for name, axes in said.items():
            spec = plan.get(name)
            if spec is None:
                continue
            for axis in axes:
                if not isinstance(spec.layout.placements[axis], Replicate):
                    raise ShardError(
                        f"{name} is split over {mesh.axes[axis]!r} as the ops see it ({spec.layout!r}), so it cannot "
                        "be stored over that axis too: give another axis, or leave it out of fsdp"
                    )
            own, layout = cut(spec, axes)
            if own:
                plan[name] = Spec(
                    spec.shape, spec.dtype, layout, undecided_mask=mesh.everywhere, comm_formats=spec.comm_formats
                )
                found[name] = own
        return found

    def hosted(self, names: Names) -> dict[str, None]:
        """First names of parameters that are to be stored on the host, in their order.

        Raises ShardError for another device, and for globs that match nothing.
        """
        globs = _globs(self.offload)
        for device in globs.values():
            check_device(device)
        return {names.all[n]: None for n in names.said(globs, "offload")}


def _globs(said: Any) -> Mapping[str, Any]:
    """What an option says, by globs of names."""
    return {} if said is None else said if isinstance(said, Mapping) else {"*": said}


__all__ = [
    "ON_WANTED",
    "OVER_WANTED",
    "STORED",
    "UNSHARDED",
    "Axes",
    "Over",
    "Storage",
    "Stored",
    "compute_dtype",
    "gather_wire",
    "home",
    "near",
    "on_host",
    "reduce_dtype",
    "seen_spec",
    "stored",
]
