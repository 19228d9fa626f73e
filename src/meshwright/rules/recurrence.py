"""The gated delta rule along a split sequence: ranks work at once, and pass on what a part does to a state.

A state of (k, v) numbers per head is decayed, corrected and read at each position (Yang et al., Gated Delta Networks,
arXiv 2412.06464).  In chunks this is a linear recurrence of states, ``S' = A S + B``: what a part of the sequence does
to the state before it is one such pair, too, whatever its length.  So each rank computes its rows for a state of zeros
and what they would add for another; pairs are exchanged; and each adds what the state before it makes of its rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..errors import DispatchError
from ..operators import internal, opaque_operator, part_of
from .dims import nothing
from .factor_notation import Arg, Local, LocalFn, Rule, composite, notation, rule

Tensor = torch.Tensor


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """What queries read of a state that each position decays and corrects towards its value.

    At each position ``S = exp(decay) * S``, then ``S += key (beta * (value - S^T key))^T``, and the output is
    ``S^T query``.

    Args:
        query, key: (b, t, heads, k), as they are to be multiplied: normed and scaled.
        value: (b, t, heads, v).
        decay, beta: (b, t, heads); the decay as a logarithm, not above 0.
        chunk: how many positions are computed at once.

    Returns:
        (b, t, heads, v), of the dtype of ``value``.

    Raises:
        DispatchError: shapes that do not fit together.
    """
    lead = query.shape[:3]
    fits = query.ndim == value.ndim == 4 and key.shape == query.shape and chunk > 0
    if not fits or any(t.shape[:3] != lead for t in (value, decay, beta)) or decay.ndim != 3 or beta.ndim != 3:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value, decay, beta))
        raise DispatchError(
            f"gated_delta_rule: {shapes} do not fit: give query and key (b, t, heads, k), value (b, t, heads, v), "
            "decay and beta (b, t, heads), and a chunk of at least 1"
        )
    made: Tensor = _WHOLE(query, key, value, decay, beta, chunk)
    return made


class _Chunks(NamedTuple):
    """Chunks of a part, (b, heads, chunks, ...): what each makes of the state before it.

    ``after``: (k, k) and ``added``: (k, v), of the next state; ``read``: (chunk, k) and ``own``: (chunk, v), of its
    outputs.
    """

    after: Tensor
    added: Tensor
    read: Tensor
    own: Tensor


def _chunked(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunk: int) -> _Chunks:
    t = query.shape[1]
    missing = -t % chunk if t else chunk
    wide = torch.promote_types(value.dtype, torch.float32)

    def cut(x: Tensor) -> Tensor:
        x = F.pad(x.transpose(1, 2).to(wide), [0, 0] * (x.ndim - 3) + [0, missing])
        return x.unflatten(2, (-1, chunk))

    q, k, v, g, b = map(cut, (query, key, value, decay, beta))
    total = g.cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    pairs = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    weighted, so_far = k * b.unsqueeze(-1), total.exp().unsqueeze(-1)
    # Each correction is of what those before it in the chunk have left: a triangular system.
    system = (weighted @ k.transpose(-1, -2)) * pairs
    given = torch.cat([weighted * so_far, v * b.unsqueeze(-1)], -1)
    solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    from_state, from_values = solved.split([k.shape[-1], v.shape[-1]], -1)
    within = (q @ k.transpose(-1, -2)) * pairs
    kept = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    unit = torch.eye(k.shape[-1], dtype=wide, device=q.device)
    return _Chunks(
        so_far[..., -1:, :] * unit - kept @ from_state, kept @ from_values, q * so_far - within @ from_state,
        within @ from_values,
    )  # fmt: skip


def _rows_of(chunks: _Chunks, states: Tensor, like: Tensor) -> Tensor:
    """The outputs of chunks with these states before them, (b, t, heads, v)."""
    made = (chunks.read @ states + chunks.own).flatten(2, 3).narrow(2, 0, like.shape[1])
    return made.transpose(1, 2).to(like.dtype)


def _states(chunks: _Chunks, first: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """The states before each chunk, and the one after the last."""
    found, state = [], first
    for after, more in zip(chunks.after.unbind(2), added.unbind(2), strict=True):
        found.append(state)
        state = after @ state + more
    return torch.stack(found, 2), state


@part_of("gated delta rule", "query", "key", "value", "decay", "beta")
@internal
def gated_delta_rows(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """The rows of one device."""
    chunks = _chunked(query, key, value, decay, beta, chunk)
    states, _ = _states(chunks, torch.zeros_like(chunks.added[:, :, 0]), chunks.added)
    return _rows_of(chunks, states, value)


_WHOLE = opaque_operator(
    "gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, int chunk) -> Tensor",
    gated_delta_rows,
)
composite("meshwright::gated_delta_rule")(gated_delta_rows)

_PASSED_ON = "each part of a recurrence begins with what the parts before it make of its state"


@rule("gated_delta_rows")
def _rows_rule(query: Arg, key: Arg, value: Arg, decay: Arg, beta: Arg, chunk: int) -> Rule:
    """Batch, heads and columns of the state are free; along the sequence parts pass on what they do to a state."""
    t = query.shape[1]

    def local(ctx: Local) -> LocalFn | None:
        if not ctx.is_split("t"):
            return None
        parts, axes = ctx.parts("t"), ctx.axes("t")
        held, wanted = [[(p, p + 1)] for p in parts], [[(0, p)] for p in parts]

        def run(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunk: int) -> Tensor:
            chunks = _chunked(query, key, value, decay, beta, chunk)
            zeros, v = torch.zeros_like(chunks.added[:, :, 0]), value.shape[-1]
            unit = torch.eye(zeros.shape[-2], dtype=zeros.dtype, device=zeros.device).expand(*zeros.shape[:-1], -1)
            none = torch.zeros_like(chunks.after)
            # Columns of the state for one of zeros, and those of what a part does to any.
            states, after = _states(chunks, torch.cat([zeros, unit], -1), torch.cat([chunks.added, none], -1))
            before = ctx.comm.fetch_rows(after.unsqueeze(0), 0, axes, held, wanted, _PASSED_ON)
            first = zeros + nothing((), before)
            for own, does in ((row[..., :v], row[..., v:]) for row in before.unbind(0)):
                first = does @ first + own
            return _rows_of(chunks, states[..., :v] + states[..., v:] @ first.unsqueeze(2), value)

        return run

    letters: Any = ["b", "t", "h", "k"]
    inputs = {query: letters, key: letters, value: ["b", "t", "h", "v"], decay: letters[:3], beta: letters[:3]}
    crossing = {"t": t} if t > 1 else {}
    return notation(
        inputs, ["b", "t", "h", "v"], whole="k" if crossing else "k t", linear=[value], heavy=True, local=local,
        crossing=crossing,
    )  # fmt: skip
