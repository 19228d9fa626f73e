"""Rows that a local function gets of other ranks and gives back: differentiable, and recorded as conversions are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import collective
from ..mesh import Mesh
from .sending import Said, noted, recorded, transposed

Tensor = torch.Tensor


@dataclass(frozen=True)
class RowExchange:
    """How the ranks of a group exchange rows, in one call of an op.

    Attributes:
        op: of which it is.
        axes: the mesh axes of the group.
        sizes: how many rows each rank of the group has.
        why: for the records.
    """

    op: str
    mesh: Mesh
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    why: str

    def all(self, x: Tensor) -> Tensor:
        """All rows of all ranks, (own rows, columns), without a gradient: whole numbers, which say who wants what."""
        group = self._group()
        said = self._record("all_gather", x.shape[1], 0, x)
        with noted(said):
            return collective.all_gather(x, 0, self.sizes, group)

    def gather(self, wanted: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """The rows of all ranks that this one wants, (sum(sizes), ...); gradients go back as by :meth:`scatter`.

        Args:
            wanted: (ranks, sum(sizes)), the same on all.
            given: (own rows, columns) each; those of one dtype go in one message, side by side.
        """
        made = list[Tensor](given)
        for dtype in dict.fromkeys(t.dtype for t in given):
            which = [i for i, t in enumerate(given) if t.dtype == dtype]
            for i, t in zip(which, self._sent(False, wanted, [given[i] for i in which]), strict=True):
                made[i] = t
        return tuple(made)

    def scatter(self, x: Tensor, wanted: Tensor) -> Tensor:
        """The sum of what ranks have of the own rows, (own rows, columns), of each the rows that it wanted."""
        return self._sent(True, wanted, [x])[0]

    def _sent(self, summed: bool, wanted: Tensor, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        of_all, of_grads = (sum(t.shape[1] for t in given if not g or t.requires_grad) for g in (False, True))
        said = self._record("scatter_rows" if summed else "gather_rows", of_all, of_grads, *given)
        made: tuple[Tensor, ...] = _Rows.apply(summed, wanted, self.sizes, self._group(), said, *given)
        return made

    def _group(self) -> collective.Group:
        return collective.group(self.mesh, self.axes)

    def _record(self, kind: str, columns: int, back: int, *given: Tensor) -> Said:
        """What is sent at most, of rows of so many columns; of their gradients ``back``."""
        n, group, x = len(self.sizes), self._group(), next((t for t in given if t.requires_grad), given[0])
        each = (n - 1) * sum(self.sizes) * x.element_size()
        sent = each * columns // n, each * back // n
        return recorded(self.op, kind, x, (x.shape[0], columns), group, self.why, *sent)


class _Rows(torch.autograd.Function):
    """Rows to those who want them, or summed by those who have them; each is the other's transpose."""

    @staticmethod
    def forward(
        ctx: Any, summed: bool, wanted: Tensor, sizes: Sequence[int], group: collective.Group, said: Said,
        *given: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.summed, ctx.given = summed, (sizes, group, transposed(said, "gather_rows" if summed else "scatter_rows"))
        ctx.save_for_backward(wanted)
        send = collective.scatter_rows if summed else collective.gather_rows
        with noted(said):
            made = send(given[0] if len(given) == 1 else torch.cat(given, 1), wanted, sizes, group)
        parts = made.split([t.shape[1] for t in given], 1) if len(given) > 1 else (made,)
        # Else all would have gradients that one has, and who computes them would compute those too.
        ctx.mark_non_differentiable(*[t for t, need in zip(parts, ctx.needs_input_grad[5:], strict=True) if not need])
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[5:]
        back = iter(
            _Rows.apply(
                not ctx.summed, *ctx.saved_tensors, *ctx.given, *[g for g, n in zip(grads, needs, strict=True) if n]
            )
        )
        return *[None] * 5, *[next(back) if need else None for need in needs]
