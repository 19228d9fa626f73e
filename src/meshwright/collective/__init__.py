"""Collectives: the only place that moves data between ranks, real or simulated.

Plain functions over a ``Group``.  They work on values: inputs are detached, no graph is recorded; autograd is
the business of ``resharding``.  What backends lack is hidden here: uneven parts, other dims than 0, ``avg`` and
small dtypes on gloo, reduce-scatter on gloo (there an all-reduce is faster than gloo's own emulation).

Whether a collective moves anything is decided from sizes that all ranks know, never from the local part
alone: a rank with an empty part must still take part.
"""

from __future__ import annotations

from .agreement import Fact, Facts, difference, differing, together
from .checking import WORDS, check_replicated_inputs, compare, compare_progress, same_values
from .digest import digests
from .direct_calls import OPERATORS as BY_HAND
from .direct_calls import refuse_by_hand, sends_objects
from .exchange import all_to_all, exchange_pieces, exchange_rows, permute
from .graph import (
    COLLECTIVES,
    OPERATORS,
    STARTS,
    WAIT_OP,
    Emitter,
    as_rank,
    bytes_of,
    group_of,
    group_size,
    keep_one,
    mesh_of_text,
    mesh_text,
    recording,
)
from .groups import Group, connect, group, override_group
from .host_tensors import from_elsewhere, silent
from .kinds import ADDS, Cut, Kind, rounds
from .messages import StoreMailbox, leave_with, on_one_machine, watch_over
from .ops import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    KINDS,
    REDUCE_SCATTER,
    all_gather,
    all_gather_async,
    all_gather_object,
    all_reduce,
    all_reduce_async,
    barrier,
    broadcast,
    carries_signature,
    counting,
    reduce_scatter,
    reduce_scatter_async,
)
from .quantized import (
    WIRE_ALL_GATHER,
    gather_async,
    scatter_sum_async,
    sum_async,
    travelled,
    wire_all_gather,
    wire_all_reduce,
    wire_reduce_scatter,
)
from .ranges import OP, Served, op_range, profiler, serving, several, told
from .rendezvous import meeting
from .rows import gather_rows, scatter_rows
from .sends import SEND, cut_off, lane, receive, send
from .transport import Pending, row_major

# Below this package a tensor may lie on the host while ranks meet with tensors of a device.
all_gather, all_gather_async = from_elsewhere(all_gather), from_elsewhere(all_gather_async)
all_reduce, all_reduce_async = from_elsewhere(all_reduce), from_elsewhere(all_reduce_async, writes=True)
reduce_scatter, reduce_scatter_async = from_elsewhere(reduce_scatter), from_elsewhere(reduce_scatter_async)
all_to_all, broadcast = from_elsewhere(all_to_all), from_elsewhere(broadcast)
permute = from_elsewhere(permute)
gather_rows, scatter_rows = from_elsewhere(gather_rows), from_elsewhere(scatter_rows)
exchange_pieces = from_elsewhere(exchange_pieces)
exchange_rows = from_elsewhere(exchange_rows)
wire_all_reduce, wire_reduce_scatter = from_elsewhere(wire_all_reduce), from_elsewhere(wire_reduce_scatter)
wire_all_gather, gather_async = from_elsewhere(wire_all_gather), from_elsewhere(gather_async)
scatter_sum_async, sum_async = from_elsewhere(scatter_sum_async), from_elsewhere(sum_async, writes=True)

__all__ = [
    "ADDS",
    "ALL_GATHER",
    "ALL_REDUCE",
    "BROADCAST",
    "BY_HAND",
    "COLLECTIVES",
    "KINDS",
    "OP",
    "OPERATORS",
    "REDUCE_SCATTER",
    "SEND",
    "STARTS",
    "WAIT_OP",
    "WIRE_ALL_GATHER",
    "WORDS",
    "Cut",
    "Emitter",
    "Fact",
    "Facts",
    "Group",
    "Kind",
    "Pending",
    "Served",
    "StoreMailbox",
    "all_gather",
    "all_gather_async",
    "all_gather_object",
    "all_reduce",
    "all_reduce_async",
    "all_to_all",
    "as_rank",
    "barrier",
    "broadcast",
    "bytes_of",
    "carries_signature",
    "check_replicated_inputs",
    "compare",
    "compare_progress",
    "connect",
    "counting",
    "cut_off",
    "difference",
    "differing",
    "digests",
    "exchange_pieces",
    "exchange_rows",
    "gather_async",
    "gather_rows",
    "group",
    "group_of",
    "group_size",
    "keep_one",
    "lane",
    "leave_with",
    "meeting",
    "mesh_of_text",
    "mesh_text",
    "on_one_machine",
    "op_range",
    "override_group",
    "permute",
    "profiler",
    "receive",
    "recording",
    "reduce_scatter",
    "reduce_scatter_async",
    "refuse_by_hand",
    "rounds",
    "row_major",
    "same_values",
    "scatter_rows",
    "scatter_sum_async",
    "send",
    "sends_objects",
    "serving",
    "several",
    "silent",
    "sum_async",
    "together",
    "told",
    "travelled",
    "watch_over",
    "wire_all_gather",
    "wire_all_reduce",
    "wire_reduce_scatter",
]
