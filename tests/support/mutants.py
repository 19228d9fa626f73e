"""Mutants of program files: each must load as a program that verifies and can be saved, or be a ProgramError.

``python -m tests.support.mutants --count 10000 --seed 0`` makes and loads them in a process whose address space is
limited, and which notes code that runs and files that are opened.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import random
import resource
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GIB = 1 << 30
CODE = '[][__import__("os").system("touch canary")]'
WORDS: list[Any] = [
    CODE, "x y", "v0", "class", "", "é", "a" * 5000, "__import__", "aten.from_file.default", "aten.save.default",
    "aten.mm.default", "operator.getitem", "operator.attrgetter", "os.system", "aten.tensor_split.sections",
    "float32", "float64", "cuda", "meta", "canary", "placeholder", "get_attr", "call_method", "output",
    None, True, 0, 1, -1, 7, 2**31, 2**63, -(2**63), 10**30,
    0.5, 1e308, [], {}, [[]], {"node": CODE}, {"tuple": []}, {"dict": {CODE: 1}}, {"device": "cuda"}, {"float": "nan"},
    {"dtype": "float16"}, {"dtype": CODE}, {"value": [[2**40], "float32", 0, 0]}, {"layout": "strided"}, {"other": 1},
    {"spec": {"shape": [4], "dtype": "float32", "placements": [["shard", 0]]}},
]  # fmt: skip


def programs() -> Iterator[bytes]:
    """Files of small programs: of several ranks, merged, with constants."""
    import torch
    import torch.nn as nn

    import meshwright as mw
    from meshwright.passes import PassManager
    from meshwright.program import Plan, build

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
            return sum(t.square().sum() for t in (self.two(self.one(x).relu()) * scale).split([1, 3], -1))

    mesh = mw.Mesh({"dp": 2, "tp": 2})
    layouts = {"one.weight": {"tp": mw.Shard(0)}, "one.bias": {"tp": mw.Shard(0)}, "two.weight": {"tp": mw.Shard(1)}}
    torch.manual_seed(0)
    model = Model()
    optimizer, batch = torch.optim.SGD(model.parameters(), 0.1), torch.zeros(4, 4)
    plan = Plan(layouts, {"dp": mw.Shard(0)})
    made = build(model, lambda m, x: m(x), optimizer, batch, mesh, plan, rank=1).program
    for passes in ([], ["data-parallel-optimization"], ["gradient-merge:k_steps=2,weighted=false"]):
        file = io.BytesIO()
        mw.save_program(PassManager(passes)(made), file)
        yield file.getvalue()


# ---------------------------------------------------------------------------------------------- mutations


def _places(a: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    for key, value in a.items() if isinstance(a, dict) else enumerate(a) if isinstance(a, list) else ():
        found.append((a, key))
        _places(value, found)
    return found


def _value(data: Any, r: random.Random) -> None:
    holder, key = r.choice(_places(data, []))
    old = holder[key]
    if type(old) is int and r.random() < 0.5:
        holder[key] = old + r.choice((-1, 1, 2, 2**20, 2**62))
    elif isinstance(old, list) and old and r.random() < 0.6:
        r.choice((old.pop, old.reverse, lambda: old.append(copy.deepcopy(r.choice(old))), lambda: r.shuffle(old)))()
    elif isinstance(holder, dict) and r.random() < 0.2:
        del holder[key]
        if r.random() < 0.5:
            holder[r.choice([w for w in WORDS if isinstance(w, str)])] = old
    else:
        holder[key] = copy.deepcopy(r.choice(WORDS))


def _swap(data: Any, r: random.Random) -> None:
    (a, i), (b, j) = r.sample(_places(data, []), 2)
    a[i], b[j] = copy.deepcopy(b[j]), copy.deepcopy(a[i])


def _rename(data: Any, r: random.Random) -> None:
    """A node renamed wherever it is named: nothing but its name is wrong."""
    nodes = data["nodes"]
    old, new = (
        r.choice(nodes)["name"],
        r.choice([CODE, "lambda", "v1", "inputs", "getitem", "call_0", "x;y", "a" * 2000]),
    )
    for holder, key in _places(data, []):
        if holder[key] == old and key in ("name", "target", "node"):
            holder[key] = new


def _target(data: Any, r: random.Random) -> None:
    calls = [n for n in data["nodes"] if n["op"] == "call_function"]
    others = [n["target"] for n in calls]
    r.choice(calls)["target"] = r.choice([*others, *(w for w in WORDS if isinstance(w, str))])


def _insert(data: Any, r: random.Random) -> None:
    """A call that opens a file, or makes very many values, with all that a node has."""
    calls = [i for i, n in enumerate(data["nodes"]) if n["op"] == "call_function"]
    at = r.choice(calls)
    node = copy.deepcopy(data["nodes"][at])
    target, args = r.choice(
        [
            ("aten.from_file.default", ["canary", True, 64]),
            ("aten.save.default", [1, "canary"]),
            ("aten.ones.default", [[2**34]]),
            ("aten.tensor_split.sections", [{"node": data["nodes"][0]["name"]}, 2**30]),
            ("prims.rng_prims", []),
            ("meshwright.all_reduce.default", [{"node": data["nodes"][0]["name"]}, "sum", "dp", "canary"]),
        ]
    )
    node.update(name="inserted", target=target, args={"tuple": args})
    data["nodes"].insert(at, node)


def _deep(data: Any, r: random.Random) -> None:
    nested: Any = 1
    for _ in range(r.choice((40, 500, 20000))):
        nested = [nested]
    r.choice(data["nodes"])["args"] = {"tuple": [nested]}


def _constants(data: Any, r: random.Random) -> None:
    constant = r.choice(data["constants"])
    i = r.randrange(len(constant))
    constant[i] = copy.deepcopy(r.choice([*WORDS, [2**40], [0], [4], [-4], [2, 2], "bool", "bfloat16", "complex64"]))


IN_TEXT: list[Callable[[Any, random.Random], None]] = [
    *(_value,) * 6, _swap, _rename, _rename, _target, _target, _insert, _deep, _constants,
]  # fmt: skip


def _dumped(data: Any) -> str:
    try:
        return json.dumps(data)
    except RecursionError:  # deeper than json writes
        return "[" * 100000 + "]" * 100000


def mutant(original: bytes, r: random.Random) -> tuple[bytes, bool]:
    """Another file, and whether its digest was made anew (as who attacks would)."""
    from meshwright.program.ir.store import digest

    if r.random() < 0.15:  # bytes of the zip itself
        file = bytearray(original)
        kind = r.randrange(4)
        if kind == 0:
            return bytes(file[: r.randrange(len(file))]), False
        if kind == 1:
            return bytes(file) + r.randbytes(r.randrange(1, 4000)), False
        for _ in range(r.choice((1, 4, 64))):
            file[r.randrange(len(file))] = r.randrange(256)
        return bytes(file), False
    with zipfile.ZipFile(io.BytesIO(original)) as file:
        held = {n: file.read(n) for n in file.namelist()}
    if r.random() < 0.06:  # members
        name = r.choice(list(held))
        how = r.randrange(4)
        if how == 0:
            del held[name]
        elif how == 1:
            held[name] = held[name][: r.randrange(len(held[name]) + 1)]
        elif how == 2:
            held[name] += r.randbytes(9)
        else:
            held[name] = b" " * (1 << r.choice((20, 28)))  # deflates to little
    else:
        data = json.loads(held["program.json"])
        for _ in range(r.choice((1, 1, 1, 2, 5))):
            # An earlier mutation may have taken away what this one works on.
            with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, RecursionError):
                part = data if not data.get("parts") or r.random() < 0.7 else data["parts"]["accumulate"]
                r.choice(IN_TEXT)(part, r)
        held["program.json"] = _dumped(data).encode()
    anew = r.random() < 0.9 and {"program.json", "constants.bin"} <= set(held)
    if anew:
        held["sha256"] = digest(held["program.json"], held["constants.bin"]).encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        for name, value in held.items():
            file.writestr(name, value, zipfile.ZIP_STORED if name == "constants.bin" else None)
    return made.getvalue(), anew


# ---------------------------------------------------------------------------------------------- judging


def _watch(ran: list[str]) -> None:
    """Note commands and files with the name of the canary."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn") or (
            event == "open" and "canary" in str(args[0])
        ):
            ran.append(f"{event}{args!r}"[:200])

    sys.addaudithook(hook)


def judge(path: Path, original: str, anew: bool, ran: list[str]) -> str:
    """``"refused"``, ``"equal"``, ``"another"`` (a program of its own, which verifies) or what is wrong."""
    import meshwright as mw
    from meshwright.errors import ProgramError
    from meshwright.program.run.runner import python_of

    before = len(ran)
    try:
        program = mw.load_program(path)
        source, names = python_of(program)
        exec(compile(source, "step", "exec"), names, {})
        mw.check_program(program)
        again = io.BytesIO()
        mw.save_program(program, again)
        same = str(program) == original
        verdict = "equal" if same else "another" if anew else "WRONG: loads as another program"
    except ProgramError:
        verdict = "refused"
    except BaseException as error:
        verdict = f"WRONG: {type(error).__name__}: {error}"[:300]
    return verdict if len(ran) == before else f"WRONG: ran {ran[before]}"


def run(count: int, seed: int) -> Counter[str]:
    """Make and judge mutants here; prints what is wrong."""
    import meshwright as mw
    from meshwright.program.run import runner as runs

    runs._group = lambda axes, mesh: None  # type: ignore[assignment]  # there are no other ranks
    ran: list[str] = []
    found: Counter[str] = Counter()
    originals = list(programs())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.mw"
        texts = []
        for original in originals:
            path.write_bytes(original)
            texts.append(str(mw.load_program(path)))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 3 * GIB, used + 3 * GIB))
        _watch(ran)
        logging.disable(logging.CRITICAL)  # PyTorch logs what its fake tensors refuse
        for i in range(count):
            r = random.Random(f"{seed}.{i}")
            which = r.randrange(len(originals))
            made, anew = mutant(originals[which], r)
            path.write_bytes(made)
            verdict = judge(path, texts[which], anew, ran)
            found[verdict.split(":")[0]] += 1
            if verdict.startswith("WRONG"):
                print(f"mutant {seed}.{i}: {verdict}", flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    made = run(given.count, given.seed)
    print(dict(made))
    sys.exit(1 if made["WRONG"] else 0)
