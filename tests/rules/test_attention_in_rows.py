"""Attention with dropout or a mask whose scores are many: some rows at a time, with the numbers of all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import meshwright as mw
from meshwright.generator import attention as rows
from tests.support.compare import check_equal, plain

LONG = torch.randn(2, 1, 7, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
CASES: dict[str, dict[str, Any]] = {
    "dropped weights": {"dropout_p": 0.4},
    "dropped weights, causal": {"dropout_p": 0.4, "is_causal": True},
    "dropped weights, a mask": {"dropout_p": 0.4, "attn_mask": LONG > -1},
    "an additive mask": {"attn_mask": LONG[0]},
    "an additive mask of keys": {"attn_mask": LONG[:, :, :1]},
    "a mask of keys": {"attn_mask": LONG[:, :, :1] > -1},
    "all keys": {},
    "causal": {"is_causal": True},
}


def results(given: list[Tensor], named: dict[str, Any], weight: Tensor) -> list[Tensor]:
    """Values, gradients and gradients of these."""
    torch.manual_seed(3)
    made = F.scaled_dot_product_attention(*given[:3], **named, enable_gqa=True)
    first = torch.autograd.grad((made * weight).sum(), given, create_graph=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in first), given)
    return [plain(t) for t in (made, *first, *again)]


@pytest.mark.parametrize("name", CASES)
def test_like_all_rows_at_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    named = CASES[name]
    mask = named.get("attn_mask")
    sizes = ((2, 3, 7, 4), (2, 1, 9, 4), (2, 1, 9, 4))
    g = torch.Generator().manual_seed(1)
    given = [torch.randn(*size, dtype=torch.float64, generator=g) for size in sizes]
    weight = torch.randn(2, 3, 7, 4, dtype=torch.float64, generator=g)
    learned = mask is not None and mask.is_floating_point()

    def run(put: Any) -> list[Tensor]:
        own = [put(t).requires_grad_() for t in (*given, *[mask] * learned)]
        said = {} if mask is None else {"attn_mask": own[3] if learned else put(mask)}
        return results(own, named | said, put(weight))

    with sdpa_kernel(SDPBackend.MATH), mw.reproducible_random():
        want = run(torch.clone)
    mesh = mw.Mesh({"cp": 2})

    def split(t: Tensor) -> Tensor:
        dim = t.ndim - 2
        return mw.shard_tensor(t, mesh, {"cp": mw.Shard(dim)} if t.shape[dim] > 1 else {})

    def on_ranks() -> list[Tensor]:
        with mw.strategies({"scaled_dot_product_attention": {"cp": "gather"}}), sdpa_kernel(SDPBackend.MATH):
            return run(split)

    used: list[int] = []
    blocks = rows._blocks

    def counted(*args: Any) -> Any:
        found = list(blocks(*args))
        used.append(len(found))
        return iter(found)

    monkeypatch.setattr(rows, "_blocks", counted)
    monkeypatch.setattr(rows, "MOST_SCORES", 2 * 3 * 9 * 2)  # two rows
    for got in mw.simulate(on_ranks, mesh):
        check_equal(got, want)
    assert max(used, default=0) == (2 if mask is not None or "dropout_p" in named else 0)
