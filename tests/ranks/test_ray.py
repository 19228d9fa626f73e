"""Ray Train on a local cluster of two nodes: its process group, failures and restarts, other numbers of workers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

import meshwright as mw

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
torch_train = pytest.importorskip("ray.train.torch", reason="needs Ray: pip install 'ray[train]'")
STEPS = 6
FOUR = {"dp": 2, "tp": 2}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    try:
        made.add_node(num_cpus=3)
        ray.init(address=made.address, log_to_driver=False)
        assert len([node for node in ray.nodes() if node["Alive"]]) == 2
        yield
    finally:
        ray.shutdown()
        made.shutdown()


def fit(loop: Callable[[Any], None], config: dict[str, Any], workers: int, failures: int = 0) -> Any:
    import ray

    return torch_train.TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=workers, placement_strategy="SPREAD"),
        run_config=ray.train.RunConfig(
            storage_path=config["folder"], failure_config=ray.train.FailureConfig(max_failures=failures)
        ),
    ).fit()


def training() -> Callable[[Any], None]:
    """What a worker runs; made inside of a function, so that it travels by value: workers have no folder of tests."""
    layouts = {"0.*": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}}

    def loop(config: dict[str, Any]) -> None:
        import ray

        mesh = mw.init_mesh(config["mesh"])
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 4)).double()
        mw.shard_module(model, mesh, layouts if "tp" in config["mesh"] else {})
        optimizer = mw.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        store = mw.Checkpoints(f"{config['folder']}/checkpoints")
        done = store.load(model=model, optimizer=optimizer) or 0
        rank = ray.train.get_context().get_world_rank()
        for i in range(done, STEPS):
            x = torch.randn(8, 6, dtype=torch.double, generator=torch.Generator().manual_seed(i))
            loss = model(mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)})).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            store.save(i + 1, model=model, optimizer=optimizer, wait=True)
            with open(f"{config['folder']}/losses-{rank}", "a") as log:
                log.write(f"{i} {loss.item()!r}\n")
            if rank == 1 and i == config.get("dies_at") and done < i:
                os._exit(3)
            if rank == 1 and i == config.get("raises_at") and done < i:
                raise ValueError("no such row")
        with tempfile.TemporaryDirectory() as made:  # Ray keeps the numbers that came with a checkpoint
            kept = ray.train.Checkpoint(made) if rank == 0 else None
            ray.train.report({"loss": loss.item(), "ranks": mesh.size}, checkpoint=kept)

    return loop


def losses(folder: Path, rank: int = 0) -> list[tuple[int, float]]:
    rows = [line.split() for line in (folder / f"losses-{rank}").read_text().splitlines()]
    return [(int(i), float(loss)) for i, loss in rows]


@pytest.fixture(scope="module")
def one_device() -> list[tuple[int, Any]]:
    """Each step and its loss."""
    mesh = mw.Mesh({"dp": 1})

    def run() -> list[tuple[int, Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 4)).double()
        mw.shard_module(model, mesh, {})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for i in range(STEPS):
            x = torch.randn(8, 6, dtype=torch.double, generator=torch.Generator().manual_seed(i))
            loss = model(mw.shard_tensor(x, mesh, {})).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((i, pytest.approx(loss.item(), rel=1e-12)))
        return found

    return mw.simulate(run, mesh)[0]


def test_workers_that_fail_are_started_anew(cluster: None, one_device: list[Any], tmp_path: Path) -> None:
    """A worker raises, then one dies: with what was saved the run is one device's all the same, on every rank."""
    config = {"mesh": FOUR, "folder": str(tmp_path), "raises_at": 1, "dies_at": 3}
    made = fit(training(), config, 4, failures=2)
    assert made.metrics == {"ranks": 4, "loss": one_device[-1][1]}
    for rank in range(4):
        assert losses(tmp_path, rank) == one_device


def test_an_error_reaches_the_driver_and_the_next_fit_goes_on(
    cluster: None, one_device: list[Any], tmp_path: Path
) -> None:
    """The first fit ends with the worker's own error; the second has two workers and goes on where four were."""
    import ray

    with pytest.raises(ray.train.TrainingFailedError, match="no such row"):
        fit(training(), {"mesh": FOUR, "folder": str(tmp_path), "raises_at": 2}, 4)
    assert fit(training(), {"mesh": {"dp": 2}, "folder": str(tmp_path)}, 2).metrics["ranks"] == 2
    assert losses(tmp_path) == one_device


def test_what_ray_prepares_is_refused(cluster: None, tmp_path: Path) -> None:
    """``prepare_model`` wraps in DDP, ``prepare_data_loader`` gives each worker other rows."""

    def loop(config: dict[str, Any]) -> None:
        mesh = mw.init_mesh({"dp": 2})
        torch.manual_seed(0)
        model = mw.shard_module(nn.Linear(4, 4), mesh, {})
        with pytest.raises(mw.errors.MeshwrightError, match="with Ray Train leave out prepare_model"):
            torch_train.prepare_model(model)
        prepared = torch_train.prepare_data_loader(DataLoader(torch.arange(8.0), batch_size=4))
        with pytest.raises(mw.errors.DesyncError, match="each rank must load the same global batch"):
            next(iter(mw.shard_dataloader(prepared, mesh)))
        Path(config["folder"], "refused").touch()

    fit(loop, {"folder": str(tmp_path)}, 2)
    assert (tmp_path / "refused").exists()
