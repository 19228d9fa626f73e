"""The program of a case as a user writes it: model, batches, optimizers; ``device`` and ``mesh`` run it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from tests.support import optimizers as owned

from .blocks import BLOCKS, TOKENS, WIDTH, Linear
from .factors import LENGTHS, MESHES, MICRO, MODES, PRECISIONS, ROWS, SECOND, UPDATES, Case
from .losses import CLASSES, LOSSES, Batch

Result = dict[str, Tensor]


class Doubled(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


def restride(h: Tensor, how: str) -> Tensor:
    """The same values (``expanded``: means) in other memory."""
    if how == "last dim outside":
        return h.mT.contiguous().mT
    if how == "positions first":
        return h.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "expanded":
        return h.mean(-1, keepdim=True).expand(h.shape)
    if how == "every second":
        return torch.stack([h, h], -1).flatten(-2)[..., ::2]
    if how == "flat":
        return h.flatten(0, 1).tanh().view(h.shape)
    return h


class Net(nn.Module):
    """A first layer, blocks with residuals, a head.

    Args:
        plain: for one device: without functions of the package.
    """

    def __init__(self, made: Case, plain: bool) -> None:
        super().__init__()
        self.made, self.plain, self.fails, self.step_number = made, plain, False, 0
        count = 4 if pipelined(made) and made["schedule"] in ("looped,chunks=2", "v") else 2
        self.enter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(BLOCKS[made["block"]]() if i == 0 else Linear() for i in range(count))
        if made["positions"] != "none":
            self.places = nn.Embedding(TOKENS, WIDTH)
        if made["head"] == "two weights added":
            self.delta = nn.Parameter(torch.full((CLASSES, WIDTH), 0.1))
        if made["head"] == "the first weight added":
            self.delta = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1))
        if made["block"] == "tied":
            self.layers[-1].up.weight = self.enter.weight
        if made["context"] == "frozen":
            self.enter.requires_grad_(False)
        self.layers[0].plain = plain
        if made["context"] == "forward hook":
            self.layers[0].register_forward_hook(lambda module, args, out: out * 1.5)
        if made["context"] == "hook after gradients":
            self.gain, self.once = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.full((WIDTH,), 0.1))
            self.hook_parameters()
        if made["context"] == "tensor hook":
            self.layers[0].register_forward_hook(_hook_gradient)

    def hook_parameters(self) -> None:
        """Hooks that no copy of the model has, if the case has them."""
        hooked = [p for p in self.parameters() if p.requires_grad]
        for p in hooked if self.made["context"] == "hook after gradients" else ():
            p.register_post_accumulate_grad_hook(_halve)

    def constrained(self, h: Tensor) -> Tensor:
        """As the layouts of the case have activations."""
        axis, how = last_axis(self.made), self.made["layouts"]
        if self.plain or how not in ("Partial", "sequence"):
            return h
        return mw.constrain(h, {axis: mw.Partial() if how == "Partial" else mw.Shard(1)})

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        made, how = self.made, self.made["context"]
        h = self.constrained(self.enter(x))
        if made["positions"] == "expanded":
            h = h + self.places(torch.arange(x.shape[1]).expand(x.shape[0], -1))
        if made["positions"] == "of the first row":
            h = h + self.places(ids[0])
        if self.fails:
            raise ArithmeticError("as the case wants it")
        if made["random"] == "dropout":
            h = nn.functional.dropout(h, 0.3, self.training)
        if made["random"] == "noise":
            h = h + 0.1 * torch.rand_like(h)
        if how == "no_grad":
            with torch.no_grad():
                size = h.abs().mean((1, 2), keepdim=True) + 1
            h = h / size
        if how == "hook after gradients":
            always = MODES[made["mode"]]["kind"] != "eager"  # what Python decides is constant there
            h = h * self.gain + (self.once if always or self.step_number == 0 else 0)
        if how == "function":
            h = Doubled.apply(h)
        for i, layer in enumerate(self.layers):
            y = restride(h, made["values"]) if i == 0 else h
            if i == 0 and how in ("checkpoint", "reentrant checkpoint", "shard_checkpoint_inputs"):
                with self._splitting():
                    h = h + checkpoint(layer, y, ids, use_reentrant=how.startswith("reentrant"))
            elif how == "every layer checkpointed":
                with self._splitting():
                    h = checkpoint(_residual, layer, h, y, ids, use_reentrant=False)
            else:
                h = h + layer(y, ids)
        if made["head"] == "two weights added":
            return nn.functional.linear(h, self.head.weight + self.delta, self.head.bias)
        if made["head"] == "the first weight added":
            h = h + nn.functional.linear(h, self.enter.weight + self.delta)
        return self.head(h)

    def _splitting(self) -> contextlib.AbstractContextManager[None]:
        if self.plain or self.made["context"] not in ("shard_checkpoint_inputs", "every layer checkpointed"):
            return contextlib.nullcontext()
        return mw.shard_checkpoint_inputs({last_axis(self.made): mw.Shard(1)})


def _residual(layer: nn.Module, h: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    """A layer with two residuals: the backward needs the first sum again."""
    h = h + layer(y, ids)
    return h + 0.1 * h.sin()


def _halve(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def _hook_gradient(module: nn.Module, args: Any, out: Tensor) -> None:
    if out.requires_grad:
        out.register_hook(lambda g: g * 0.5)


# ------------------------------------------------------------------------------------------ what the case says


def axes_of(made: Case) -> dict[str, int]:
    """Of the mesh; that of the stages is one more, or the place of cp on a mesh of three."""
    stages = MODES[made["mode"]].get("stages")
    return ({"pp": stages} if stages else {}) | shared_axes(made)


def shared_axes(made: Case) -> dict[str, int]:
    """Of the mesh without that of the stages."""
    axes = MESHES[made["mesh"]]
    return {k: v for k, v in axes.items() if len(axes) < 3 or k != "cp" or not MODES[made["mode"]].get("stages")}


def last_axis(made: Case) -> str:
    """The axis over which weights are split."""
    return list(shared_axes(made))[-1]


def by_hand(made: Case) -> bool:
    """Whether the step is written for one rank."""
    return MODES[made["mode"]]["kind"] == "by hand"


def merges(made: Case) -> bool:
    """Whether gradients of micro-batches are merged by the pass."""
    mode = MODES[made["mode"]]
    return mode["kind"] == "captured" and not pipelined(made) and MICRO[made["micro"]] > 1


def pipelined(made: Case) -> bool:
    """Whether each rank computes its stage alone."""
    return made["mode"] == "pipeline"


def sharing(made: Case) -> int:
    """How many ranks share the rows of a batch."""
    sizes = MESHES[made["mesh"]]
    return torch.Size(sizes.values()).numel() if by_hand(made) else sizes.get("dp", 1)


def dtype_of(made: Case) -> torch.dtype:
    """In which parameters are stored."""
    return getattr(torch, PRECISIONS[made["precision"]].get("stored", "float64"))


@contextlib.contextmanager
def default_dtype(made: Case) -> Iterator[None]:
    """With the dtype of parameters as the default one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype_of(made))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def autocast(made: Case) -> Iterator[None]:
    """Around a forward."""
    with torch.autocast("cpu", torch.bfloat16, enabled=PRECISIONS[made["precision"]].get("autocast", False)):
        yield


# ------------------------------------------------------------------------------------------ batches


def _batch(made: Case, number: int, rows: int, length: int) -> Batch:
    draw = torch.Generator().manual_seed(number)
    dtype, how = dtype_of(made), made["inputs"]
    shape = {"every second": (rows, 2 * length, WIDTH), "transposed": (length, rows, WIDTH)}
    x = torch.randn(shape.get(how, (rows, length, WIDTH + 2)), generator=draw).to(dtype)
    if how == "every second":
        x = x[:, ::2]
    elif how == "transposed":
        x = x.transpose(0, 1)
    else:
        x = x[..., 1 : 1 + WIDTH]
        x = x if how == "sliced" else x[..., :1].expand(x.shape) if how == "expanded" else x.contiguous()
    ids, labels = (torch.randint(n, (rows, length), generator=draw) for n in (TOKENS, CLASSES))
    labels[torch.rand(rows, length, generator=draw) < 0.4] = -100
    labels[:, 0] = labels[:, 0].clamp(min=1)
    mask = torch.rand(rows, length, generator=draw) < 0.6
    mask[:, 0] = True
    made_batch = {"x": x, "ids": ids, "labels": labels, "mask": mask}
    if made["loss"] == "by a count":
        made_batch["count"] = torch.tensor(float(rows * length), dtype=dtype)
    return made_batch


def batches(made: Case) -> list[list[Batch]]:
    """Of each step, its micro-batches; a pipeline cuts its batch itself."""
    n, micro = sharing(made), MICRO[made["micro"]]
    rows = ROWS[made["rows"]](n)
    steps = []
    for i, length in enumerate(LENGTHS[made["lengths"]]):
        other = SECOND[made["second"]](n, rows) if i == 1 else rows
        sizes = [other if k % 2 == 0 else rows for k in range(micro)]
        if pipelined(made):
            sizes = [max(sum(sizes) - (made["rows"] == "uneven"), micro)]
        steps.append([_batch(made, 100 * i + k + 1, size, length) for k, size in enumerate(sizes)])
    return steps


def joined(parts: Sequence[Batch]) -> Batch:
    """Micro-batches as one batch."""
    return {k: torch.cat([p[k] for p in parts]) if v.ndim else sum(p[k] for p in parts) for k, v in parts[0].items()}


# ------------------------------------------------------------------------------------------ training


def loss_of(made: Case, model: nn.Module, batch: Batch) -> Any:
    """What the user's loss function gives."""
    with autocast(made):
        out = model(batch["x"], batch["ids"])
    return LOSSES[made["loss"]](model, out if not PRECISIONS[made["precision"]].get("autocast") else out.float(), batch)


def first(loss: Any) -> Tensor:
    """The loss, of a tuple that may begin with it."""
    return loss[0] if isinstance(loss, tuple) else loss


def optimizers(made: Case, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Those of the case; none for gradients alone."""
    how = UPDATES[made["update"]]
    params = list(model.parameters())
    if how["kind"] is None:
        return []
    parts = [params[::2], params[1::2]] if how.get("two") else [params]
    if how["kind"] == "SGD":
        return [torch.optim.SGD(p, lr=0.1, momentum=how.get("momentum", 0.0)) for p in parts]
    if how["kind"] in ("Lamb", "Prodigy"):
        return [getattr(owned, how["kind"])(p) for p in parts]
    return [getattr(torch.optim, how["kind"])(p, lr=0.02, eps=1e-3) for p in parts]


def schedulers(made: Case, parts: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """Of the learning rates."""
    if not UPDATES[made["update"]].get("scheduled"):
        return []
    return [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in parts]


def freeze(made: Case, model: nn.Module, step: int) -> None:
    """Between steps."""
    model.step_number = step  # type: ignore[assignment]
    if made["context"] == "frozen in between":
        model.enter.requires_grad_(step % 2 == 0)
