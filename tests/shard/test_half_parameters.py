"""Parameters in bfloat16 and float16, stored so: every optimizer updates all of them, eager and captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.optim as O

import meshwright as mw
from meshwright.errors import ProgramError, ShardError
from meshwright.shard.optimizers.kinds import fused_sgd_works

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (O.SGD, {}), (O.SGD, {"momentum": 0.9, "nesterov": True}), (O.SGD, {"weight_decay": 0.1, "foreach": True}),
    (O.Adam, {}), (O.AdamW, {"amsgrad": True}), (O.AdamW, {"fused": True}), (O.RMSprop, {}), (O.Adagrad, {}),
]  # fmt: skip
MESH, SPLIT = mw.Mesh({"dp": 2}), {"dp": mw.Shard(0)}


def updates(dtype: torch.dtype, width: int, kind: Any, options: dict[str, Any], how: str) -> list[torch.Tensor]:
    """Parameters after three steps with the same gradients: each element differs from what it was."""
    torch.manual_seed(0)
    model = nn.Linear(width, 3, bias=False).to(dtype)
    start = model.weight.detach().clone()
    optimizer = kind(model.parameters(), lr=0.25, **options)
    # Every gradient is a half on every rank, which halves hold exactly, whatever the order of a sum.
    x = torch.full((4, width), 0.5, dtype=dtype)

    def loss_of(model: nn.Module, x: Any) -> Any:
        return model(x).sum() / 4

    if how == "captured":
        step = mw.compile_step(model, loss_of, optimizer, x, mesh=MESH, batch=SPLIT)
        for _ in range(3):
            step(x)
    else:
        if how != "one device":
            mw.shard_module(model, MESH, fsdp="dp" if how == "zero 3" else None)
            mw.shard_optimizer(optimizer, shard_states="dp" if how == "zero 1" else None)
            x = mw.shard_tensor(x, MESH, SPLIT)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
    made = model.weight.detach()
    whole = made if how == "one device" else mw.unshard(made)
    assert (whole != start).all()
    return [whole]


@pytest.mark.thin(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [5, 16, 17, 64])
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_as_on_one_device(kind: Any, options: dict[str, Any], width: int, dtype: torch.dtype) -> None:
    want = updates(dtype, width, kind, options, "one device")
    for how in ("plain", "zero 1", "zero 3", "captured"):
        for found in mw.simulate(lambda how=how: updates(dtype, width, kind, options, how), MESH):
            torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("how", ["plain", "zero 1", "zero 3", "captured"])
def test_what_torch_forgets_is_refused(how: str) -> None:
    """torch's fused SGD on the CPU leaves halves as they are, but for those that do not fill a vector."""
    if fused_sgd_works(torch.bfloat16):  # of a torch that does not forget, nothing is refused
        mw.simulate(lambda: updates(torch.bfloat16, 16, O.SGD, {"fused": True}, how), MESH)
        return

    def run() -> None:
        with pytest.raises(ShardError, match=r"SGD\(fused=True\) .* does not update torch.bfloat16 .*say fused=False"):
            updates(torch.bfloat16, 16, O.SGD, {"fused": True}, how)
        updates(torch.float32, 16, O.SGD, {"fused": True}, how)

    mw.simulate(run, MESH)


def test_a_scaled_loss_needs_an_update_that_is_part_of_the_program() -> None:
    model, x = nn.Linear(16, 3).bfloat16(), torch.ones(4, 16, dtype=torch.bfloat16)
    mesh = mw.Mesh({"dp": 1})
    if fused_sgd_works(torch.bfloat16):
        mw.compile_step(model, lambda m, x: m(x).sum(), O.SGD(model.parameters(), lr=0.1), x, mesh=mesh, loss_scale=8.0)
        return
    with pytest.raises(ProgramError, match="SGD of parameters in float32"):
        mw.compile_step(model, lambda m, x: m(x).sum(), O.SGD(model.parameters(), lr=0.1), x, mesh=mesh, loss_scale=8.0)
