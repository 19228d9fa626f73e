"""Steps between layouts as values: what each changes, its transpose, and how it runs.

With ``Spec.grad`` as the dual (``Shard`` is its own, invariant ``Replicate`` is its own, reduced ``Replicate`` and
``Partial`` are each other's), the transpose of ``A -> B`` is ``B.grad() -> A.grad()``.  The whole table of the design
page follows from that line; the idea is Xu et al., GSPMD, and JAX's varying/unreduced types.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .. import collective
from ..errors import ConversionError
from ..layout import REPLICATE, At, Partial, Placement, Replicate, Shard, Spec, Wire


@dataclass(frozen=True, slots=True, eq=False)
class ConversionStep:
    """One conversion: ``kind`` over ``axes`` from ``src`` to ``dst``.

    Kinds: ``retype`` (no data changes), ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``all_to_all``,
    ``slice`` (own part of a replicated value), ``keep_one`` (value on the first rank, elsewhere what changes nothing
    in the reduction), ``pad`` (own shard within the same), ``scale`` (between a sum and an average), ``cast`` (to
    another dtype: of steps as they run, see :func:`lowered`), ``wire_all_reduce`` and ``wire_reduce_scatter`` (of
    steps as they run too: sums of parts that travel in another format), ``wire_all_gather`` (of parts that do: only
    of parameters, where they are seen; see :func:`gathered_as`), ``to_device`` and ``to_host`` (copies between the
    memory of the host and that of the mesh's device).
    """

    kind: str
    axes: tuple[int, ...]
    src: Spec
    dst: Spec

    @property
    def moves(self) -> bool:
        """Whether data crosses between ranks: over axes of one rank none does."""
        return self.kind in collective.KINDS and any(self.src.mesh.sizes[a] > 1 for a in self.axes)

    @property
    def adds(self) -> bool:
        """Whether what several ranks hold is added up."""
        return self.moves and op_of(self.src, self) in collective.ADDS

    @property
    def reduces(self) -> bool:
        """Whether it is a reduction over ranks."""
        return self.kind in collective.KINDS and collective.KINDS[self.kind].reduces

    @property
    def travels(self) -> Wire:
        """In what it sends values."""
        wire = self.src.comm_format
        return self.src.dtype if wire is None or not collective.KINDS[self.kind].wired else wire

    @property
    def rounds(self) -> bool:
        """Whether what several ranks hold is added up in the dtype in which it travels."""
        return self.adds and not collective.KINDS[self.kind].wired

    def transpose(self) -> ConversionStep:
        """The step that the backward of this one runs."""
        return _transpose(self)

    def __repr__(self) -> str:
        axes = ",".join(self.src.mesh.axes[a] for a in self.axes)
        return f"{self.kind}[{axes}] {self.src.layout!r} -> {self.dst.layout!r}"


@lru_cache(maxsize=2048)
def _transpose(step: ConversionStep) -> ConversionStep:
    # The shares of the parts are constants of the forward, so but for them a reduction is transposed as a sum is.
    src = step.src.dual()
    if op_of(step.src, step):
        mask = sum(1 << a for a in step.axes)
        src = replicated(src, step.axes).with_(grad_partial_mask=src.grad_partial_mask | mask)
    return between(step.dst.dual(), src, step.axes)


def op_of(spec: Spec, step: ConversionStep) -> str | None:
    """By what the axes of a step are reduced in one of its specs."""
    p = spec.layout.placements[step.axes[0]]
    return p.op if isinstance(p, Partial) else None


@lru_cache(maxsize=2048)
def weighted(step: ConversionStep) -> bool:
    """Whether the parts of the result or of what is reduced have shares of the gradient that hang on the data."""
    if step.kind == "retype" or not step.axes:
        return False
    return op_of(step.src, step) not in (None, "sum") or op_of(step.dst, step) == "product"


def replicated(spec: Spec, axes: tuple[int, ...]) -> Spec:
    layout = spec.layout
    for a in axes:
        layout = layout.replace(a, REPLICATE)
    return spec.with_(layout=layout)


def between(src: Spec, dst: Spec, axes: tuple[int, ...]) -> ConversionStep:
    """The step from ``src`` to ``dst``, which differ on ``axes`` only.

    Raises ConversionError if there is none, and where it would touch an axis that is undecided: what its transpose
    does to a gradient there hangs on a type that is given to the value later.
    """
    if src.undecided_mask != dst.undecided_mask or any(src.undecided_mask >> a & 1 for a in axes):
        raise ConversionError(f"the types of {src!r} and {dst!r} on the axes of a step must be decided before it")
    kinds = {_kind(src, dst, a) for a in axes}
    if len(kinds) > 1:
        kinds.discard("retype")
    if len(kinds) > 1:  # over an axis of one rank there is nothing to do
        axes = tuple(a for a in axes if src.mesh.sizes[a] > 1)
        kinds = {_kind(src, dst, a) for a in axes}
    if len(kinds) != 1:
        raise ConversionError(f"no single step leads from {src!r} to {dst!r}: it would mix {sorted(kinds)}")
    return ConversionStep(kinds.pop(), axes, src, dst)


def _kind(src: Spec, dst: Spec, axis: int) -> str:
    a, b = src.layout.placements[axis], dst.layout.placements[axis]
    return kind_of(a, b)


def kind_of(a: Placement, b: Placement) -> str:
    """The kind of step that leads from one placement to another.  Raises ConversionError if there is none."""
    if isinstance(a, Replicate):
        if isinstance(b, Replicate):
            return "retype"
        if isinstance(b, (Shard, At)):
            return "slice"
        # The same value everywhere is its own average and extremum, but not its own sum.
        return "keep_one" if b.op in ("sum", "product") else "retype"
    if isinstance(a, Partial):
        if isinstance(b, Replicate):
            return "all_reduce"
        if isinstance(b, (Shard, At)):
            return "reduce_scatter"
        if a.op == b.op:
            return "retype"
        if {a.op, b.op} == {"sum", "avg"}:
            return "scale"
        raise ConversionError(f"a Partial({a.op!r}) cannot become a Partial({b.op!r}) without being reduced")
    if isinstance(b, (Shard, At)):
        if isinstance(a, At) or isinstance(b, At):
            raise ConversionError(f"{a!r} becomes {b!r} by way of Replicate")
        if a.dim == b.dim and a != b:
            raise ConversionError(f"{a!r} becomes {b!r} by way of Replicate")
        return "all_to_all"
    return "all_gather" if isinstance(b, Replicate) else "pad"


@lru_cache(maxsize=2048)
def lowered(steps: tuple[ConversionStep, ...]) -> tuple[ConversionStep, ...]:
    """The steps as they run.

    A value that is summed in a wider dtype (``Spec.reduce_dtype``) is cast before the first sum and back after the last
    one, so that it is rounded once.  Shards with a communication format (``Spec.comm_format``) are exchanged, and
    summed where they arrive.
    """
    return tuple(
        ConversionStep(f"wire_{s.kind}", s.axes, s.src, s.dst) if s.adds and s.src.comm_format is not None else s
        for s in _widened(steps)
    )


@lru_cache(maxsize=2048)
def gathered_as(steps: tuple[ConversionStep, ...], wire: Wire) -> tuple[ConversionStep, ...]:
    """The steps with what they gather travelling in a format; forward only: rounding has no transpose."""
    sent = wire, None
    return tuple(
        ConversionStep("wire_all_gather", s.axes, s.src.with_(comm_formats=sent), s.dst)
        if s.kind == "all_gather"
        else s
        for s in steps
    )


def _widened(steps: tuple[ConversionStep, ...]) -> tuple[ConversionStep, ...]:
    sums = [i for i, s in enumerate(steps) if s.adds]
    if not sums or (dtype := steps[sums[0]].src.reduce_dtype) is steps[sums[0]].src.dtype:
        return steps
    first, last = steps[sums[0]], steps[sums[-1]]
    wide = [
        ConversionStep(s.kind, s.axes, s.src.with_(dtype=dtype), s.dst.with_(dtype=dtype))
        for s in steps[sums[0] : sums[-1] + 1]
    ]
    before, after = (
        ConversionStep("cast", (), first.src, wide[0].src),
        ConversionStep("cast", (), wide[-1].dst, last.dst),
    )
    return (*steps[: sums[0]], before, *wide, after, *steps[sums[-1] + 1 :])


@lru_cache(maxsize=2048)
def transpose(steps: tuple[ConversionStep, ...]) -> tuple[ConversionStep, ...]:
    """The steps that the backward of ``steps`` runs, in its order.

    Each is the transpose of one forward step, but steps over several axes of one kind may be one.
    """
    return tuple(step.transpose() for step in reversed(steps))


__all__ = [
    "ConversionStep",
    "between",
    "gathered_as",
    "kind_of",
    "lowered",
    "op_of",
    "replicated",
    "transpose",
    "weighted",
]
