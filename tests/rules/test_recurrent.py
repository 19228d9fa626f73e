"""Recurrent layers of a batch that is split: nothing is sent, values and gradients of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw

Tensor = torch.Tensor
F64 = torch.float64
CASES: dict[str, dict[str, Any]] = {
    "gru": {"kind": nn.GRU, "batch_first": True},
    "gru, positions first": {"kind": nn.GRU, "bias": False},
    "lstm, both ways, two layers": {"kind": nn.LSTM, "bidirectional": True, "num_layers": 2},
    "lstm, projected": {"kind": nn.LSTM, "batch_first": True, "proj_size": 2},
    "rnn": {"kind": nn.RNN, "batch_first": True, "num_layers": 2},
    "rnn, relu": {"kind": nn.RNN, "nonlinearity": "relu", "bidirectional": True},
}


def results(options: dict[str, Any], rows: int, mesh: mw.Mesh | None) -> list[Tensor]:
    """The results, gradients of input, states and parameters."""
    torch.manual_seed(0)
    kind, first = options["kind"], options.get("batch_first", False)
    model = kind(3, 4, dtype=F64, **{k: v for k, v in options.items() if k != "kind"})
    x = torch.randn((rows, 5, 3) if first else (5, rows, 3), dtype=F64)
    if mesh is not None:
        model = mw.shard_module(model, mesh)
        x = mw.shard_tensor(x, mesh, {"dp": mw.Shard(0 if first else 1)})
    x.requires_grad_()
    with mw.explicit() if mesh is not None else torch.enable_grad():  # sends nothing
        made, state = model(x)
    states = state if isinstance(state, tuple) else (state,)
    (made.square().sum() + sum(s.sin().sum() for s in states)).backward()
    given = [x.grad, *(p.grad for p in model.parameters())]
    return [mw.unshard(t.detach()) for t in (made, *states, *given) if t is not None]


@pytest.mark.parametrize(("ranks", "rows"), [(2, 4), (3, 4), (3, 2)], ids=str)  # even, uneven, none on the last
@pytest.mark.parametrize("name", CASES)
def test_rows_stay_where_they_are(name: str, ranks: int, rows: int) -> None:
    mesh = mw.Mesh({"dp": ranks})
    want = results(CASES[name], rows, None)
    for got in mw.simulate(lambda: results(CASES[name], rows, mesh), mesh):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:lstm has no rule")
def test_dropout_between_layers_has_no_rule() -> None:
    """It draws for all rows: inputs are gathered."""
    mesh = mw.Mesh({"dp": 2})

    def run() -> bool:
        model = mw.shard_module(nn.LSTM(3, 4, 2, dropout=0.5), mesh)
        with mw.explain() as seen:
            model(mw.shard_tensor(torch.randn(5, 4, 3), mesh, {"dp": mw.Shard(1)}))
        return "all_gather" in str(seen)

    assert all(mw.simulate(run, mesh))


@pytest.mark.parametrize("rows", [4, 3])
@pytest.mark.parametrize("name", ["gru", "lstm, both ways, two layers", "rnn"])
def test_captured_in_single_precision(name: str, rows: int) -> None:
    """In which one device takes a kernel for all of it; ranks record the same ops."""
    options, mesh = CASES[name], mw.Mesh({"dp": 2})
    first = bool(options.get("batch_first"))

    def trained(on: mw.Mesh | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = options["kind"](3, 4, **{k: v for k, v in options.items() if k != "kind"})
        x = torch.randn((rows, 5, 3) if first else (5, rows, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if on is None:
            model(x)[0].square().mean().backward()
            optimizer.step()
        else:
            batch = {"dp": mw.Shard(0 if first else 1)}
            mw.compile_step(model, lambda m, b: m(b)[0].square().mean(), optimizer, x, mesh=on, batch=batch)(x)
        return [mw.unshard(p.detach()) for p in model.parameters()]

    want = trained(None)
    for got in mw.simulate(lambda: trained(mesh), mesh):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
