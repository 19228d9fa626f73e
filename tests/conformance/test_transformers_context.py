"""Decoders of Hugging Face's library, unchanged, with a split sequence: every gradient against one device."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from conformance.decoders import BASE, CONTEXT, decoder, loss_of
from meshwright import collective

pytest.importorskip("transformers", reason="the oracle is the transformers library")
pytest.importorskip("meshwright.integrations.transformers")

EXPERTS = {"experts_implementation": "meshwright"}  # others have no float64 in captured steps
IDS = torch.randint(0, 40, (2, 24), generator=torch.Generator().manual_seed(1))


def made(name: str, **said: Any) -> Any:
    own: dict[str, Any] = {
        "gemma3 with windows": {"sliding_window": 8},
        "qwen3-next": EXPERTS,
        "qwen3-next by parts": EXPERTS,
    }.get(name, {})
    return decoder(CONTEXT, name, max_position_embeddings=256, **own, **said)


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("llama", 4),
        ("gemma3 with windows", 3),
        ("mamba2", 3),
        ("qwen3", 2),
        ("qwen3-next by parts", 2),
        ("llama", 2),
        ("qwen3-next", 2),
    ],
)
@pytest.mark.thin(2)
def test_like_one_device(name: str, n: int) -> None:
    mesh = mw.Mesh({"cp": n})
    alone = made(name)
    ids = torch.randint(0, 40, (1, 150)) if name[:6] in ("mamba2", "qwen3-") else IDS  # chunks of 64 over the borders
    loss = loss_of(alone, ids)
    loss.backward()
    want = {k: p.grad for k, p in alone.named_parameters()}

    def eager() -> tuple[float, dict[str, Tensor]]:
        model = mw.shard_module(made(name), mesh)
        found = loss_of(model, mw.shard_tensor(ids, mesh, {"cp": mw.Shard(1)}))
        found.backward()
        return mw.unshard(found).item(), {k: mw.unshard(p.grad) for k, p in model.named_parameters()}

    def captured() -> tuple[float, dict[str, Tensor]]:
        model = made(name)
        before = {k: p.detach().clone() for k, p in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step = mw.compile_step(model, loss_of, optimizer, ids, mesh=mesh, batch={"cp": mw.Shard(1)})
        return float(step(ids)), {k: before[k] - mw.unshard(p) for k, p in model.named_parameters()}

    for run in (eager, captured)[: 1 + (name != "qwen3-next")]:  # of its loops a program has thousands of calls
        for got, grads in mw.simulate(run, mesh):
            assert got == pytest.approx(loss.item(), rel=1e-6)
            for k, grad in grads.items():  # logits and positions are in float32
                torch.testing.assert_close(grad, want[k], rtol=1e-5, atol=1e-6, msg=lambda m, k=k: f"{k}: {m}")


def test_layers_send_heads_alone() -> None:
    """Per layer q, k, v to heads and the result back, and nothing for norms, positions or the cache of keys."""
    mesh = mw.Mesh({"cp": 2})

    def run() -> dict[str, int]:
        model = mw.shard_module(made("llama", use_cache=True), mesh).model
        with collective.counting() as counts:
            model(input_ids=mw.shard_tensor(IDS, mesh, {"cp": mw.Shard(1)}))
        return dict(counts.kinds)

    assert mw.simulate(run, mesh)[0] == {"all_to_all": 4 * BASE["num_hidden_layers"]}


PACKED = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ([5, 19], [12, 1, 11])])
NAMED = {"attn_implementation": "meshwright", "use_cache": False}


def masks(program: Any, n: int) -> list[str]:
    """What a program makes that has a rank's rows, or all, and all of the keys."""
    long = IDS.shape[1]
    return re.findall(rf"\w+\[(?:\d+, )*(?:{long}|{long // n}), {long}\]", str(program))


@pytest.mark.parametrize(
    ("name", "n", "packed"),
    [("llama", 4, True), ("llama", 4, False), ("gemma3 with windows", 3, True), ("qwen3", 4, True)],
)
@pytest.mark.thin(2)
def test_attention_by_name(name: str, n: int, packed: bool) -> None:
    """Packed or not, no mask is handed over, and every gradient is that of the library's own attention."""
    mesh, batch = mw.Mesh({"cp": n}), {"input_ids": IDS} | ({"position_ids": PACKED} if packed else {})
    more = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]} if "gemma" in name else {}

    def loss_of(model: Any, batch: Any) -> Tensor:
        return model(**batch, labels=batch["input_ids"]).loss

    alone = made(name, use_cache=False, **more)
    loss = loss_of(alone, batch)
    loss.backward()
    want = {k: p.grad for k, p in alone.named_parameters()}

    def eager() -> tuple[float, dict[str, Tensor]]:
        model = mw.shard_module(made(name, **NAMED, **more), mesh)
        found = loss_of(model, {k: mw.shard_tensor(t, mesh, {"cp": mw.Shard(1)}) for k, t in batch.items()})
        found.backward()
        return mw.unshard(found).item(), {k: mw.unshard(p.grad) for k, p in model.named_parameters()}

    def captured() -> tuple[float, dict[str, Tensor]]:
        model = made(name, **NAMED, **more)
        before = {k: p.detach().clone() for k, p in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step = mw.compile_step(model, loss_of, optimizer, batch, mesh=mesh, batch={"cp": mw.Shard(1)})
        assert not masks(step.program, n)
        if not packed:  # the ids that the library makes are known to be those of one document
            assert step.program.kinds.get("permute")
            assert "dealt_rows" not in str(step.program)
        return float(step(batch)), {k: before[k] - mw.unshard(p) for k, p in model.named_parameters()}

    for run in (eager, captured):
        for got, grads in mw.simulate(run, mesh):
            assert got == pytest.approx(loss.item(), rel=1e-6)
            for k, grad in grads.items():
                torch.testing.assert_close(grad, want[k], rtol=1e-5, atol=1e-6, msg=lambda m, k=k: f"{k}: {m}")
