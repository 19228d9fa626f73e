"""What is logged from four processes to TensorBoard and, offline, to Weights & Biases is what one process logs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import DesyncError
from tests.project.test_examples import losses, said_by_a_rank
from tests.support import late
from tests.support.processes import ProcessError, run_processes

pytest.importorskip("tensorboard")
pytest.importorskip("wandb")


def logged(folder: str, tp: int) -> str:
    return said_by_a_rank(
        "logged_values.py", "--tp", str(tp), "--tensorboard", f"{folder}/tb", "--wandb", f"{folder}/wb"
    )


def read_tensorboard(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (folder / "tb").iterdir()  # one rank wrote
    events = EventAccumulator(str(file), size_guidance={"histograms": 0})
    events.Reload()
    found = {name: [e.value for e in events.Scalars(name)] for name in ("loss", "gradient norm")}
    found["histograms"] = [v for e in events.Histograms("first weight") for v in e.histogram_value.bucket]
    found["sums"] = [e.histogram_value.sum for e in events.Histograms("first weight")]
    return found


def read_wandb(folder: Path) -> list[dict[str, Any]]:
    """The history of a run: a header of 7 bytes, then records behind checksum, length and type, in one block here."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wb/wandb/offline-run-*/run-*.wandb")
    data, at, found = file.read_bytes(), 7, []
    assert len(data) < 32768
    while at < len(data):
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[at + 7 : at + 7 + size])
        at += 7 + size
        if record.HasField("history"):
            items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
            found.append({k: json.loads(v) for k, v in items.items() if not k.startswith("_")})
    return found


@pytest.mark.processes
def test_four_processes_log_what_one_logs(tmp_path: Path) -> None:
    (one,) = run_processes(logged, 1, str(tmp_path / "one"), 1)
    first, *others = run_processes(logged, 4, str(tmp_path / "four"), 2)
    assert len(losses(one)) == 3
    assert losses(first) == pytest.approx(losses(one), abs=1e-6)
    assert others == ["", "", ""]
    expected, found = (read_tensorboard(tmp_path / which) for which in ("one", "four"))
    assert {name: len(values) for name, values in found.items()} == {n: len(v) for n, v in expected.items()}
    for name, values in expected.items():
        assert len(values) >= 3
        assert found[name] == pytest.approx(values, rel=1e-6)
    ours, theirs = (read_wandb(tmp_path / which) for which in ("four", "one"))
    assert len(theirs) == 3
    for a, b in zip(ours, theirs, strict=True):
        assert sorted(a) == sorted(b)
        assert [a["loss"], a["gradient norm"]] == pytest.approx([b["loss"], b["gradient norm"]], rel=1e-12)
        assert sum(b["first weight/values"]) == 45
        assert a["first weight/values"] == b["first weight/values"]


def read_of_one_shape() -> list[float]:
    """The first rank reads a tensor, then both one of the same shape: the messages alone are alike."""
    mesh = mw.init_mesh({"tp": 2}, timeout=20)
    a, b = (mw.shard_tensor(torch.full((4, 64), x), mesh, {"tp": mw.Shard(0)}) for x in (0.0, 1.0))
    if torch.distributed.get_rank() == 0:
        mw.unshard(a)
    found: list[float] = mw.unshard(b).sum(1).tolist()
    raise AssertionError(f"read {found}")


@pytest.mark.processes
def test_what_one_rank_reads_does_not_meet_what_others_read_next() -> None:
    with pytest.raises(ProcessError, match=r"DesyncError(?s:.*)to read what is read at test_logged_values.py:\d+") as e:
        run_processes(read_of_one_shape, 2, timeout=60)
    assert "AssertionError: read" not in str(e.value)


def read_by_one(what: str) -> Any:
    """Only the first rank reads; then all go on with a step."""
    mesh = mw.init_mesh({"tp": 2}, timeout=20)
    x = mw.shard_tensor(torch.arange(6.0).view(2, 3), mesh, {"tp": mw.Shard(0)})
    whole = mw.shard_tensor(torch.ones(()), mesh, {})
    read = {
        "loss": lambda: x.sum().item(),
        "format": lambda: f"{x.sum():.3f}",
        "whole": lambda: mw.unshard(x),
        "numpy": lambda: x.numpy(),
        "norm": lambda: torch.nn.utils.get_total_norm([x]).item(),
        "part": whole.item,
    }[what]
    made = read() if torch.distributed.get_rank() == 0 else None
    mw.unshard(x.square().sum())
    return made


def read_at_two_places() -> list[str]:
    """Each rank reads another scalar, in one message that fits both: neither may get a mixture of them."""
    mesh, said = mw.init_mesh({"tp": 2}), []
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        x = mw.shard_tensor(torch.arange(6.0).view(2, 3).to(dtype), mesh, {"tp": mw.Shard(0)})
        for made in (x.sum, x.mean):
            value, other = made(), x.square().sum()
            try:
                number = value.item() if mw.rank() == 0 else other.item()
                said.append(f"{dtype}: {number}")
            except DesyncError as error:
                said.append("told" if "disagree" in str(error) else str(error))
    return said


@pytest.mark.processes
@pytest.mark.parametrize("is_late", [False, True], ids=["gloo", "late"])
def test_scalars_of_each_dtype_that_ranks_read_at_two_places(is_late: bool) -> None:
    with late.ranks() if is_late else contextlib.nullcontext():
        for said in run_processes(read_at_two_places, 2, timeout=60):
            assert said == ["told"] * 6


@pytest.mark.thin(2)
@pytest.mark.processes
@pytest.mark.parametrize("what", ["loss", "format", "whole", "numpy", "norm"])
def test_what_one_rank_reads_alone_is_an_error(what: str) -> None:
    with pytest.raises(ProcessError, match=r"DesyncError|RankFailedError"):
        run_processes(read_by_one, 2, what, timeout=60)


@pytest.mark.processes
def test_what_is_whole_on_each_rank_one_may_read_alone() -> None:
    assert run_processes(read_by_one, 2, "part", timeout=60) == [1.0, None]
