"""Kernels of attention of GPUs, without one: chosen and typed on fake tensors, and their arithmetic emulated here."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshwright as mw
from meshwright import kernels
from meshwright.rules import attention_blocks as blocks
from meshwright.rules import attention_kernels as table
from meshwright.rules.attention_tiles import plan_of
from tests.support.compare import check_equal, plain

ROWS = {"flash": table.FLASH, "cudnn": table.CUDNN, "efficient": table.EFFICIENT, "plain": table.PLAIN}

# ---------------------------------------------------------------------------------------------- kernels, emulated
# What PyTorch's CUDA kernels take and give, with all that they take for granted.


def seen(rows: int, keys: int, causal: bool, left: int | None = None, at_end: bool = False) -> Tensor:
    i, j = torch.arange(rows)[:, None] + (keys - rows if at_end else 0), torch.arange(keys)
    mask = torch.ones(rows, keys, dtype=torch.bool)
    mask = mask & (j <= i) if causal else mask
    return mask if left is None else mask & (j >= i - left)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    assert all(t.stride(-1) == 1 for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, mask: Tensor, scale: float
) -> list[Tensor]:
    """What kernels compute, from the result and the sums that they are given."""
    assert all(t.stride(-1) == 1 for t in (g, q, k, v, out))
    groups = k.shape[1], q.shape[1] // k.shape[1]
    wide_k, wide_v = (t.repeat_interleave(groups[1], 1) for t in (k, v))
    weights = ((q @ wide_k.mT * scale).masked_fill(~mask, -math.inf) - logs.unsqueeze(-1)).exp()
    of_scores = weights * (g @ wide_v.mT - (g * out).sum(-1, keepdim=True)) * scale
    of_k, of_v = (t.unflatten(1, groups).sum(2) for t in (of_scores.mT @ q, weights.mT @ g))
    return [of_scores @ wide_k, of_k, of_v]


def aligned(*tensors: Tensor) -> None:
    for t in tensors:
        assert t.shape[-1] % 8 == 0
        assert t.stride(-1) == 1
        assert t.storage_offset() % 8 == 0
        assert not any(step % 8 for step, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1)


def runs(cu_q: Tensor | None, cu_k: Tensor | None, q: Tensor, *more: Tensor) -> Any:
    """Of each sequence its rows of these tensors, as (1, heads, rows, elements)."""
    if cu_q is None or cu_k is None:
        for b in range(len(q)):
            yield b, slice(None), slice(None), [t[b : b + 1].transpose(1, 2) for t in (q, *more)]
        return
    assert cu_q.dtype == cu_k.dtype == torch.int32
    for b, (i, j, m, n) in enumerate(zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)):
        assert i < j
        assert m < n
        rows, keys = slice(int(i), int(j)), slice(int(m), int(n))
        places = (rows, keys, keys, rows, rows)
        yield b, rows, keys, [t[at].transpose(0, 1)[None] for t, at in zip((q, *more), places, strict=False)]


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, max_q: int, max_k: int, p: float, causal: bool, mask: bool,
    *, scale: float, window_size_left: int | None, window_size_right: int | None,
) -> Any:  # fmt: skip
    aligned(q, k, v)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
    out = torch.full_like(q, math.nan)
    logs = torch.full((q.shape[1], len(q)) if cu_q is not None else (len(q), q.shape[2], q.shape[1]), math.nan).to(q)
    for b, rows, _, (q1, k1, v1) in runs(cu_q, cu_k, q, k, v):
        assert max_q >= q1.shape[2]
        assert max_k >= k1.shape[2]
        made, own = forward(q1, k1, v1, seen(q1.shape[2], k1.shape[2], causal, window_size_left, True), scale)
        if cu_q is None:
            out[b], logs[b] = made[0].transpose(0, 1), own[0]
        else:
            out[rows], logs[:, rows] = made[0].transpose(0, 1), own[0]
    return out, logs, torch.zeros(2), torch.zeros(()), torch.zeros(0)


def flash_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, cu_q: Any, cu_k: Any, max_q: int,
    max_k: int, p: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: float, window_size_left: int | None,
    window_size_right: int | None,
) -> Any:  # fmt: skip
    aligned(g, q, k, v, out)
    assert logs.is_contiguous()  # read as they follow in memory
    grads = [torch.full_like(t, math.nan) for t in (q, k, v)]
    for b, rows, keys, (q1, k1, v1, g1, o1) in runs(cu_q, cu_k, q, k, v, g, out):
        own = logs[b : b + 1] if cu_q is None else logs[None, :, rows]
        mask = seen(q1.shape[2], k1.shape[2], causal, window_size_left, True)
        for grad, at, part in zip(
            grads, (rows, keys, keys), backward(g1, q1, k1, v1, o1, own, mask, scale), strict=True
        ):
            (grad[b] if cu_q is None else grad)[at] = part[0].transpose(0, 1)
    return grads


def square(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    aligned(q, k, v)
    assert q.shape[1] == k.shape[1] == v.shape[1]
    assert not causal or q.shape[2] == k.shape[2]  # else they count from the first key
    return seen(q.shape[2], k.shape[2], causal)


def efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: None, sums: bool, p: float, causal: bool, *, scale: float
) -> Any:
    out, logs = forward(q, k, v, square(q, k, v, causal), scale)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, F.pad(logs, (0, -logs.shape[-1] % 32), value=math.inf), torch.zeros(()), torch.zeros(())


def efficient_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, logs: Tensor, seed: Tensor, offset: Tensor,
    p: float, which: list[bool], causal: bool, *, scale: float,
) -> Any:  # fmt: skip
    aligned(g, out)
    rows = q.shape[2]
    assert logs.shape[-1] % 32 == 0
    assert torch.all(logs[..., rows:] == math.inf)
    out = out.as_strided(out.shape, (*out.stride()[:2], out.shape[1] * out.shape[3], 1))  # in half precision, unasked
    return *backward(g, q, k, v, out, logs[..., :rows], square(q, k, v, causal), scale), None


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: None, sums: bool, p: float, causal: bool, debug: bool, *, scale: float
) -> Any:
    assert k.shape[2] > 1
    out, logs = forward(q, k, v, square(q, k, v, causal), scale)
    return out, logs.unsqueeze(-1), None, None, q.shape[2], k.shape[2], torch.zeros(()), torch.zeros(()), None


def cudnn_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, seed: Tensor, offset: Tensor, bias: None,
    cu_q: None, cu_k: None, max_q: int, max_k: int, p: float, causal: bool, *, scale: float,
) -> Any:  # fmt: skip
    aligned(g, out)
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    return backward(g, q, k, v, out, logs.squeeze(-1), square(q, k, v, causal), scale)


EMULATED = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}


@pytest.fixture(params=ROWS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One kernel in place of the CPU's; those of GPUs emulated, in float64."""
    row = ROWS[request.param]
    calls: Any = SimpleNamespace(**{name: SimpleNamespace(default=fn) for name, fn in EMULATED.items()})
    monkeypatch.setattr(kernels, "_ATEN", calls)
    taken = dataclasses.replace(row, device="cpu", dtypes=(torch.float64,), deterministic=True)
    monkeypatch.setattr(table, "TABLE", [] if row is table.PLAIN else [taken])
    monkeypatch.setattr(table, "MOST_SCORES", 2 * 4 * 3 * 2)  # blocks of 3 rows and 2 keys
    return str(request.param)


def ids_of(*lengths: int) -> Tensor:
    return torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])


def oracle(q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, causal: bool, window: int | None) -> Tensor:
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    mask = (j <= i) if causal else torch.ones(len(i), len(j), dtype=torch.bool)
    mask = mask if window is None else mask & (i - j < window)
    mask = mask if ids is None else (mask & (ids.unsqueeze(-1) == ids.unsqueeze(-2))).unsqueeze(-3)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


# Heads of queries and keys, rows, keys, elements of keys and values, documents, causal, window.
CASES: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int], Any, bool, int | None]] = {
    "causal, traded": ((2, 2), (12, 12), (8, 8), None, True, None),
    "causal, uneven": ((3, 3), (11, 11), (4, 4), None, True, None),
    "grouped": ((6, 2), (12, 12), (5, 5), None, True, None),
    "fewer keys than rows": ((1, 1), (9, 4), (8, 8), None, True, None),
    "more keys than rows": ((1, 1), (5, 9), (8, 8), None, True, None),
    "values of another size": ((3, 1), (8, 8), (12, 5), None, True, None),
    "windows": ((3, 1), (23, 23), (4, 4), None, True, 5),
    "windows in documents": ((3, 1), (23, 23), (4, 4), ids_of(9, 1, 13), True, 3),
    "documents": ((3, 1), (23, 23), (8, 8), ids_of(5, 11, 1, 1, 5), True, None),
    "documents of each sequence": ((2, 1), (16, 16), (8, 8), torch.stack([ids_of(9, 7), ids_of(1, 15)]), True, None),
    "documents, both ways": ((3, 3), (16, 16), (8, 8), ids_of(9, 7), False, None),
}


@pytest.mark.parametrize("name", CASES)
def test_like_one_device(kernel: str, name: str) -> None:
    (heads, groups), (t, s), (d, e), ids, causal, window = CASES[name]
    g = torch.Generator().manual_seed(1)
    shapes = (2, heads, t, d), (2, groups, s, d), (2, groups, s, e)
    given = [torch.randn(*shape, dtype=torch.float64, generator=g) for shape in shapes]
    weight = torch.randn(2, heads, t, e, dtype=torch.float64, generator=g)

    def results(attend: Any, own: list[Tensor], factor: Tensor) -> list[Tensor]:
        made = attend(*own)
        return [plain(x) for x in (made, *torch.autograd.grad((made * factor).sum(), own))]

    want = results(lambda *x: oracle(*x, ids, causal, window), [x.clone().requires_grad_() for x in given], weight)
    mesh = mw.Mesh({"cp": 2})

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if ids is None and window is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        split = None if ids is None else mw.shard_tensor(ids, mesh, {"cp": mw.Shard(ids.ndim - 1)})
        return mw.attention(q, k, v, document_ids=split, is_causal=causal, window=window)

    def run() -> list[Tensor]:
        own = [mw.shard_tensor(x, mesh, {"cp": mw.Shard(2)}).requires_grad_() for x in given]
        wish = {op: {"cp": "gather"} for op in ("scaled_dot_product_attention", "attention")}
        with mw.strategies(wish):
            return results(attend, own, mw.shard_tensor(weight, mesh, {"cp": mw.Shard(2)}))

    for got in mw.simulate(run, mesh):
        check_equal(got, want)


def test_a_window_is_one_call_of_flash_attention() -> None:
    spans = (0, 100, 50)
    assert [len(group) for group in plan_of(spans, None, None, True, 8, 200, at_end=True, packed=True)] == [1]
    assert len(plan_of(spans, None, None, True, 8, 200)) > 10
    packed = plan_of((0, 0, 60), None, ids_of(*[5] * 12)[None], True, 0, 60, at_end=True, packed=True)
    assert [len(group) for group in packed] == [12]


# ---------------------------------------------------------------------------------------------- fake tensors


def indexed(t: Tensor, at: Any) -> Tensor | None:
    """A view for slices; None for tensors among them."""
    for dim, one in enumerate(at):
        if not isinstance(one, slice):
            return None
        start, stop, _ = one.indices(t.shape[dim])
        t = t.narrow(dim, start, stop - start)
    return t


class Indexing(TorchFunctionMode):
    """Indexing of fake CUDA tensors, for which Python asks CUDA itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous and args[0].device.type == "cuda":
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        if func not in (Tensor.__getitem__, Tensor.__setitem__) or args[0].device.type != "cuda":
            return func(*args, **(kwargs or {}))
        t, at, *value = args
        at = at if isinstance(at, tuple) else (at,)
        if at[0] is Ellipsis:
            at = (*[slice(None)] * (t.ndim - len(at) + 1), *at[1:])
        view = indexed(t, at)
        which = [None if isinstance(one, slice) else one for one in at]
        if value and view is not None:
            return torch.ops.aten.copy_(view, value[0])
        if value:
            return torch.ops.aten.index_put_(t, which, value[0])
        return torch.ops.aten.index(t, which) if view is None else view


class Allocated(TorchDispatchMode):
    """Elements of the largest tensor that ops make, and the bytes of all that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.peak = 0, 0
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, Tensor) and t.device.type == "cuda":
                storage = t.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes() // t.dtype.itemsize)
        self.peak = max(self.peak, self.now())
        return made

    def now(self) -> int:
        self.live = {key: (ref, size) for key, (ref, size) in self.live.items() if not ref.expired()}
        return sum(size for _, size in self.live.values())


BF16, HALF, FULL, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64
# dtype, heads of queries and keys, elements of keys and values, documents, window, switched off, GPU; the kernel.
CHOSEN: dict[str, tuple[torch.dtype, tuple[int, int], tuple[int, int], Any, int, str, tuple[int, int], str]] = {
    "Llama": (BF16, (4, 1), (128, 128), None, 0, "", (9, 0), "flash attention"),
    "fp16": (HALF, (2, 2), (64, 64), None, 0, "", (8, 0), "flash attention"),
    "odd head size": (BF16, (2, 2), (100, 100), None, 0, "", (9, 0), "flash attention"),
    "DeepSeek": (BF16, (2, 2), (192, 128), None, 0, "", (9, 0), "flash attention"),
    "Gemma, a window": (BF16, (2, 1), (256, 256), None, 512, "", (9, 0), "flash attention"),
    "packed": (BF16, (4, 2), (128, 128), [3000, 1, 4095, 1096], 0, "", (9, 0), "flash attention"),
    "large heads": (BF16, (1, 1), (512, 512), None, 0, "", (9, 0), "memory-efficient attention"),
    "float32": (FULL, (2, 1), (64, 64), None, 0, "", (9, 0), "memory-efficient attention"),
    "an old GPU": (HALF, (2, 2), (64, 64), [5000, 3192], 0, "", (7, 0), "memory-efficient attention"),
    "a consumer's GPU": (BF16, (1, 1), (200, 200), None, 0, "", (8, 6), "memory-efficient attention"),
    "no flash": (BF16, (2, 1), (128, 128), None, 1000, "flash", (9, 0), "cuDNN attention"),
    "float64": (DOUBLE, (2, 1), (64, 64), None, 0, "", (9, 0), "PyTorch's own ops"),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_for_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The last quarter of 8,192 rows on a GPU: the kernel, what it gives, what is held; no tensor of rows x keys."""
    dtype, (heads, groups), (d, e), lengths, window, off, gpu, want = CHOSEN[name]
    rows, keys = 2048, 8192
    monkeypatch.setattr(table, "capability", lambda: gpu)
    monkeypatch.setattr(table, "MOST_SCORES", 1 << 20)
    if off:
        row = dataclasses.replace(table.FLASH, enabled=lambda: False)
        monkeypatch.setattr(table, "TABLE", [row, table.CUDNN, table.EFFICIENT])
    chosen = table.choose(table.HeadSizes("cuda", dtype, 1, heads, d, e))
    assert chosen.kernel.name == want
    most = table.block_sizes(1, heads) if chosen.kernel is table.PLAIN else None
    ids = None if lengths is None else ids_of(*lengths)[None]
    packed = chosen.kernel.packed is not None
    calls = plan_of((0, keys - rows, rows), None, ids, True, window, keys, chosen.kernel.at_end, packed, most)
    with FakeTensorMode(), Allocated() as seen, Indexing():
        shapes = (1, heads, rows, d), (1, groups, keys, d), (1, groups, keys, e)
        q, k, v = (torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes)
        given = seen.now()
        out, sums = blocks.forward_of(chosen.kernel, calls, q, k, v, None)
        forward_peak = seen.peak - given
        grads = blocks.backward_of(chosen.kernel, calls, torch.empty_like(out), q, k, v, out, sums, None)
    assert (out.shape, out.dtype, out.device.type) == ((1, heads, rows, e), dtype, "cuda")
    assert (sums.shape, sums.dtype) == ((1, heads, rows), torch.promote_types(dtype, FULL))
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in (q, k, v)]
    size = dtype.itemsize * heads * (rows + 2 * keys) * max(d, e)
    held = 4 * heads * rows * (5 * e + 8) + 2 * size + 5 * 8 * table.MOST_SCORES * (chosen.kernel is table.PLAIN)
    assert seen.largest < rows * keys
    assert forward_peak <= held < 4 * heads * rows * keys  # results and one block, keys for each head; not all scores


def test_why_a_kernel_is_chosen() -> None:
    mesh, q = mw.Mesh({"cp": 2}), torch.randn(1, 3, 8, 4)

    def run() -> Any:
        own = mw.shard_tensor(q, mesh, {"cp": mw.Shard(2)})
        with mw.explain() as why:
            F.scaled_dot_product_attention(own, own, own, is_causal=True)
        return why.notes, why.notes[0] in str(why)

    want = "attention of [1, 3, 4, 4] by 8 keys in float32 on cpu: flash attention of the CPU"
    assert mw.simulate(run, mesh)[0] == ((want,), True)
    told = str(table.choose(table.HeadSizes("cuda", torch.float64, 1, 2, 64, 64)))
    assert told.startswith("PyTorch's own ops, in blocks of at most 16777216 scores; flash attention takes float16, ")
    assert "memory-efficient attention takes float32, float16, bfloat16, not float64" in told


def test_a_captured_step_says_its_kernel() -> None:
    mesh, x = mw.Mesh({"cp": 2}), torch.randn(1, 3, 8, 4)

    def loss(model: Any, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(model(x), x, x, is_causal=True).square().mean()

    def run() -> Any:
        step = mw.compile_step(torch.nn.Linear(4, 4), loss, None, x, mesh=mesh, batch={"cp": mw.Shard(2)})
        return step.explain().notes

    assert (
        "attention of [1, 3, 4, 4] by 8 keys in float32 on cpu: flash attention of the CPU" in mw.simulate(run, mesh)[0]
    )
