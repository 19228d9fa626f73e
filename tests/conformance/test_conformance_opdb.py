"""The harness of ``make conformance``: what it tries, how it judges, and that it can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest")

from torch.testing._internal.common_methods_invocations import op_db

from conformance.opdb import __main__ as harness
from conformance.opdb.cases import Case, layouts, op_name, samples, set_sizes
from conformance.opdb.worker import Answer, Reference, difference

BY_NAME = {op_name(op): op for op in op_db}


def test_layouts_are_the_same_for_everybody_and_cover_all_tensors() -> None:
    tensors = [torch.zeros(5, 10), torch.zeros(10, 5)]
    made = list(layouts(tensors, 0, 6, "seed"))
    assert made == list(layouts(tensors, 0, 6, "seed"))
    row = [c.places for c in made if c.mesh == (4,)]
    for want in [((0,), ("R",)), ((0,), (0,)), ((1,), ("R",)), (("R",), (0,)), (("R",), ("R",)), (("P",), ("R",))]:
        assert want in row
    assert str(Case(0, (2, 2), ((0, "R"), ("R", 1)))) == "S0,R R,S1"


def test_a_dtype_that_an_op_lacks_is_not_tried() -> None:
    set_sizes("uneven")
    assert samples(BY_NAME["erf"], torch.complex128, 2, 0) == []
    assert samples(BY_NAME["erf"], torch.float64, 2, 0)
    assert samples(BY_NAME["bitwise_and"], torch.float32, 2, 0)[0].tensors[0].dtype is torch.int64


@pytest.mark.parametrize(
    ("got", "want", "says"),
    [
        (torch.ones(2), torch.ones(2), ""),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), ""),
        (torch.ones(2), torch.ones(3), "(2,) for"),
        (torch.ones(2), torch.ones(2).double(), "float32 (2,) for"),
        (torch.ones(2) * 1.01, torch.ones(2), "off by 0.01"),
        (torch.tensor([1]), torch.tensor([2]), "other integers"),
        (1.0, torch.ones(()), "a float for a tensor"),
        (3, 4, "3 for 4"),
    ],
)
def test_differences(got: Any, want: Any, says: str) -> None:
    found = difference(got, want)
    assert says in found
    assert bool(found) == bool(says)


def test_ranks_that_do_not_agree_are_a_desync() -> None:
    good, bad = Answer("pass", sent=1.0), Answer("error", "no")
    assert harness.together([good] * 4, False) == Answer("pass", "", 4.0)
    assert harness.together([good, good, bad, good], False).kind == "desync"
    assert harness.together([bad] * 4, False) == Answer("error", "no")
    assert harness.together([good, None, None, None], False).kind == "desync"
    assert harness.together([None] * 4, False).kind == "timeout"
    assert harness.together([good, None, good, good], True).kind == "crash"
    wrong = Answer("wrong_value", "off by 1")
    assert harness.together([good, wrong, good, good], False).kind == "wrong_value"


class Liar:
    """One device, but for a gradient or a value that is off."""

    def __init__(self, value: float, gradient: float) -> None:
        self.value, self.gradient = value, gradient

    def distribute(self, tensor: torch.Tensor, mesh: Any, places: Any, grad: bool) -> torch.Tensor:
        return tensor.detach().clone().requires_grad_(grad)

    def owns(self, obj: Any) -> bool:
        return isinstance(obj, torch.Tensor)

    def full(self, obj: torch.Tensor) -> torch.Tensor:
        return obj * self.value

    def summed(self, obj: torch.Tensor) -> torch.Tensor:
        return obj

    def like(self, grad: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        return grad * self.gradient


@pytest.mark.parametrize(
    ("value", "gradient", "kind"), [(1, 1, "pass"), (1.1, 1, "wrong_value"), (1, 1.1, "wrong_gradient")]
)
def test_wrong_values_and_gradients_are_found(value: float, gradient: float, kind: str) -> None:
    set_sizes("uneven")
    sample = samples(BY_NAME["mul"], torch.float64, 1, 0)[0]
    case = next(layouts(sample.tensors, 0, 1, "a"))
    liar: Any = Liar(value, gradient)
    assert Reference(BY_NAME["mul"], sample).judge(liar, None, case, lambda: 0.0).kind == kind


@pytest.mark.long
def test_the_command_beside_dtensor(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "conformance.opdb", "--ops", "mm", "--n", "1", "--sizes", "uneven", "--jobs", "1"]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "CONFORMANCE_OUT": str(tmp_path)}
    done = subprocess.run(
        [*command, "--against", "dtensor"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "meshwright" in done.stdout
    assert "Bytes of the op and its backward" in done.stdout
    found = [json.loads(line) for line in next(tmp_path.glob("*.jsonl")).read_text().splitlines()]
    assert {r["contender"] for r in found} == {"meshwright", "dtensor"}
    assert {r["kind"] for r in found} == {"pass"}
