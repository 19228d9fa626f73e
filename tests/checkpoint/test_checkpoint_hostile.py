"""Checkpoints that somebody else made, to do harm: the checksum of a manifest can be forged by anybody.

Nothing outside of the folder that is written to changes, nothing waits for ever, and whatever a file says, what comes
out is a CheckpointError.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import meshwright as mw
from meshwright.checkpoint.export import export
from meshwright.checkpoint.hugging_face import INDEX
from meshwright.checkpoint.inspection import damages, manifest_of
from meshwright.cli import app
from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.program.load import load_program
from meshwright.untrusted_files import plain_name

ODD_NAMES = (
    "../evil.json", "/tmp/evil.json", "a/b", "a\\b", "..\\evil", "C:evil", "", ".", "..", "\0", "a\0b", "a\nb",
    "x" * 256, "ä" * 128, "\ud800", 7, None, ["a"],
)  # fmt: skip


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """What waits for ever ends; only then does the clock matter."""

    def end(*given: object) -> None:
        raise TimeoutError("it waits for ever")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(600)
    yield
    signal.alarm(0)


class Run:
    """A run with everything that a manifest may have, and how to forge that."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        mw.Checkpoints(folder).save(1, **self.parts(step=True), gradients=True).wait()
        self.path = next(folder.iterdir())
        self.file = self.path / "manifest.json"
        self.data = json.loads(self.file.read_text())

    def parts(self, step: bool = False) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, bias=False)})
        model["b"].weight = model["a"].weight
        optimizer = torch.optim.AdamW(model.parameters())
        data = TensorDataset(torch.zeros(4, 2))
        loader = mw.shard_dataloader(DataLoader(data, batch_size=2), mw.Mesh({"dp": 1}))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        if step:
            next(iter(loader))
            model["a"](torch.ones(1, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}

    def forge(self, data: Any) -> None:
        rest = json.dumps({k: v for k, v in data.items() if k != "crc32"})[1:-1]
        self.file.write_text(f'{{"crc32": {zlib.crc32(rest.encode())},\n{rest}}}\n')

    def forged(self, *path: Any, to: Any) -> None:
        data = copy.deepcopy(self.data)
        node = data
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = to
        self.forge(data)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def everything(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "generation_config.json", "höhe 1.json", "x" * 255]
)
def test_names_that_are_plain(name: str) -> None:
    assert plain_name(name)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_that_lead_elsewhere(name: Any, run: Run, tmp_path: Path) -> None:
    """In the places where a file names others: files and configurations of a manifest, an index."""
    assert not plain_name(name)
    (tmp_path / "evil.json").write_text("mine")
    (tmp_path / "hf").mkdir()
    there = everything(tmp_path)
    if isinstance(name, str):
        for path in (("values", "config"), ("files",)):
            held = run.data[path[0]] if len(path) == 1 else run.data[path[0]][path[1]]
            run.forged(*path, to={**held, name: "x" if path[0] == "values" else [1, 2]})
            there["run/" + str(run.file.relative_to(run.folder))] = run.file.read_bytes()
            for out in ("out", "out.safetensors"):
                with pytest.raises(CheckpointError, match=r"manifest\.json is no manifest of a checkpoint"):
                    export(run.path, tmp_path / out)
            assert len(list(damages(run.path))) == 1
            assert everything(tmp_path) == there
    (tmp_path / "hf" / INDEX).write_text(json.dumps({"weight_map": {"a.weight": name}}))
    with pytest.raises(CheckpointError, match=r"which is not in its folder"):
        mw.load_weights(nn.Linear(2, 2), tmp_path / "hf")


@pytest.mark.parametrize("name", ["evil.py", "model.safetensors", "model.safetensors.tmp", INDEX, "tokenizer.json"])
def test_a_configuration_is_a_configuration(name: str, run: Run, tmp_path: Path) -> None:
    run.forged("values", "config", to={name: "{}"})
    with pytest.raises(CheckpointError, match="which no model has"):
        export(run.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_an_export_touches_nothing_that_is_there(fails: bool, run: Run, tmp_path: Path) -> None:
    """Files beside a single one that is written; with names that an export of a folder would take."""
    out = tmp_path / "out"
    out.mkdir()
    for name in (INDEX, "model.safetensors", "config.json"):
        (out / name).write_text("mine")
    there = everything(out)
    if fails:
        file = next(run.path.glob("rank-*"))
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match="is damaged"):
            export(run.path, out / "one.safetensors")
        assert everything(out) == there
        (out / "one.safetensors.tmp").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="is there already"):
            export(run.path, out / "one.safetensors")
        assert (out / "one.safetensors.tmp").is_symlink()
        assert not (tmp_path / "elsewhere").exists()
        return
    export(run.path, out / "one.safetensors")
    made = everything(out)
    assert made.pop("one.safetensors")
    assert made == there


def test_an_export_that_fails_removes_the_folders_that_it_made(run: Run, tmp_path: Path) -> None:
    next(run.path.glob("rank-*")).unlink()
    (tmp_path / "mine").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        export(run.path, tmp_path / "mine/deep/out")
    assert everything(tmp_path / "mine") == {}


def test_links_are_not_written_through(tmp_path: Path) -> None:
    """Weights that are saved to a folder that somebody else made."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "hf").mkdir()
    for name in (
        "model.safetensors.tmp",
        "model.safetensors",
        f"{INDEX}.tmp",
        INDEX,
        "config.json.tmp",
        "model_mine.safetensors",
    ):
        (tmp_path / "hf" / name).symlink_to(tmp_path / "mine")
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    mw.save_weights(model, tmp_path / "hf")
    assert not (tmp_path / "hf/model.safetensors").is_symlink()
    mw.save_weights(model, tmp_path / "hf", shard_bytes=100)
    mw.load_weights(model, tmp_path / "hf")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "hf/model_mine.safetensors").is_symlink()  # not one of the files of weights


def test_what_a_link_in_a_run_leads_to_stays(tmp_path: Path) -> None:
    """Saves that were interrupted are removed, and old ones; not what is elsewhere, or was put into their folders."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/rank-00000.safetensors").write_text("mine")
    (tmp_path / "mine/manifest.json.tmp").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/step-00000000-00000-abcd").symlink_to(tmp_path / "mine")
    there = everything(tmp_path / "mine")
    store, model = mw.Checkpoints(tmp_path / "run", keep=1), nn.Linear(2, 2)
    store.save(1, model=model).wait()
    notes = next((tmp_path / "run").glob("step-00000001-*")) / "notes.txt"
    notes.write_text("mine")
    store.save(2, model=model).wait()
    assert store.steps == [2]
    assert everything(tmp_path / "mine") == there
    assert everything(notes.parent) == {"notes.txt": b"mine"}


def test_a_link_to_nowhere_is_no_damage(run: Run) -> None:
    (run.path / "more.safetensors").symlink_to(run.path / "nowhere")
    done = CliRunner().invoke(app, ["checkpoint", "verify", str(run.folder)])
    assert (done.exit_code, done.stdout.strip()) == (0, "1 complete, all as written: step 1")


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("put", [pipe, device])
def test_only_regular_files_are_read(put: Callable[[Path], None], run: Run, tmp_path: Path) -> None:
    """A pipe in the place of a file would keep its reader for ever, a device never ends."""
    said = r"it is a (pipe|device), and no regular file|there are no weights at|has no complete checkpoint"
    import torch.distributed.checkpoint as dcp

    model = run.parts()["model"]
    mw.save_weights(model, tmp_path / "hf", shard_bytes=17)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    places = [*(tmp_path / "hf").iterdir(), *(tmp_path / "dcp").iterdir()]
    for place in places:
        whole = place.read_bytes()
        put(place)
        with pytest.raises(CheckpointError, match=said):
            mw.load_weights(model, place.parent)
        place.unlink()
        place.write_bytes(whole)
        mw.load_weights(model, place.parent)
    put(tmp_path / "program")
    with pytest.raises(MeshwrightError, match="no regular file"):
        load_program(tmp_path / "program")
    put(next(run.path.glob("rank-*")))
    assert "no regular file" in next(damages(run.path))
    with pytest.raises(CheckpointError, match="no regular file"):
        mw.Checkpoints(run.folder).load(**run.parts())
    put(run.file)
    with pytest.warns(UserWarning, match="has no complete checkpoint"):
        assert mw.Checkpoints(run.folder).load(**run.parts()) is None
    with pytest.raises(CheckpointError, match="no regular file"):
        manifest_of(run.path)


# ---------------------------------------------------------------------------------------------- odd values


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a manifest; of long lists some."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from nodes(inner, (*path, key))
    if isinstance(value, list):
        for i in sorted({0, 1, 2, len(value) - 1} & {*range(len(value))}):
            yield from nodes(value[i], (*path, i))


ODD = (
    None, 7, -1, 2**70, True, 0.5, "x", "\0", [], {}, [7], {"x": 7}, {"$tensor": "x"}, {"$tensor": []},
    {"$tensor": "a.weight"}, {"$numpy": ["|O", "00" * 8]}, {"$numpy": 7}, {"$numpy": ["i4,i4", "00" * 8]},
    {"$bounded": 3}, {"$dict": [[[], 1]]}, {"$default": ["x", 1]}, {"$dtype": "nn"}, {"$dtype": 3}, {"$bytes": "q"},
    {"$deque": 7}, {"$new": 1}, {"$complex": "x"},
)  # fmt: skip


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.long)])
def test_whatever_a_manifest_says(every: int, run: Run) -> None:
    """Each value of it is something else, with a checksum that is right: an error of ours, or a load."""
    errors, wrong = 0, []
    todo = [(path, odd) for path in nodes(run.data) if path != ("crc32",) for odd in ODD]
    for path, odd in todo[::every]:
        run.forged(*path, to=odd)
        uses: list[Callable[[], object]] = [
            lambda: mw.Checkpoints(run.folder).load(**run.parts()),
            lambda: mw.load_weights(run.parts()["model"], run.folder),
            lambda: list(damages(run.path)),
        ]
        for use in uses:
            try:
                use()
            except (CheckpointError, mw.errors.ShardError):  # of a loader's state, as documented
                errors += 1
            except Exception as error:
                wrong.append((path, odd, type(error).__name__, str(error)[:60]))
    assert not wrong, (len(wrong), wrong[:10])
    assert errors > len(todo) // every


@pytest.mark.parametrize("keys", [("values", "generators"), ("values", "generators", "python")])
def test_nothing_changes_where_generators_are_none(keys: tuple[str, ...], run: Run) -> None:
    run.forged(*keys, to=7)
    parts = run.parts()
    before = parts["model"]["a"].weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"what was saved cannot be read: .* \(TypeError\)"):
        mw.Checkpoints(run.folder).load(**parts)
    assert torch.equal(parts["model"]["a"].weight, before)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_whatever_the_header_of_a_file_says(every: int, run: Run) -> None:
    """With checksums that are right."""
    from meshwright.checkpoint.files import digest

    file = next(run.path.glob("rank-*"))
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    table = json.loads(whole[8 : 8 + length])
    for key in ("meshwright", "DCP_SHARDING_INFO"):
        table["__metadata__"][key] = json.loads(table["__metadata__"][key])
    wrong = []
    todo = [(path, odd) for path in nodes(table) for odd in (None, -1, 2**70, "x", [], {}, [7])]
    for path, odd in todo[::every]:
        made = copy.deepcopy(table)
        node = made
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = odd
        about = made["__metadata__"]
        if isinstance(about, dict):
            about.update((k, json.dumps(v)) for k, v in about.items() if not isinstance(v, str))
        text = json.dumps(made).encode()
        header = len(text).to_bytes(8, "little") + text
        file.write_bytes(header + whole[8 + length :])
        run.forged("files", file.name, to=[file.stat().st_size, digest(header)])
        for use in (lambda: mw.Checkpoints(run.folder).load(**run.parts()), lambda: list(damages(run.path))):
            try:
                use()
            except CheckpointError:
                pass
            except Exception as error:
                wrong.append((path, odd, type(error).__name__, str(error)[:60]))
    assert not wrong, (len(wrong), wrong[:10])


def test_a_state_that_is_no_tensor(run: Run) -> None:
    """The optimizer would find it in its next step: an error before anything is changed."""
    states = run.data["values"]["optimizer"][0]["states"]
    name = next(iter(states))
    key = next(k for k, data in states[name].items() if isinstance(data, dict) and "$tensor" in data)
    run.forged("values", "optimizer", 0, "states", name, key, to=True)
    with pytest.raises(CheckpointError, match=f"the optimizer's {key} is a tensor for one of"):
        mw.Checkpoints(run.folder).load(**run.parts())
