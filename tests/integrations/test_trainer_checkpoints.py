"""``MeshTrainer``: checkpoints that others left, or that are not whole, and loaders that differ by rank if let."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset

import meshwright as mw
from meshwright.errors import CheckpointError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.linear(x) - labels).square().mean()}


def made(folder: Path, *, mesh: bool = True, **options: Any) -> Any:
    from meshwright.integrations.trainer import MeshTrainer

    torch.manual_seed(0)
    model: nn.Module = Rows().double()
    given = {"max_steps": 5, "save_steps": 2, "learning_rate": 0.1, "report_to": [], "disable_tqdm": True}
    args = transformers.TrainingArguments(str(folder), use_cpu=True, **given | options)
    data = [{"x": torch.randn(3).double(), "labels": torch.randn(2).double()} for _ in range(24)]
    if not mesh:
        return transformers.Trainer(model, args, train_dataset=data)
    model = mw.shard_module(model, mw.Mesh({"dp": 1}))
    return MeshTrainer(model, args, train_dataset=data, batch={"dp": mw.Shard(0)})


def values(trainer: Any) -> list[torch.Tensor]:
    return [mw.unshard(p).detach().clone() for p in trainer.model.parameters()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    folder = tmp_path_factory.mktemp("whole")
    trainer = made(folder)
    trainer.train()
    return folder, values(trainer)


def goes_on(folder: Path, **options: Any) -> list[torch.Tensor]:
    trainer = made(folder, **options)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return values(trainer)


def test_checkpoints_of_an_earlier_run_give_way(whole: tuple[Path, list[torch.Tensor]], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole[0], tmp_path / "again"))
    torch.testing.assert_close(goes_on(folder), whole[1], rtol=0, atol=0)  # saves where checkpoint-4 is
    assert len(list((folder / "checkpoint-4" / "mesh").iterdir())) == 1
    made(folder).train()  # and from its beginning


def test_what_is_not_whole_is_an_error(whole: tuple[Path, list[torch.Tensor]], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole[0], tmp_path / "again"))
    (manifest,) = (folder / "checkpoint-2" / "mesh").glob("*/manifest.json")
    manifest.unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 2.*no manifest\.json"):
        goes_on(folder)
    shutil.rmtree(folder / "checkpoint-2" / "mesh")
    shutil.copytree(folder / "checkpoint-4" / "mesh", folder / "checkpoint-2" / "mesh")
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 2; complete: 4"):
        goes_on(folder)
    shutil.rmtree(folder / "checkpoint-2" / "mesh")
    with pytest.warns(UserWarning, match=r"checkpoint-2 has no states of an optimizer: it and the schedule begin anew"):
        goes_on(folder)


def test_a_checkpoint_of_one_device_goes_on(tmp_path: Path) -> None:
    trainer = made(tmp_path, mesh=False)
    trainer.train()
    torch.testing.assert_close(goes_on(tmp_path), values(trainer), rtol=0, atol=1e-15)


def test_the_order_of_the_data_is_drawn_before_random_numbers_are_set(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accelerator_config": {"use_seedable_sampler": False}, "per_device_train_batch_size": 2}
    trainer = made(tmp_path, **options)
    trainer.train()
    torch.testing.assert_close(goes_on(tmp_path, **options), values(trainer), rtol=0, atol=0)


def test_a_trainer_trains_twice(tmp_path: Path) -> None:
    found = []
    for mesh in (True, False):
        trainer = made(tmp_path / str(mesh), mesh=mesh)
        trainer.train()
        trainer.train()
        found.append(values(trainer))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-15)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_another_rank_than_the_first_reads_what_the_first_one_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator

    from meshwright.integrations import accelerate

    monkeypatch.setattr(accelerate, "runtime", SimpleNamespace(RT=SimpleNamespace(rank=1)))
    trainer = made(tmp_path, dataloader_num_workers=1)
    assert not trainer.is_world_process_zero()
    assert trainer.get_train_dataloader().worker_init_fn.keywords["rank"] == 0  # of their seeds
    assert not trainer.is_world_process_zero()
    accelerator = Accelerator(cpu=True)
    assert [x.tolist() for x in accelerator.prepare(DataLoader(Numbers(), 2))] == [[0, 1], [2, 3], [4]]
    transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    monkeypatch.undo()
    accelerate.one_device()


def test_loaders_whose_workers_stay_are_split_again(tmp_path: Path) -> None:
    trainer = made(tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    trainer.eval_dataset = trainer.train_dataset
    first = trainer.get_eval_dataloader()
    assert trainer.get_eval_dataloader() is first


def test_all_ranks_go_by_the_metrics_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.integrations import trainer as integration

    other = SimpleNamespace(all_gather_object=lambda own, _: [{"eval_loss": 7.0}, own], group=lambda mesh: None)
    trainer = made(tmp_path)
    trainer.eval_dataset = trainer.train_dataset
    monkeypatch.setattr(integration, "collective", other)
    assert trainer.evaluate()["eval_loss"] == 7.0
