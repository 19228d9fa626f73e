"""A GPT in plain PyTorch, and experts.  Nothing here knows about meshes: ``plan`` says how it is laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw

from .choices import VOCABULARY
from .config import StepConfig

NEWLINE = ord("\n")
BALANCE = 0.01  # what the balance of loads counts in the loss


@dataclass(frozen=True)
class Llama:
    """What of a Llama the options of a step do not say: here that of 7B parameters (Touvron et al., 2023).

    Attributes:
        vocabulary: number of tokens.
        kv_heads: heads of keys and values; None: as many as of queries.
        inner: width of the MLP by that of the stream.
    """

    vocabulary: int = 32000
    kv_heads: int | None = None
    inner: float = 11008 / 4096


class Embedding(nn.Embedding):
    """An embedding that starts small, so that it can double as the head (``--tie``)."""

    def reset_parameters(self) -> None:
        """Normal values of standard deviation 0.02, as in GPT-2 (Radford et al., 2019)."""
        nn.init.normal_(self.weight, std=0.02)


class Head(nn.Linear):
    """Logits from the hidden state; shares the weight of ``tied_to`` if that is given."""

    def __init__(self, hidden: int, vocabulary: int, tied_to: nn.Embedding | None, **where: Any) -> None:
        self.tied = tied_to is not None
        super().__init__(hidden, vocabulary, bias=False, **where)
        if tied_to is not None:
            self.weight = tied_to.weight

    def reset_parameters(self) -> None:
        """A shared weight is the embedding's to set."""
        if not self.tied:
            super().reset_parameters()


class Rotary(nn.Module):
    """Turns pairs of features by an angle that grows with the position (Su et al., 2021)."""

    def __init__(self, width: int, seq: int, device: str | torch.device, base: float = 10000.0) -> None:
        super().__init__()
        speeds = base ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
        angles = torch.outer(torch.arange(seq, dtype=torch.float32, device=device), speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, heads, seq, width]`` to the same."""
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * self.cos.to(x.dtype) + turned * self.sin.to(x.dtype)  # type: ignore[operator]


class Attention(nn.Module):
    """Causal self-attention.

    One Linear makes queries, keys and values, and its output is read head by head: ``heads, 3, head_dim``.
    Whoever splits its weight by rows then splits whole heads.  Llama's are three, without biases, of which several
    queries may share a key and a value (Ainslie et al., 2023).
    """

    def __init__(self, hidden: int, heads: int, dropout: float, llama: Llama | None = None, **where: Any) -> None:
        super().__init__()
        self.width = hidden // heads
        self.heads, self.few = heads, llama is not None and llama.kv_heads is not None
        if llama is not None:
            kept = hidden if llama.kv_heads is None else llama.kv_heads * self.width
            self.query, self.key, self.value = (nn.Linear(hidden, n, bias=False, **where) for n in (hidden, kept, kept))
        else:
            self.qkv = nn.Linear(hidden, 3 * hidden, **where)
        self.out = nn.Linear(hidden, hidden, bias=llama is None, **where)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor, rotary: Rotary | None = None, documents: Tensor | None = None) -> Tensor:
        """``[batch, seq, hidden]`` to the same; ``documents``: ids of what does not attend to each other."""
        if rotary is None:
            made = self.qkv(x)
            batch, seq, width = made.shape
            q, k, v = made.view(batch, seq, self.heads, 3, width // (3 * self.heads)).transpose(1, 2).unbind(3)
        else:
            q, k, v = (
                part(x).unflatten(2, (-1, self.width)).transpose(1, 2) for part in (self.query, self.key, self.value)
            )
            q, k = rotary(q), rotary(k)
        if documents is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.few)
        else:
            y = mw.attention(q, k, v, document_ids=documents)
        return self.drop(self.out(y.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """Up, GELU, and down again; Llama's is gated by SiLU (Shazeer, 2020), without biases."""

    def __init__(self, hidden: int, inner: int, dropout: float, llama: bool, **where: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False, **where) if llama else None
        self.up = nn.Linear(hidden, inner, bias=not llama, **where)
        self.down = nn.Linear(inner, hidden, bias=not llama, **where)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` to the same."""
        y = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.drop(self.down(y))


class Experts(nn.Module):
    """The weights of the experts of a layer, in one tensor each for the first and the second product."""

    def __init__(self, hidden: int, inner: int, count: int, **where: Any) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(count, 2, inner, hidden, **where))
        self.down = nn.Parameter(torch.empty(count, hidden, inner, **where))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As those of Linears of these sizes."""
        for weight in (self.gate_up, self.down):
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """``[batch, seq, hidden]``, and which experts with which weights, ``[batch, seq, k]``, to the first."""
        return mw.experts(x, ids, weights, self.gate_up, self.down, "silu")


class MoE(nn.Module):
    """The ``k`` experts that a router likes best for a token, weighted, and those that all tokens share.

    Experts are gated by SiLU, as Mixtral's (Jiang et al., 2024); those shared are DeepSeek's (Dai et al., 2024).
    """

    def __init__(self, config: StepConfig, **where: Any) -> None:
        super().__init__()
        assert config.experts is not None
        self.k, inner = config.experts_per_token, config.inner
        self.router = nn.Linear(config.hidden, config.experts, bias=False, **where)
        self.experts = Experts(config.hidden, inner, config.experts, **where)
        shared = config.shared_experts
        self.shared = MLP(config.hidden, shared * inner, 0.0, True, **where) if shared else None
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``[batch, seq, hidden]`` to the same, and 1 if the experts have the same load, up to their number if not.

        The balance is that of Switch transformers (Fedus et al., 2021), for several experts per token.
        """
        scores = self.router(x).softmax(-1)
        top, ids = scores.topk(self.k)
        y = self.experts(x, ids, top / top.sum(-1, keepdim=True))
        if self.shared is not None:
            y = y + self.shared(x)
        count = scores.shape[-1]
        load = F.one_hot(ids, count).to(scores.dtype).sum(-2).flatten(0, 1).mean(0) / self.k
        return self.drop(y), count * (load * scores.flatten(0, 1).mean(0)).sum()


class Block(nn.Module):
    """A pre-norm transformer block (Xiong et al., 2020)."""

    def __init__(self, config: StepConfig, llama: Llama | None, **where: Any) -> None:
        super().__init__()
        hidden, dropout = config.hidden, config.dropout
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.norm1 = norm(hidden, **where)
        self.attention = Attention(hidden, config.heads, dropout, llama, **where)
        self.norm2 = norm(hidden, **where)
        inner = round(hidden * llama.inner) if llama else 4 * hidden
        self.mlp = MoE(config, **where) if config.experts else MLP(hidden, inner, dropout, bool(llama), **where)

    def forward(
        self, x: Tensor, rotary: Rotary | None, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor | float]:
        """``[batch, seq, hidden]`` to the same, and the balance of its experts."""
        x = x + self.attention(self.norm1(x), rotary, documents)
        made = self.mlp(self.norm2(x))
        y, balance = made if isinstance(made, tuple) else (made, 0.0)
        return x + y, balance


class GPT(nn.Module):
    """The decoder of ``meshwright train`` and ``meshwright explain``.

    Args:
        config: layers, hidden, heads, seq (the longest sequence), dropout, tie, dtype, packed, and what it says of
            experts.
        device: where the parameters are made; ``"meta"``: nowhere yet.
        llama: with RMSNorm, rotary positions, a gated MLP and no biases, and its own vocabulary.
    """

    def __init__(self, config: StepConfig, device: str | torch.device = "cpu", llama: Llama | None = None) -> None:
        super().__init__()
        vocabulary = VOCABULARY if llama is None else llama.vocabulary
        where: dict[str, Any] = {"device": device, "dtype": config.torch_dtype}
        self.tokens = Embedding(vocabulary, config.hidden, **where)
        self.positions = None if llama else Embedding(config.seq, config.hidden, **where)
        self.rotary = Rotary(config.hidden // config.heads, config.seq, device) if llama else None
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, llama, **where) for _ in range(config.layers))
        self.balanced, self.packed = config.experts is not None, config.packed
        self.norm = (nn.RMSNorm if llama else nn.LayerNorm)(config.hidden, **where)
        self.head = Head(config.hidden, vocabulary, self.tokens if config.tie else None, **where)

    def forward(self, x: Tensor) -> Any:
        """Logits ``[batch, seq, vocabulary]`` for the token after each of ``x``: int64 ``[batch, seq]``.

        With experts a tuple of these and the mean balance of the layers.
        """
        h = self.tokens(x)
        if self.positions is not None:
            h = h + self.positions(torch.arange(x.shape[1], device=x.device))
        h, total = self.drop(h), 0.0
        documents = (x == NEWLINE).cumsum(1) if self.packed else None
        for block in self.blocks:
            h, balance = block(h, self.rotary, documents)
            total = total + balance
        logits = self.head(self.norm(h))
        return (logits, total / len(self.blocks)) if self.balanced else logits


def loss_of(model: Callable[[Tensor], Any], x: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy in nats per token over the whole batch, and with experts 0.01 of their balance."""
    made = model(x)
    logits, balance = made if isinstance(made, tuple) else (made, 0.0)
    # Every target counts.  A mean inside would first have to count those that are not ignored, on all ranks.
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / y.numel() + BALANCE * balance
