"""Trainers of Hugging Face and Lightning on four processes: what they print, save and log is that of one process.

The scripts are those of ``examples/``.  Importing these stacks takes longer than the training, so one set of processes
runs all of them.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import run_processes

pytest.importorskip("accelerate")
pytest.importorskip("lightning_fabric")

SCRIPTS = ("hf_trainer.py", "accelerate_loop.py", "fabric_loop.py")


def all_of_them(folder: str, tp: int) -> dict[str, str]:
    """What each script says; the trainer's runs whole, and again from the checkpoint in its middle."""
    from tests.project.test_examples import said_by_a_rank

    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "LOCAL_WORLD_SIZE": str(dist.get_world_size())}
    more = {
        "hf_trainer.py": ("--folder", f"{folder}/whole"),
        "fabric_loop.py": ("--save", f"{folder}/fabric.ckpt"),
    }
    said = {script: said_by_a_rank(script, "--tp", str(tp), *more.get(script, ())) for script in SCRIPTS}
    resume = ("--folder", f"{folder}/again", "--resume", f"{folder}/whole/checkpoint-3")
    said["resumed"] = said_by_a_rank("hf_trainer.py", "--tp", str(tp), *resume)
    return said


@cache
def both() -> tuple[Path, dict[str, str], dict[str, str], list[dict[str, str]]]:
    import tempfile

    folder = Path(tempfile.mkdtemp())
    (one,) = run_processes(all_of_them, 1, str(folder / "one"), 1, timeout=240)
    four = run_processes(all_of_them, 4, str(folder / "four"), 2, timeout=240)
    return folder, one, four[0], four[1:]


def losses(text: str) -> list[tuple[str, float]]:
    return sorted((words, float(value)) for words, value in re.findall(r"(.*loss) ([\d.]+)", text))


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", [*SCRIPTS, "resumed"])
def test_losses_are_those_of_one_process(script: str) -> None:
    _, one, first, others = both()
    found, expected = losses(first[script]), losses(one[script])
    assert len(expected) >= 2
    assert [words for words, _ in found] == [words for words, _ in expected]
    assert [x for _, x in found] == pytest.approx([x for _, x in expected], rel=2e-6)  # six digits are printed
    assert [other[script] for other in others] == [""] * 3  # one main process


def tensors(state: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("file", "within"),
    [
        ("whole/checkpoint-6/model.safetensors", 1e-5),  # Llama computes its norms in float32, and Adam divides
        ("again/checkpoint-6/model.safetensors", 1e-5),
        ("fabric.ckpt", 1e-11),
    ],
)
def test_files_are_those_of_one_process(file: str, within: float) -> None:
    from safetensors.torch import load_file

    folder, *_ = both()
    read = load_file if file.endswith(".safetensors") else torch.load
    one, four = (tensors(read(folder / which / file)) for which in ("one", "four"))
    assert len(one) == len(four) > 2
    for a, b in zip(one, four, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=within)


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_checkpoint_of_four_goes_on_alone(tmp_path: Path) -> None:
    folder, one, *_ = both()
    (said,) = run_processes(resumed_alone, 1, str(folder / "four/whole/checkpoint-3"), str(tmp_path), timeout=240)
    found, expected = losses(said), losses(one["hf_trainer.py"])
    assert [x for _, x in found] == pytest.approx([x for _, x in expected], rel=2e-6)


def resumed_alone(checkpoint: str, folder: str) -> str:
    from tests.project.test_examples import said_by_a_rank

    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return said_by_a_rank("hf_trainer.py", "--folder", folder, "--resume", checkpoint)


def test_a_model_that_is_not_sharded_is_refused() -> None:
    from meshwright.errors import ShardError
    from meshwright.integrations.trainer import MeshTrainer

    for model in (torch.nn.Linear(2, 2), None):
        with pytest.raises(ShardError, match=r"^MeshTrainer needs model=mw\.shard_module\(model, mesh, layouts\)"):
            MeshTrainer(model)
