"""Attention inside of documents that lie one after the other in a sequence, and in sliding windows.

Who attends to what follows from document ids, which are data: shapes, plans and what is sent do not hang on them.  Of a
split sequence each rank deals its rows out evenly among all, so many to each, in such a way that the keys that they
see come to the same sum for all; and gets the results back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn as nn

from .. import collective
from ..compat import FakeTensor
from ..errors import DesyncError, DispatchError
from ..operators import internal, opaque_operator, operator, part_of
from ..ranks import runtime
from .attention import shares, ulysses, ulysses_axes
from .attention_blocks import QueryRows, attend, flat, in_blocks, seen
from .attention_tiles import work
from .factor_notation import IMPLEMENTATIONS, Arg, Local, LocalFn, Rule, composite, notation, rule
from .head_groups import Attend, Bounds, bounded, in_groups
from .strategies import AllToAllSpec
from .windows import near, reached, reaching

Tensor = torch.Tensor
F: Any = nn.functional


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    is_causal: bool = True,
    window: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot product attention within the documents of a packed sequence, on one device and on many.

    Documents follow each other in each sequence. No query sees a key of another document. Give `document_ids` or
    `cu_seqlens`, as for `torch.nn.attention.varlen.varlen_attn`. For Hugging Face's `position_ids`, use
    `(position_ids == 0).cumsum(-1)` as document ids. No mask of t x t is built.

    PyTorch: `F.scaled_dot_product_attention`, `varlen_attn`.

    Args:
        query: (..., heads, t, d).
        key: (..., heads, t, d), or fewer heads that each serve several query heads.
        value: As `key`.
        document_ids: (..., t) integers that do not decrease along the sequence; or (t,), for all sequences.
        cu_seqlens: (documents + 1,), the start of each document and the end of the last: 0, 5, 12, 16. The same for all
            sequences. Positions after the last end form one more document.
        is_causal: Queries see keys up to their own position. `False`: all keys of their document.
        window: Maximum number of these keys, the query's own position included.
        dropout_p: Dropout probability of the weights; a mask is drawn in parts.
        scale: Scale of the scores. Default: 1 / sqrt(d).

    Returns:
        (..., heads, t, d), with the layout of the query.

    Raises:
        DispatchError: If shapes do not fit. On all ranks: if ids decrease.
        DesyncError: On all ranks, if they pass different ids.

    Examples:
        ```python
        q = k = v = torch.randn(2, 4, 16, 8)
        ids = torch.tensor([0] * 5 + [1] * 11)  # two documents, of 5 and 11 tokens
        y = mw.attention(q, k, v, document_ids=ids, window=4)
        assert y.shape == (2, 4, 16, 8)
        same = mw.attention(q, k, v, cu_seqlens=torch.tensor([0, 5, 16]), window=4)
        torch.testing.assert_close(y, same)
        ```
    """
    t = query.shape[-2]
    given = document_ids if cu_seqlens is None else cu_seqlens
    if given is None and window is None:
        grouped = key.shape[-3] != query.shape[-3] if query.ndim > 2 else False
        made: Tensor = F.scaled_dot_product_attention(
            query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=grouped
        )
        return made
    _check(query, key, value, document_ids, cu_seqlens, is_causal, window)
    # On one device it is what it is made of, so that modes see that: with dropout, reproducible_random does.
    one = not torch.compiler.is_exporting() and not any(hasattr(x, "_spec") for x in (query, key, value, given))
    call = _on_one if one else _WHOLE
    made = call(query, key, value, given, cu_seqlens is not None, is_causal, min(window or 0, t), dropout_p, scale)
    return made


def _check(
    query: Tensor, key: Tensor, value: Tensor, ids: Tensor | None, lengths: Tensor | None, causal: bool,
    window: int | None,
) -> None:  # fmt: skip
    shapes = [tuple(x.shape) for x in (query, key, value)]
    t = query.shape[-2] if query.ndim > 2 else 0
    fits = query.ndim > 2 and query.ndim == key.ndim == value.ndim and key.shape[:-1] == value.shape[:-1]
    fits = fits and key.shape[-2] == t and key.shape[:-3] == query.shape[:-3] and key.shape[-1] == query.shape[-1]
    if not fits or not key.shape[-3] or query.shape[-3] % key.shape[-3]:
        raise DispatchError(
            f"attention: query {shapes[0]}, key {shapes[1]} and value {shapes[2]} do not fit: with documents or a "
            "window give (..., heads, t, d), all of one length, and a multiple of the key's heads for the query"
        )
    if ids is not None and lengths is not None:
        raise DispatchError("attention: document_ids and cu_seqlens say the same: give one of them")
    for name, x in (("document_ids", ids), ("cu_seqlens", lengths)):
        if x is not None and (not isinstance(x, Tensor) or x.is_floating_point() or x.dtype == torch.bool):
            given = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise DispatchError(f"attention: {name} are a tensor of whole numbers, and were given as {given}")
    each = (*query.shape[:-3], t)
    if ids is not None and tuple(ids.shape) not in (each, (t,)):
        raise DispatchError(
            f"attention: document_ids are {tuple(ids.shape)}: give one for each position, "
            f"{each}, or ({t},) for all sequences"
        )
    if lengths is not None and (lengths.ndim != 1 or not lengths.numel()):
        raise DispatchError(
            f"attention: cu_seqlens are {tuple(lengths.shape)}: give (documents + 1,), beginning with 0"
        )
    if window is not None and not hasattr(window, "__index__"):
        raise DispatchError(f"attention: window={window!r} is no whole number")
    if window is not None and (window < 1 or not causal):
        raise DispatchError(f"attention: window={window} {'is less than 1' if causal else 'asks for is_causal=True'}")


def _on_one(
    query: Tensor, key: Tensor, value: Tensor, given: Tensor | None, lengths: bool, causal: bool, window: int,
    dropout_p: float, scale: float | None,
) -> Tensor:  # fmt: skip
    documents = None if given is None else checked_documents(given, lengths, query.shape[-2])
    if dropout_p > 0.0:
        mask = document_mask(query, documents, causal, window)
        made: Tensor = F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, scale=scale, enable_gqa=query.shape[-3] != key.shape[-3]
        )
        return made
    made = document_attention(query, key, value, documents, causal, window, scale)
    return made


_WHOLE = opaque_operator(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? documents, bool lengths, bool is_causal, int window, "
    "float dropout_p, float? scale) -> Tensor",
    _on_one,
)
composite("meshwright::attention")(_on_one)


# ---------------------------------------------------------------------------------------------- the ids


@part_of("mw.attention", "documents")
@internal
def checked_documents(given: Tensor, lengths: bool, t: int) -> Tensor:
    """Document ids that do not decrease, whole on every rank."""
    return _judged(given, _FACTS(given, lengths, t), lengths, t, (0,), (0,))


@rule("checked_documents")
def _checked_rule(given: Arg, lengths: bool, t: int) -> Rule:
    def local(ctx: Local) -> LocalFn:
        spec, mesh = ctx.inputs[0], ctx.inputs[0].mesh
        split = {a for axes in spec.layout.dim_axes().values() for a in axes}
        # Ranks that have the same sequences, in the order of the group of all ranks.
        places = [mesh.coordinate(r) for r in mesh.ranks]
        which = [tuple(p[a] for a in sorted(split)) for p in places]
        alike = tuple(which.index(w) for w in which)
        firsts = tuple(spec.local_offset(p)[0] if spec.ndim > 1 else 0 for p in places)

        def check(given: Tensor, lengths: bool, t: int) -> Tensor:
            facts = ctx.comm.gather_numbers(_FACTS(given, lengths, t), tuple(range(mesh.ndim)), _COMPARED)
            return _judged(given, facts, lengths, t, alike, firsts)

        return check

    dims = ["m"] if lengths else [*(["..."] if given.ndim > 1 else []), "s"]
    return notation({given: dims}, [*dims[:-1], "s"], sizes={"s": t}, whole="s m", local=local)


_COMPARED = "document ids are compared, and whether they decrease"


def _judged(given: Tensor, facts: Tensor, lengths: bool, t: int, alike: Sequence[int], firsts: Sequence[int]) -> Tensor:
    made: Tensor = _JUDGED(given, facts, lengths, t, alike, firsts)
    return made


def _facts(given: Tensor, lengths: bool, t: int) -> Tensor:
    """A digest; of the first number that is less than the one before: its row, its place, and both."""
    ids = given.to(torch.int64).reshape(-1, given.shape[-1])
    row = [collective.digests([given])[0], -1, 0, 0, 0]
    fall = ids.diff(dim=-1) < 0
    if lengths and given.numel() and int(ids[0, 0]) != 0:
        row[1:] = [0, 0, 0, int(ids[0, 0])]
    elif bool(fall.any()):
        b, at = (int(i) for i in fall.nonzero()[0])
        row[1:] = [b, at + 1, int(ids[b, at]), int(ids[b, at + 1])]
    elif lengths and given.numel() and int(ids[0, -1]) > t:
        row[1:] = [0, given.numel(), t, int(ids[0, -1])]
    return torch.tensor([row], dtype=torch.int64, device=given.device)


def _judge(given: Tensor, facts: Tensor, lengths: bool, t: int, alike: Sequence[int], firsts: Sequence[int]) -> Tensor:
    told = facts.tolist()
    for position, (row, first) in enumerate(zip(told, firsts, strict=True)):
        if row[1] >= 0:
            raise DispatchError(_fault(row, lengths, t, first, position))
    for position, (row, like) in enumerate(zip(told, alike, strict=True)):
        if row[0] != told[like][0]:
            raise DesyncError(
                f"attention: the {like + 1}. and the {position + 1}. rank of the mesh were given different "
                f"{'cu_seqlens' if lengths else 'document ids'} for the same sequences: give all the same"
            )
    if not lengths:
        return given.to(torch.int64).clone()
    ends = given.to(torch.int64)[1:].contiguous()
    return torch.searchsorted(ends, torch.arange(t, device=given.device), right=True)


def _fault(row: Sequence[int], lengths: bool, t: int, first: int, position: int) -> str:
    _, b, at, before, after = row
    if not lengths:
        return (
            f"attention: document ids decrease, from {before} to {after} at position {at} of sequence {b + first} (as "
            f"the {position + 1}. rank of the mesh has them): give ids in the order of the documents, such as 0 0 0 1 "
            "1 2; of position_ids that start again they are (position_ids == 0).cumsum(-1)"
        )
    if at == 0:
        return f"attention: cu_seqlens begin with {after}: give 0 first, then the end of each document"
    if before == t:
        return f"attention: cu_seqlens end with {after}, and the sequence has {t} positions: give ends up to {t}"
    return f"attention: cu_seqlens decrease, from {before} to {after} at place {at}: give 0, then ends in order"


def _judge_fake(given: Tensor, facts: Tensor, lengths: bool, t: int, *rest: Any) -> Tensor:
    return given.new_empty((t,) if lengths else given.shape, dtype=torch.int64)


_FACTS = operator(
    "document_facts(Tensor given, bool lengths, int t) -> Tensor", _facts,
    lambda given, lengths, t: given.new_empty((1, 5), dtype=torch.int64),
)  # fmt: skip
_JUDGED = operator(
    "document_ids(Tensor given, Tensor facts, bool lengths, int t, int[] alike, int[] firsts) -> Tensor", _judge,
    _judge_fake,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------- the op

IMPLEMENTATIONS["attention"] = IMPLEMENTATIONS["scaled_dot_product_attention"]


@part_of("mw.attention", "query", "documents")
@internal
def document_mask(query: Tensor, documents: Tensor | None, causal: bool, window: int) -> Tensor:
    """Which keys the rows of a query see."""
    return _mask(0, query.shape[-2], query, documents, causal, window)


@rule("document_mask")
def _mask_rule(query: Arg, documents: Arg | None, causal: bool, window: int) -> Rule:
    t, lead = query.shape[-2], ["..."] * (query.ndim > 3)
    inputs: dict[Arg, Any] = {query: [*lead, "h", "t", "d"]}
    if documents is not None:
        inputs[documents] = [*(lead if documents.ndim > 1 else []), "s"]

    def local(ctx: Local) -> LocalFn:
        return partial(_mask, ctx.bounds("t")[0], t)

    return notation(inputs, [*lead, "1", "t", "s"], sizes={"s": t}, whole="s", lends=[query], local=local)


def _mask(first: int, t: int, query: Tensor, documents: Tensor | None, causal: bool, window: int) -> Tensor:
    """Of rows from the ``first`` on, and ``t`` keys."""
    lead, rows = query.shape[:-3], query.shape[-2]
    which = QueryRows((0, first, rows), None, None if documents is None else _ids(documents, lead), causal, window)
    return seen(which, rows, t, query.device).expand(lead.numel(), 1, rows, t).reshape(*lead, 1, rows, t)


@part_of("mw.attention", "query", "key", "value")
@internal
def document_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, causal: bool, window: int, scale: float | None
) -> Tensor:
    """Attention of all rows, which lie on this rank."""
    return _attended(
        query, key, value, documents, QueryRows((0, 0, query.shape[-2]), None, None, causal, window), scale
    )


@rule("document_attention")
def _attention_rule(
    query: Arg, key: Arg, value: Arg, documents: Arg | None, causal: bool, window: int, scale: float | None
) -> Rule:
    """Sequences, heads and queries are free; keys and documents stay whole."""
    h, t = key.shape[-3], query.shape[-2]
    sizes = {"h": h, "g": query.shape[-3] // h, "t": t, "s": t}
    lead = ["..."] * (query.ndim > 3)
    inputs: dict[Arg, Any] = {
        query: [*lead, ("h", "g"), "t", "d"], key: [*lead, "h", "s", "d"], value: [*lead, "h", "s", "e"],
    }  # fmt: skip
    if documents is not None:
        inputs[documents] = [*(lead if documents.ndim > 1 else []), "s"]
    reach = window - 1 if causal and window and documents is None else None
    moved = ulysses_axes("attention", query, key, value, -1.0 if documents is not None else 0.0, reach=reach)
    bounds, joint = bounded("attention", query, key, value, moved, more=int(documents is not None))
    if reach is not None and (
        bounds is None or (bounds.name == "gather" and reached(reach, key, value) <= bounds.most)
    ):
        bounds, joint = None, list(near(query, key, value, moved))
    return notation(
        inputs, [*lead, ("h", "g"), "t", "e"], sizes=sizes, whole="s d e", linear=[value], heavy=True,
        local=partial(_local, bounds), joint=joint, decompose=ulysses(moved, document_attention),
    )  # fmt: skip


def _local(most: Bounds | None, ctx: Local) -> LocalFn:
    if most is None and ctx.axes("s"):
        return reaching(ctx, _attended)

    t, axes, bounds = ctx.rule.sizes["t"], ctx.axes("t"), ctx.spans("t")
    first, last = ctx.bounds("t")
    grouped = in_groups(ctx, most)
    if grouped is not None and most is not None and most.name == "heads":  # a group has all rows
        first, last, axes = 0, t, ()
    attended = grouped or attend

    def run(
        query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, causal: bool, window: int,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        which = QueryRows((0, first, last - first), None, None, causal, window)
        if not axes or documents is None or runtime.RT.explicit or not in_blocks(query, key, value) or not t:
            return _attended(query, key, value, documents, which, scale, attended)
        lead = query.shape[:-3]
        query, key, value = flat(query, key, value, 3)
        ids = _ids(documents, lead)
        dealt = Dealt(*_DEALT(ids, [n for b in bounds for n in b], ctx.place_in("t"), causal, window))
        counts = tuple(-(-(stop - start) // len(bounds)) for start, stop in bounds)
        n, own = len(bounds), counts[ctx.place_in("t")]
        there, why = AllToAllSpec(2, (1,) * n, 3, counts), _why(ids, bounds, causal, window)
        sent = _taken(query, dealt.order).unflatten(2, (n, own))
        rows = ctx.comm.all_to_all(sent, axes, there, why).squeeze(2)
        made = attended(rows, key, value, scale, which._replace(spans=(), rows=dealt.rows, documents=ids))
        back = ctx.comm.all_to_all(made.unsqueeze(2), axes, there.back(), why).flatten(2, 3)
        made = _taken(back, dealt.back)
        return made.reshape(*lead, *made.shape[1:])

    return run


def _attended(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, which: QueryRows, scale: float | None,
    attended: Attend = attend,
) -> Tensor:  # fmt: skip
    lead, ids = query.shape[:-3], None
    if documents is not None:
        ids = _ids(documents, lead)
    made = attended(*flat(query, key, value, 3), scale, which._replace(documents=ids))
    return made.reshape(*lead, *made.shape[1:])


def _ids(documents: Tensor, lead: Sequence[int]) -> Tensor:
    """An alias, of two dims: of each sequence or of all."""
    if documents.ndim == 1:
        return documents[None]
    return documents.expand(*lead, documents.shape[-1]).flatten(0, -2)


def _taken(x: Tensor, order: Tensor) -> Tensor:
    """Rows in another order, one behind the last being zeros."""
    index = order[:, None, :, None].expand(*x.shape[:2], order.shape[1], x.shape[3])
    return F.pad(x, (0, 0, 0, 1)).gather(2, index)


_WHY = "rows of documents are dealt out, so that all ranks have the same work"


def _why(documents: Tensor, bounds: Sequence[tuple[int, int]], causal: bool, window: int) -> str:
    """For the record, with the work of each rank; in a captured step that is another one for each batch."""
    if runtime.RT.records is None:
        return _WHY
    if documents.is_meta or isinstance(documents, FakeTensor):
        return f"{_WHY}, which hangs on each batch's documents"
    ids = np.ascontiguousarray(documents.cpu().numpy())
    flat_bounds = tuple(n for b in bounds for n in b)
    found, before = np.zeros(len(bounds)), np.zeros(len(bounds))
    for row, of_all in zip(ids, deal(ids.tobytes(), ids.shape, flat_bounds, causal, window), strict=True):
        keys = np.append(work(row, causal, window), 0)
        found += [sum(keys[of_rank[r]].sum() for of_rank in of_all) for r in range(len(bounds))]
        before += [keys[start:stop].sum() for start, stop in bounds]
    return f"{_WHY}: work per rank {shares(found.tolist())}, and without it {shares(before.tolist())}"


class Dealt(NamedTuple):
    """Who gets which rows.

    ``order``: the own ones, those for the first rank first; ``rows``: numbers in the sequence of those that come;
    ``back``: where the own rows are among those that come back.
    """

    order: Tensor
    rows: Tensor
    back: Tensor


def _deal(
    documents: Tensor, bounds: Sequence[int], position: int, causal: bool, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not len(documents):  # sequences are split too, and this rank has none
        return _deal_fake(documents, bounds, position)
    ids = np.ascontiguousarray(documents.cpu().numpy())
    shares = deal(ids.tobytes(), ids.shape, tuple(bounds), causal, window)
    first, last = bounds[2 * position : 2 * position + 2]
    order = np.stack([np.concatenate(of[position]) for of in shares])
    rows = np.stack([np.concatenate([of[source][position] for source in range(len(of))]) for of in shares])
    order = np.where(order < 0, last, order) - first
    back = order.argsort(1, kind="stable")[:, : last - first]
    made = [torch.from_numpy(np.ascontiguousarray(a)).to(documents.device) for a in (order, rows, back)]
    return made[0], made[1], made[2]


def _deal_fake(documents: Tensor, bounds: Sequence[int], position: int, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [stop - start for start, stop in zip(bounds[::2], bounds[1::2], strict=True)]
    n, lead = len(sizes), documents.shape[0]
    counts = [-(-size // n) for size in sizes]
    lengths = (n * counts[position], sum(counts), sizes[position])
    made = [documents.new_empty((lead, length), dtype=torch.int64) for length in lengths]
    return made[0], made[1], made[2]


_DEALT = operator(
    "dealt_rows(Tensor documents, int[] bounds, int position, bool causal, int window) -> (Tensor, Tensor, Tensor)",
    _deal, _deal_fake,
)  # fmt: skip


@lru_cache(maxsize=16)  # every layer asks for the same
def deal(
    ids: bytes, shape: tuple[int, int], bounds: tuple[int, ...], causal: bool, window: int
) -> list[list[list[Any]]]:
    """For each sequence, and each rank's rows, which of them go to which rank: as many to each, and the same work.

    Rows that follow each other circle-wise are one measure, the keys that they see the other: there is a window of
    1/n of the rows with 1/n of the work, since windows side by side have that on average, and one row more changes
    little (the two measures of necklace splitting: Alon, Splitting necklaces, 1987).  It is cut out; then the next.
    """
    n = len(bounds) // 2
    total = np.zeros(n, np.int64)
    made = []
    for row in np.frombuffer(ids, np.int64).reshape(shape):
        seen = np.append(work(row, causal, window), 0)  # one behind the last: of rows that fill up
        of_all = []
        for first, last in zip(bounds[::2], bounds[1::2], strict=True):
            parts = _cut(np.arange(first, last), seen, n)
            costs = np.array([seen[p].sum() for p in parts])
            of_rank: list[Any] = [None] * n
            # The most work to who has the least so far.
            for part, rank in zip(np.argsort(-costs, kind="stable"), np.argsort(total, kind="stable"), strict=True):
                of_rank[rank] = parts[part]
            total = total + np.array([seen[p].sum() for p in of_rank])
            of_all.append(of_rank)
        made.append(of_all)
    return made


def _cut(rows: Any, seen: Any, n: int) -> list[Any]:
    """Rows in ``n`` parts of one length, filled up by -1, with about the same work in each."""
    size = -(-len(rows) // n)
    left = np.concatenate([rows, np.full(n * size - len(rows), -1)])
    parts = []
    for parts_left in range(n, 1, -1):
        sums = np.concatenate([[0], np.cumsum(seen[left])])
        of_windows = sums[size:] - sums[: len(sums) - size]
        at = int(np.abs(of_windows * parts_left - sums[-1]).argmin())
        parts.append(left[at : at + size])
        left = np.concatenate([left[:at], left[at + size :]])
    return [*parts, left]
