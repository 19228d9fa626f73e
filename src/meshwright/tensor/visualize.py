"""``mw.visualize``: a sharding in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import LayoutError
from ..layout import Layout, Spec
from ..layout.picture import as_rich
from ..ranks import runtime
from .dist_tensor import DistTensor


def visualize(x: Any, shape: Sequence[int] | None = None) -> None:
    """Print which ranks hold which block of a tensor, as a grid. Nothing is communicated.

    On a mesh only the first rank prints, so every rank may call it. JAX: `jax.debug.visualize_array_sharding`.

    Args:
        x: A DistTensor, a Spec, or a Layout with `shape`.
        shape: Global shape for a Layout.

    Raises:
        LayoutError: If `x` is something else, or a Layout comes without its shape.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2, "tp": 2})
        mw.visualize(mw.Layout(mesh, {"dp": mw.Shard(0), "tp": mw.Shard(1)}), (8, 16))
        ```
    """
    spec = x.spec if isinstance(x, DistTensor) else x
    if isinstance(spec, Spec):
        layout, shape, dtype = spec.layout, spec.shape, str(spec.dtype).removeprefix("torch.")
    elif isinstance(spec, Layout) and shape is not None:
        layout, dtype = spec, ""
    else:
        got = "a Layout without shape=" if isinstance(x, Layout) else f"a {type(x).__name__}"
        raise LayoutError(f"mw.visualize: got {got}. Pass a DistTensor, a Spec, or a Layout and the global shape.")
    if not _is_first(layout):
        return
    from rich.console import Console

    Console().print(as_rich(layout, tuple(shape), dtype))


def _is_first(layout: Layout) -> bool:
    """Whether this rank prints: the first of the mesh; anybody outside of ranks."""
    rt = runtime.RT
    return rt.rank == layout.mesh.ranks[0] or rt.rank not in layout.mesh.ranks


__all__ = ["visualize"]
