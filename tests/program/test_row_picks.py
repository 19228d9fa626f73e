"""What is picked of each row by ``x[torch.arange(len(x)), i]``: the numbers of one device, no row of another rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.errors import PassError

Tensor = torch.Tensor
MERGED = ["data-parallel-optimization", "gradient-merge:k_steps=2"]


def rows(x: Tensor) -> Tensor:
    return torch.arange(len(x))


def mask(x: Tensor, n: Tensor) -> Tensor:
    """The form of Transformers' padding masks, and one with keys in another order."""
    seen = (torch.arange(x.shape[1])[None] <= n[:, None]) | (n[:, None] == 1)
    keys = torch.arange(x.shape[1])
    whole = seen[rows(x)[:, None, None, None], keys[None, None, None, :]]
    turned = seen[rows(x)[:, None, None], keys.flip(0)[None, :, None]]
    return whole[:, 0, 0] & turned[..., 0]


PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "last token": lambda x, n: x[rows(x), n],
    "behind": lambda x, n: x[rows(x), n - 4],
    "of numbers": lambda x, n: x.sum(-1)[rows(x), n],
    "loss by hand": lambda x, n: -x.flatten(1).log_softmax(1)[rows(x), n],
    "other dtypes": lambda x, n: x[rows(x).int(), n.int()],
    "transposed": lambda x, n: x.transpose(1, 2)[rows(x), n],
    "two of each": lambda x, n: x[rows(x)[:, None], n[:, None]],
    "all as they are": lambda x, n: x[rows(x)] * x[rows(x)[:, None]][:, 0],
    "one place": lambda x, n: x[rows(x), torch.tensor(2)],
    "masked": lambda x, n: (x * mask(x, n)[..., None]).sum(1),
}
FORWARD_ONLY = {
    "several of each": lambda x, n: x.detach().long()[rows(x)[:, None], torch.stack([n, n - 1], 1)] * x.sum()
}


def problem(pick: Callable[[Tensor, Tensor], Tensor], count: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(6, 5).double()
    g = torch.Generator().manual_seed(count)
    batch = {
        "x": torch.randn(count, 4, 6, generator=g, dtype=torch.float64),
        "n": torch.randint(4, (count,), generator=g),
    }

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return pick(model(batch["x"]), batch["n"]).square().mean()

    return model, loss, batch


def alone(pick: Any, counts: list[int]) -> list[Tensor]:
    model, loss, _ = problem(pick, counts[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = []
    for count in counts:
        made.append(loss(model, problem(pick, count)[2]))
        made[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*map(torch.Tensor.detach, made), *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("count", [6, 4, 1])
@pytest.mark.parametrize("name", [*PICKS, *FORWARD_ONLY])
def test_the_numbers_of_one_device_and_nothing_sent(name: str, count: int) -> None:
    pick, mesh = (PICKS | FORWARD_ONLY)[name], mw.Mesh({"dp": 3})

    def run() -> tuple[list[Tensor], list[str]]:
        model, loss, batch = problem(pick, count)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile_step(model, loss, optimizer, batch, mesh=mesh, batch={"dp": mw.Shard(0)})
        made = [step(batch), step(batch)]
        sent = [c.kind for c in step.explain().collectives if c.role == "forward" and c.shape]
        return [*map(mw.unshard, made), *(mw.unshard(p).detach() for p in model.parameters())], sent

    for made, sent in mw.simulate(run, mesh):
        assert not sent or count == 1
        torch.testing.assert_close(made, alone(pick, [count, count]))


@pytest.mark.parametrize("count", [4, 1])
@pytest.mark.parametrize("name", PICKS)
def test_rows_stay_within_their_micro_batch(name: str, count: int) -> None:
    mesh = mw.Mesh({"dp": 2})

    def run() -> list[Tensor]:
        model, loss, batch = problem(PICKS[name], count)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile_step(
            model, loss, optimizer, batch, mesh=mesh, batch={"dp": mw.Shard(0)}, passes=MERGED, check="first"
        )
        for _ in range(2):
            step(batch)
        return [mw.unshard(p).detach() for p in model.parameters()]

    for made in mw.simulate(run, mesh):  # twice the same rows are a mean over them
        torch.testing.assert_close(made, alone(PICKS[name], [count])[1:])


def test_rows_in_another_order_are_refused_still() -> None:
    mesh = mw.Mesh({"dp": 2})

    def run() -> None:
        model, loss, batch = problem(lambda x, n: x[rows(x).flip(0), n], 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(
            PassError, match=r"test_row_picks.py:\d+: aten.index.Tensor reads rows of other micro-batches"
        ):
            mw.compile_step(model, loss, optimizer, batch, mesh=mesh, batch={"dp": mw.Shard(0)}, passes=MERGED)

    mw.simulate(run, mesh)


@pytest.mark.parametrize("passes", [MERGED, ["pipeline:micro_batches=2"]], ids=["merged", "pipeline"])
def test_a_padding_mask_of_transformers(passes: list[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    pipelined = passes != MERGED
    mesh = mw.Mesh({"pp" if pipelined else "dp": 2})

    def parts() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                             intermediate_size=20, max_position_embeddings=16, use_cache=False)  # fmt: skip
        ids = torch.randint(31, (4, 7), generator=torch.Generator().manual_seed(1))
        padded = (torch.arange(7)[None] < torch.tensor([7, 3, 5, 2])[:, None]).long()
        return LlamaForCausalLM(config).double(), {"ids": ids, "mask": padded}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
        labels = batch["ids"].masked_fill(batch["mask"] == 0, -100)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def run() -> list[Tensor]:
        model, batch = parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"stages": {"pp": "model.layers"}} if pipelined else {"batch": {"dp": mw.Shard(0)}}
        step = mw.compile_step(model, loss, optimizer, batch, mesh=mesh, passes=passes, **options)
        for _ in range(1 if pipelined else 2):
            step(batch)
        return [mw.unshard(p).detach() for p in model.parameters()]

    model, batch = parts()
    loss(model, batch).backward()
    expected = [p.detach() - 0.1 * p.grad for p in model.parameters() if p.grad is not None]
    for made in mw.simulate(run, mesh):
        torch.testing.assert_close(made, expected)
