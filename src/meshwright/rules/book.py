"""The book of rules: what each op's rule says, shown on one example of a call."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import RuleError
from ..layout import REDUCE_OPS, Partial
from .factor_notation import COMPOSITES, RULES, Arg, Rule, args_in
from .pointwise import is_pointwise, pointwise_rule

# One call for ops that are called alike: arguments (f: floats, i: integers, b: bools, by their shapes), then the ops.
_EXAMPLES = """
f(4,6) | neg negative deg2rad rad2deg zeros_like empty_like zero clone contiguous detach alias positive conj _conj cpu
f(4,6) | cuda conj_physical lift_fresh resolve_conj resolve_neg pin_memory frexp H T mH mT adjoint matrix_H numpy_T t
f(4,6) | all any amax amin aminmax argmax argmin argsort max min mean sum nansum median nanmedian mode msort prod std
f(4,6) | std_mean var var_mean trace tril triu count_nonzero dropout dropout_ alpha_dropout alpha_dropout_
f(4,6) | feature_dropout feature_dropout_ bernoulli bernoulli_ feature_alpha_dropout feature_alpha_dropout_
f(4,6) | native_dropout rrelu rrelu_ normal normal_ log_normal_ cauchy_ exponential_ geometric_ uniform_ random_
f(4,6) | rand_like randn_like flatten ravel fliplr flipud glu diag diagonal linalg_diagonal diag_embed diff
f(4,6) | linalg_norm linalg_vector_norm rot90 sort squeeze squeeze_ unbind float double half bfloat16 cfloat cdouble
f(4,6) | chalf long int short char byte bool carrier ones_like
f(4,6), 1.0 | full_like
f(4,6), 2, 1 | repeat_interleave
c(4,6) | real imag view_as_real
f(4,2) | view_as_complex
f(4,6), f(4,6) | add sub subtract rsub mul multiply div divide true_divide ldexp copy complex isin
f(4,6), f(4,6) | binary_cross_entropy mse_loss binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div
f(4,6), f(4,6) | l1_loss poisson_nll_loss smooth_l1_loss soft_margin_loss cosine_similarity pairwise_distance
f(4,6), f(4,6) | linalg_vecdot inner
f(4,6), f(4,6), f(4,6) | addcdiv addcmul lerp triplet_margin_loss margin_ranking_loss
b(4,6), f(4,6), f(4,6) | where
f(4,6), b(4,6), 0.0 | masked_fill
f(4,6), torch.bfloat16 | to type _to_copy
f(4,6), (6,4) | reshape _reshape_alias _unsafe_view view new_empty new_zeros new_ones
f(4,6), (6,4), 1.0 | new_full
f(4,1), (4,6) | expand broadcast_to
f(4,1), f(4,6) | expand_as
f(4,6), 1 | F.softmax softmax log_softmax F.log_softmax special_softmax special_log_softmax cummax cummin cumprod
f(4,6), 1 | cumsum logcumsumexp logsumexp special_logsumexp kthvalue unsqueeze
f(4,6), (1, 0) | permute
f(4,6), 0, 1 | transpose swapaxes swapdims movedim moveaxis
f(4,6), (1,) | flip
f(4,6), 2 | chunk unsafe_chunk split unsafe_split tensor_split topk hsplit vsplit roll
f(4,6,8), 2 | dsplit
f(4,6), (2,4), 1 | split_with_sizes unsafe_split_with_sizes
f(4,6), 1, 0 | select
f(4,6), 1, 2, 4 | slice narrow
f(4,6), 1, 2, 2 | unfold
f(4,6), 1, (2,3) | unflatten
f(4,6), (2,2) | repeat tile
f(4,6), (1,1) | constant_pad_nd pad
f(4,6), 0.5, 1 | quantile nanquantile
f(4,6), 2, 1, 1.0 | renorm
f(4,6), 9 | randint_like
f(4,6), f(4), 1, 0 | select_scatter
f(4,6), f(4,3), 1, 0, 3 | slice_scatter
f(4,6), (slice(None), slice(0, 3)) | getitem
f(4,6), slice(0, 2), f(2,6) | setitem
f(4,6), [i(5)] | index
f(4,6), [i(5)], f(5,6) | index_put index_put_ _unsafe_index_put
f(4,6), 0, i(5) | index_select
f(4,6), 0, i(5), 0.0 | index_fill
f(4,6), 0, i(5), f(5,6) | index_add index_copy
f(4,6), 1, i(4,3) | gather
f(4,6), 1, i(4,3), f(4,3) | scatter scatter_add
f(4,6), 1, i(4,3), f(4,3), 'sum' | scatter_reduce
i(4), 6 | one_hot
f(4,6), f(9) | bucketize
f(9), f(4,6) | searchsorted
[f(4,6), f(2,6)] | cat concat concatenate
[f(4,6), f(4,6)] | stack
f(4,6), f(8,6), f(8) | linear
f(4,6), f(6,8) | matmul mm linalg_matmul
f(2,4,6), f(2,6,8) | bmm
f(4,6), f(6) | mv prelu
f(6), f(6) | dot vdot
f(4), f(6) | outer ger
f(2,3), f(4,5) | kron
f(4,6), (3,2), (2,1), 0 | elements_by_strides
f(4,6), f(3,2), (3,2), (2,1), 0 | scatter_by_strides
f(4,8), f(4,6), f(6,8) | addmm
f(4), f(4,6), f(6) | addmv
f(4,6), f(4), f(6) | addr
f(4,8), f(2,4,6), f(2,6,8) | addbmm
f(2,4,8), f(2,4,6), f(2,6,8) | baddbmm
f(4,6), f(4,8), f(5,6,8), f(5) | bilinear
'ik,kj->ij', f(4,6), f(6,8) | einsum
f(4,6), f(6,8), 1 | tensordot
f(4,3), f(4,3) | linalg_cross
f(2,4,4), f(2,4,3) | linalg_solve_triangular
f(2,6,4,3), f(2,6,4,3), f(2,6,4,5), f(2,6,4), f(2,6,4), 4 | gated_delta_rows
None, True, f(6,4), f(6,4) | associative_scan_rows
f(4,6), f(5,6) | cdist
f(2,4,6,8), f(2,4,6,8), f(2,4,6,8) | scaled_dot_product_attention
f(2,4,6,8), f(2,2,6,8), f(2,2,6,8), i(2,6), True, 0, None | document_attention
f(2,4,6,8), i(2,6), True, 0 | document_mask
i(2,6), False, 6 | checked_documents
i(4,6), f(9,8) | F.embedding
f(9,8), i(4,6) | embedding
f(4,6), (6,), f(6), f(6) | layer_norm F.layer_norm
f(4,6), (6,), f(6) | rms_norm F.rms_norm
f(2,4,8), 2, f(4), f(4) | group_norm
f(2,4,8), f(4), f(4), None, None, True, 0.1, 1e-5, False | batch_norm instance_norm
f(4), f(4), 0.1 | blend_running
f(4,6), i(4,2), f(4,2), f(3,2,5,6), f(3,6,5), None, None, "silu", True | expert_outputs meshwright::experts
i(4,6), 3 | meshwright::expert_load
f(4,6), f(4,6) | laid_as
f(4,6), i(4) | cross_entropy_loss nll_loss nll_loss_nd multi_margin_loss
f(2,4,6,8), i(2,6,8) | nll_loss2d
f(4,6), f(4,6), f(4) | cosine_embedding_loss
f(4,6), i(4,6) | multilabel_margin_loss
f(4,6), f(4), i(4), None, -100, False | class_sums
f(4,6), f(8,6), None, i(4), None, -100, 2, False | head_sums
f(2,4), f(4), i(4), -100 | class_loss
i(4), None, -100 | target_weights
f(4,6), (1,), True | extremum
f(4,6), f(4,1), (1,) | first_index
f(4,6), 1, False, None | partial_prod whole_prod
f(2,4,8), 2 | avg_pool1d max_pool1d max_pool1d_with_indices adaptive_avg_pool1d adaptive_max_pool1d
f(2,4,8,8), (2,2) | avg_pool2d max_pool2d max_pool2d_with_indices adaptive_avg_pool2d adaptive_max_pool2d
f(2,4,8,8,8), (2,2,2) | avg_pool3d max_pool3d max_pool3d_with_indices adaptive_avg_pool3d adaptive_max_pool3d
f(2,4,8,8), (2,2), (4,4), f(2,4,2) | fractional_max_pool2d
f(2,4,8,8,8), (2,2,2), (4,4,4), f(2,4,3) | fractional_max_pool3d
f(2,4,4,4), i(2,4,4,4), (8,8) | max_unpool2d
f(2,4,4,4,4), i(2,4,4,4,4), (8,8,8), (2,2,2), (0,0,0) | max_unpool3d
f(2,4,9), f(6,4,3), f(6) | conv1d
f(2,4,9), f(4,6,3), f(6) | conv_transpose1d
f(2,4,9,9), f(6,4,3,3), f(6) | conv2d
f(2,4,9,9), f(4,6,3,3), f(6) | conv_transpose2d
f(2,4,9,9,9), f(6,4,3,3,3), f(6) | conv3d
f(2,4,9,9,9), f(4,6,3,3,3), f(6) | conv_transpose3d
f(2,4,9,9), f(6,4,3,3), f(6), (1,1), (0,0), (1,1), False, (0,0), 1 | convolution
f(2,4,9,9), (3,3), (1,1), (0,0), (1,1) | im2col
f(2,36,49), (9,9), (3,3), (1,1), (0,0), (1,1) | col2im
f(2,4,6,6), 2 | pixel_shuffle pixel_unshuffle
f(2,4,8), (16,) | upsample_nearest1d _upsample_nearest_exact1d
f(2,4,8), (16,), False | upsample_linear1d
f(2,4,8,8), (16,16) | upsample_nearest2d _upsample_nearest_exact2d
f(2,4,8,8), (16,16), False | upsample_bicubic2d upsample_bilinear2d _upsample_bicubic2d_aa _upsample_bilinear2d_aa
f(2,4,8,8), (16,16), False | _upsample_lanczos2d_aa
f(2,4,8,8,8), (16,16,16) | upsample_nearest3d _upsample_nearest_exact3d
f(2,4,8,8,8), (16,16,16), False | upsample_trilinear3d
f(2,4,8,8), f(2,5,5,2), 0, 0, False | grid_sampler grid_sampler_2d
f(2,4,8,8,8), f(2,5,5,5,3), 0, 0, False | grid_sampler_3d
f(2,2,3), (2,4,8,8), False | affine_grid_generator
f(5,4,3), f(1,4,6), [f(18,3), f(18,6)], False, 1, 0.0, False, False, False | gru
f(5,4,3), f(1,4,6), [f(6,3), f(6,6)], False, 1, 0.0, False, False, False | rnn_tanh rnn_relu
f(5,4,3), [f(1,4,6), f(1,4,6)], [f(24,3), f(24,6)], False, 1, 0.0, False, False, False | lstm
"""
_CALLS = {op: call.strip() for call, _, ops in (x.partition("|") for x in _EXAMPLES.splitlines()) for op in ops.split()}


@dataclass(frozen=True)
class Entry:
    """One op of the book.

    Attributes:
        op: its name.
        kind: ``"rule"``, ``"pointwise"`` (known by PyTorch's tag), ``"composite"`` (computed as other ops) or
            ``"gathered"`` (runs on every rank on whole inputs).
        notation: the rule's line for an example of a call, empty without one (the line may depend on the arguments).
        linear: the groups of arguments in which it is jointly linear, by name.
        moves: it only moves elements, so that a Partial of any reduction passes.
        source: file and line of the rule.
        passes: the reductions of a Partial that it keeps, in some argument.
    """

    op: str
    kind: str
    notation: str = ""
    linear: tuple[tuple[str, ...], ...] = ()
    moves: bool = False
    source: str = ""
    passes: tuple[str, ...] = ()

    def __str__(self) -> str:
        groups = ", ".join("{" + ", ".join(g) + "}" for g in self.linear)
        parts = [f"{self.op}: {self.kind}", self.notation, f"linear in {groups}" if groups else "", self.source]
        return "  ".join(p for p in parts if p)


def rules(pattern: str = "*") -> list[Entry]:
    """The book of rules: every op that has one, or is computed as a composition of others, sorted by name.

    Args:
        pattern: a glob over names; the name of an elementwise op is found too.

    Raises:
        RuleError: nothing has such a name; says which names are close.
    """
    known = {*RULES, *COMPOSITES}
    found = sorted(n for n in known if fnmatch.fnmatchcase(n, pattern))
    if not found and is_pointwise(pattern):
        found = [pattern]
    if not found:
        raise RuleError(f"no op {pattern!r} is in the book of rules{did_you_mean(pattern, known)}")
    return [entry(n) for n in found]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean ...?"``, or nothing where no known name is close."""
    close = difflib.get_close_matches(name, sorted(known), n=3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def entry(name: str) -> Entry:
    """What the book has on one op."""
    if name in COMPOSITES:
        return Entry(name, "composite", source=_source(COMPOSITES[name]))
    fn: Any = RULES.get(name)
    if fn is None and not is_pointwise(name):
        return Entry(name, "gathered")
    kind, call = ("pointwise", "f(4,6)") if fn is None else ("rule", _CALLS.get(name, ""))
    made, names = _shown(fn or pointwise_rule, call)
    if made is None:
        return Entry(name, kind, source=_source(fn))
    groups = tuple(tuple(names[i] for i in sorted(g)) for g in made.linear)
    passes = tuple(op for op in REDUCE_OPS if any(made.by_partial(Partial(op), None)))
    return Entry(name, kind, made.text, groups, made.moves, _source(fn), passes)


def _shown(fn: Any, call: str) -> tuple[Rule | None, list[str]]:
    """The rule for the example of a call, and the names of its tensors; None where there is none."""
    if not call:
        return None, []
    count = iter(range(99))

    def tensor(dtype: torch.dtype) -> Any:
        return lambda *shape: Arg(next(count), shape, dtype)

    kinds = {"f": torch.float32, "i": torch.int64, "b": torch.bool, "c": torch.complex64}
    given = eval(f"({call},)", {"torch": torch, "slice": slice, **{k: tensor(v) for k, v in kinds.items()}})
    return fn(*given), list(_names(fn, given))


def _names(fn: Any, given: tuple[Any, ...]) -> Iterator[str]:
    """A name per tensor argument: its parameter's, numbered where the parameter takes several."""
    for name, value in inspect.signature(fn).bind(*given).arguments.items():
        tensors = list(args_in(((value,), {})))
        yield from [name] if len(tensors) == 1 else (f"{name}[{i}]" for i in range(len(tensors)))


def _source(fn: Any) -> str:
    fn = inspect.unwrap(fn) if fn else None
    code = getattr(fn, "__code__", None)
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno}" if code else ""


def _why(e: Entry) -> str:
    if e.kind == "composite":
        return "computed as other ops, which say"
    if e.moves:
        return "only moves elements"
    groups = " or in ".join(" and ".join(f"`{n}`" for n in g) for g in e.linear)
    together = " together" if any(len(g) > 1 for g in e.linear) else ""
    return f"linear in {groups}{together}" if groups else "not linear"


def partial_table() -> str:
    """For every op of PyTorch in the book and each reduction: whether a Partial passes or is reduced first, and why.

    Markdown; ops that answer alike share a row.
    """
    rows: dict[tuple[str, ...], list[str]] = {}
    for e in rules():
        if e.op.startswith("_foreach") or "::" in e.op:
            continue  # one op of the same name per tensor; the user's own
        cells = [("passes" if op in e.passes else "reduces") if e.kind != "composite" else "-" for op in REDUCE_OPS]
        rows.setdefault((*cells, _why(e)), []).append(f"`{e.op}`")
    lines = [f"| {' | '.join(('op', *REDUCE_OPS, 'why'))} |", "|---" * (len(REDUCE_OPS) + 2) + "|"]
    for (*cells, why), ops in sorted(rows.items(), key=lambda row: (row[0][:-1], len(row[0][-1]), row[0])):
        lines.append(f"| {', '.join(ops)} | {' | '.join(cells)} | {why} |")
    return "\n".join(lines)
