"""``torch.distributions`` in captured steps: no values are looked at, and the numbers are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import distributions as dist

import meshwright as mw
from meshwright.errors import CaptureError

Tensor = torch.Tensor
pytestmark = pytest.mark.filterwarnings("ignore:.*has no rule")


def batch() -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    make = {"generator": rng, "dtype": torch.float64}
    return torch.randn(6, 6, **make), torch.randint(0, 3, (6,), generator=rng), torch.randn(6, 3, **make)  # type: ignore[arg-type]


def categorical(model: Any, data: Any) -> Any:
    made = dist.Categorical(logits=model(data[0]))
    return -made.log_prob(data[1]).mean() - 0.1 * made.entropy().mean()


def normal(model: Any, data: Any) -> Any:
    mean, scale = model(data[0]).chunk(2, -1)
    made = dist.Normal(mean, F.softplus(scale) + 0.1)
    return -made.log_prob(data[2]).sum(-1).mean() + dist.kl_divergence(made, dist.Normal(0.0, 1.0)).mean()


def independent(model: Any, data: Any) -> Any:
    return -dist.Independent(dist.Normal(model(data[0])[:, :3], 1.0), 1).log_prob(data[2]).mean()


def bernoulli(model: Any, data: Any) -> Any:
    return -dist.Bernoulli(logits=model(data[0])).log_prob((data[0] > 0).double()).mean()


def of_several(model: Any, data: Any) -> Any:
    covariance = torch.eye(3, dtype=torch.float64)
    return -dist.MultivariateNormal(model(data[0])[:, 3:], covariance).log_prob(data[2]).mean()


def sampled(model: Any, data: Any) -> Any:
    return (dist.Normal(model(data[0]), 1.0).rsample() ** 2).mean()


def trained(loss_fn: Callable[[Any, Any], Any], mesh: mw.Mesh | None) -> list[float]:
    torch.manual_seed(0)
    model, data = nn.Linear(6, 6).double(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step: Any = mesh and mw.compile_step(model, loss_fn, optimizer, data, mesh=mesh, batch={"dp": mw.Shard(0)})
    losses = []
    for i in range(3):
        torch.manual_seed(i)
        if mesh is None:
            loss = loss_fn(model, data)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            loss = step(data)
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("loss_fn", [categorical, normal, independent, bernoulli, of_several, sampled])
def test_equals_one_device(loss_fn: Callable[[Any, Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.Distribution, "_validate_args", __debug__)  # torch.compile leaves False
    whole, mesh = trained(loss_fn, None), mw.Mesh({"dp": 3})
    for losses in mw.simulate(lambda: trained(loss_fn, mesh), mesh):
        assert losses == pytest.approx(whole, rel=1e-12)
    assert dist.Distribution._validate_args is __debug__  # as it was


def test_validation_that_is_asked_for_is_refused() -> None:
    def validated(model: Any, data: Any) -> Any:
        return dist.Normal(model(data[0]), 1.0, validate_args=True).mean.mean()

    mesh = mw.Mesh({"dp": 2})
    with pytest.raises(CaptureError, match="branches on the value of a tensor"):
        mw.simulate(lambda: trained(validated, mesh), mesh)


def test_an_assertion_about_values_is_refused() -> None:
    """PyTorch 2.15 validates so where it exports; a program would leave it out."""

    def asserted(model: Any, data: Any) -> Any:
        made = model(data[0])
        torch._assert_async((made > 0).all())
        return made.mean()

    mesh = mw.Mesh({"dp": 2})
    with pytest.raises(CaptureError, match=r"calls torch\._assert_async, which depends on the value of a tensor"):
        mw.simulate(lambda: trained(asserted, mesh), mesh)
