"""Placements, layouts and specs: how a tensor lies on a mesh.  Pure and hashable; never communicates.

A *placement* says what one mesh axis does to a tensor.  A *layout* has one placement per axis, and the
order of the axes where several split the same dim.  A *spec* is global shape, dtype and layout.

Uneven shards follow ``torch.chunk``: 10 over 4 is 3, 3, 3, 1; over 6 it is 2, 2, 2, 2, 2, 0.
"""

from .layout import Layout, Placements
from .marks import NO_MARKS, MarkedSpec, Marks, marked, marks_of
from .placement import (
    REDUCE_OPS,
    REPLICATE,
    At,
    Partial,
    Placement,
    Replicate,
    Shard,
    as_placement,
    chunk_bounds,
    chunk_sizes,
    commute,
    crowded,
    cuts,
    dual,
    neutral,
    own_bounds,
    own_ranges,
    placement_from,
    unreducible,
)  # fmt: skip
from .spec import (
    CommFormats,
    Spec,
    dtype_from,
    dtype_name,
    layout_data,
    layout_from,
    spec_data,
    spec_from,
    wider,
    widest_accumulate_dtype,
)
from .table import LayoutLine, LayoutTable, load_layouts, read_layouts
from .wire import CASTS, Float8, Wire, block_of, bytes_each, wire_bytes, wire_from, wire_name

__all__ = [
    "CASTS", "NO_MARKS", "REDUCE_OPS", "REPLICATE", "At", "CommFormats", "Float8", "Layout", "LayoutLine",
    "LayoutTable", "MarkedSpec", "Marks", "Partial", "Placement", "Placements", "Replicate", "Shard", "Spec", "Wire",
    "as_placement", "block_of", "bytes_each", "chunk_bounds", "chunk_sizes", "commute", "crowded", "cuts", "dtype_from",
    "dtype_name", "dual", "layout_data", "layout_from", "load_layouts", "marked", "marks_of", "neutral", "own_bounds",
    "own_ranges", "placement_from", "read_layouts", "spec_data", "spec_from", "unreducible", "wider",
    "widest_accumulate_dtype", "wire_bytes", "wire_from", "wire_name",
]  # fmt: skip
