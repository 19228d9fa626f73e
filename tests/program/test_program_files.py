"""Files of programs are data: whatever is changed in one, it is a program that verifies or a ProgramError."""

from __future__ import annotations

import io
import json
import random
import re
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import ProgramError
from meshwright.program import Plan, build
from meshwright.program.ir.store import digest
from meshwright.program.run.runner import compile_program, python_of
from meshwright.ranks import runtime
from tests.support import fresh

ONE = mw.Mesh({"dp": 1})
LAST = torch.arange(12.0).reshape(1, 3, 2, 2).contiguous(memory_format=torch.channels_last)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.held = [torch.tensor([True, False, True]), torch.tensor(2.0), torch.ones(1, 1).expand(4, 3), LAST]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, two, wide, last = self.held
        return ((self.weight * x * two + wide) * mask).sum() + (last * 2).sum()


def program() -> Any:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), torch.tensor(0.5))
    return build(model, lambda m, x: m(x), optimizer, torch.ones(4, 3), ONE, Plan(), rank=0).program


def changed(path: Path, change: Any) -> Path:
    """The file with its text changed, as who attacks would: the digest is made anew."""
    with zipfile.ZipFile(path) as file:
        held = {n: file.read(n) for n in file.namelist()}
    data = json.loads(held["program.json"])
    change(data)
    held["program.json"] = json.dumps(data).encode()
    held["sha256"] = digest(held["program.json"], held["constants.bin"]).encode()
    with zipfile.ZipFile(path, "w") as file:
        for name, value in held.items():
            file.writestr(name, value)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "step.mw"
    mw.save_program(program(), path)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path, saved: bytes) -> Path:
    (tmp_path / "step.mw").write_bytes(saved)
    return tmp_path / "step.mw"


def test_it_runs_as_before(path: Path) -> None:
    loaded, made = mw.load_program(path), program()
    for name, t in made.constants.items():
        assert torch.equal(loaded.constants[name], t)
        assert loaded.constants[name].dtype is t.dtype
        assert loaded.constants[name].stride() == (t.stride() if 0 not in t.stride() else t.contiguous().stride())

    def run() -> list[Any]:
        results = []
        for p in (made, loaded):
            given = {
                "constant": lambda i, p=p: p.constants[i.name],
                "hyper": lambda i: torch.tensor(0.5),
                "batch": lambda i: torch.arange(12.0).reshape(4, 3),
            }
            weight = torch.ones(3)
            (loss,) = compile_program(p)([given[i.kind](i) if i.kind in given else weight for i in p.inputs])
            results.append((loss.item(), weight.tolist()))
        return results

    one, two = mw.simulate(run, ONE)[0]
    assert one == two
    assert one[1] != [1.0, 1.0, 1.0]


EVIL = '[][__import__("os").system("touch canary")]'


def test_names_are_not_code(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def rename(data: Any) -> None:
        text = json.dumps(data)
        data.update(json.loads(text.replace('"lr_0"', json.dumps(EVIL))))
        assert EVIL in [n["name"] for n in data["nodes"]]

    with pytest.raises(ProgramError, match="is not a name"):
        mw.load_program(changed(path, rename))
    # And were it to get through: no name of a node is in the source.
    made = program()
    for node in made.graph.nodes:
        node.name = EVIL
    source, _ = python_of(made)
    assert set(re.findall(r"[A-Za-z_]+", source)) <= {"def", "step", "inputs", "v", "call_", "value_", "return", "del",
                                                      "None", "True", "False", "dtype", "torch", "self"} | set(
        re.findall(r"(\w+)=", source)
    )  # fmt: skip
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("aten.from_file.default", "may not call 'aten.from_file.default'"),
        ("aten.save.default", "may not call 'aten.save.default'"),
        ("profiler._record_function_enter_new.default", "may not call"),
        ("aten.no_such_op.default", "there is no operator 'aten.no_such_op.default'"),
        ("os.system.default", "there is no operator"),
        ("operator.attrgetter", "damaged"),
    ],
)
def test_operators_that_a_program_may_not_call(path: Path, target: str, message: str) -> None:
    def call(data: Any) -> None:
        next(n for n in data["nodes"] if n["op"] == "call_function")["target"] = target

    with pytest.raises(ProgramError, match=message):
        mw.load_program(changed(path, call))


def _deep(data: Any) -> None:
    nested: Any = 1
    for _ in range(200):
        nested = [nested]
    data["nodes"][-2]["args"] = nested


CHANGES = {
    "deep": (_deep, "values within values"),
    "many": (lambda d: d.update(nodes=[0] * (2**20 + 1)), "1048577 nodes"),
    "twice": (lambda d: d["nodes"].insert(0, d["nodes"][0]), "second of its name"),
    "method": (lambda d: d["nodes"][-2].update(op="call_method"), "call_method"),
    "keyword": (lambda d: d["nodes"][-2].update(kwargs={"x=print(1), y": 1}), "is not a name"),
    "constant": (lambda d: d["constants"][0].__setitem__(3, [2**40]), "more bytes than the file"),
    "stride": (lambda d: d["constants"][0].__setitem__(4, [2**40]), "damaged"),
    "mesh": (lambda d: d["mesh"].update(axes={"dp": 10**12}), "distinct ranks"),
    "ranks": (lambda d: d["mesh"].update(axes={"dp": 10**12}, ranks=None), "damaged"),
    "spec": (lambda d: d["inputs"][0].update(spec="x"), "spec cannot be 'x'"),
    "value": (lambda d: d["nodes"][0]["info"].update(value=1), "value cannot be 1"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_what_is_refused(path: Path, how: str) -> None:
    change, message = CHANGES[how]
    with pytest.raises(ProgramError, match=message):
        mw.load_program(changed(path, change))


def test_a_file_is_what_was_saved(path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        held = {n: file.read(n) for n in file.namelist()}
    for name, value, message in (
        ("constants.bin", held["constants.bin"][:-1] + b"\x07", "digest"),
        ("constants.bin", held["constants.bin"] + b"\x07", "more bytes than its constants"),
        ("program.json", b" " * 2**28, "more than a program has"),
        ("program.json", b"[" * 10**6, "holds no program"),
    ):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for n, v in {**held, name: value}.items():
                file.writestr(n, v, zipfile.ZIP_STORED if n == "constants.bin" else None)
        with pytest.raises(ProgramError, match=message):
            mw.load_program(path)
    path.write_bytes(io.BytesIO(b"no zip").getvalue())
    with pytest.raises(ProgramError, match="holds no program"):
        mw.load_program(path)


def test_mutants() -> None:
    # 10,000 of them: python -m tests.support.mutants
    """In a process of their own: a crash is an error, too."""
    said = fresh.run("from tests.support import mutants; print(dict(mutants.run(80, seed=3)))")
    assert "WRONG" not in said


NAMES = [
    "0",
    "a",
    "a_b",
    "b",
    "lr",
    "0_weight",
    "class",
    "é x",
    "step",
    "flush_scale",
    "param",
    "constant_0",
    "'",
    "n" * 2000,
]
TWO = mw.Mesh({"dp": 2})


def _leaf(r: random.Random) -> nn.Module:
    made = nn.Module()
    made.register_parameter(r.choice(NAMES), nn.Parameter(torch.rand(2)))
    return made


def _tree(r: random.Random, depth: int = 2) -> nn.Module:
    made = nn.Module()
    for name in r.sample(NAMES, 3):
        made.add_module(name, _tree(r, depth - 1) if depth and r.random() < 0.5 else _leaf(r))
    return made


@pytest.mark.parametrize("seed", range(6))
def test_any_name_that_a_module_may_have_is_saved(seed: int, tmp_path: Path) -> None:
    """Beginning with a digit, keywords, very long, or equal once dots are underscores."""
    how: dict[str, Any] = [{}, {"passes": ["gradient-merge:k_steps=2"]}, {"shard_states": "dp"}][seed % 3]

    def run() -> bool:
        model = _tree(random.Random(seed))
        optimizer = [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9)][seed % 2](model.parameters())
        step = mw.compile_step(
            model, lambda m, x: sum((p * x).square().sum() for p in m.parameters()), optimizer, torch.ones(4, 2),
            mesh=TWO, batch={"dp": mw.Shard(0)}, **how,
        )  # fmt: skip
        path = tmp_path / str(runtime.RT.rank)
        mw.save_program(step.program, path)
        made = mw.load_program(path)
        return str(made) == str(step.program) and made.inputs == step.program.inputs

    assert mw.simulate(run, TWO) == [True, True]
