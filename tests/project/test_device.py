"""``MESHWRIGHT_TEST_DEVICE``: where the tests put meshes and tensors, shown on the meta device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import meshwright as mw
from tests.support import device

ROOT = Path(__file__).parents[2]


def test_meshes_and_tensors_of_tests_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn() -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(3)
        leaf = torch.randn(3, generator=g, requires_grad=True)
        assert leaf.is_leaf
        assert leaf.requires_grad
        mesh = mw.Mesh({"dp": 2})
        x = mw.shard_tensor(torch.ones(4, 2), mesh, {"dp": mw.Shard(0)})
        made = torch.nn.Linear(2, 2)(torch.ones(1, 2))
        return [leaf, x.to_local(), made, torch.tensor([1.0]), torch.arange(3)]

    with device.install(monkeypatch, "meta"):
        mesh = mw.Mesh({"dp": 2})
        assert mesh.device == "meta"
        found = mw.simulate(fn, mesh)
    for tensors in found:
        assert {t.device.type for t in tensors} == {"meta"}
    assert torch.ones(1).device.type == device.DEVICE


def test_what_a_test_names_stays() -> None:
    with device.On("meta"):
        assert torch.ones(2, device="cpu").device.type == "cpu"
        drawn = torch.randn(3, generator=torch.Generator().manual_seed(1), device="cpu")
    assert drawn.equal(torch.randn(3, generator=torch.Generator().manual_seed(1), device="cpu"))


def test_the_most_telling_files_exist_and_name_no_device() -> None:
    """``offload="cpu"`` names the host; nothing else in them names the CPU."""
    for name in device.TELLING:
        text = (ROOT / name).read_text()
        for word in ('device="cpu"', 'autocast("cpu"', 'GradScaler("cpu"', 'sample_inputs("cpu"'):
            assert word not in text, (name, word)
