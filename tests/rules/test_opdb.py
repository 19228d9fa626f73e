"""PyTorch's own op database on simulated ranks: value and gradient of each op against the single device.

The quick run takes one sample of each op and a few layouts; the long one takes three samples, more layouts and
more meshes.  ``make conformance`` runs the same database on real processes.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import meshwright as mw
from meshwright.errors import RuleError

database = pytest.importorskip("torch.testing._internal.common_methods_invocations")  # it needs expecttest
op_db: list[Any] = database.op_db

from conformance.opdb.cases import op_name  # noqa: E402 (it needs expecttest, too)
from tests.support import cheap  # noqa: E402
from tests.support.device import DEVICE  # noqa: E402

cheap.without_names_of_tests()


@pytest.fixture(autouse=True)
def _no_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random ops show as random only where the database does not seed each call."""
    monkeypatch.setattr(database, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs))


# Why an op cannot be compared here.
INAPPLICABLE = {
    "empty_like": "uninitialised memory",
    "empty_strided": "uninitialised memory",
    "new_empty": "uninitialised memory",
    "new_empty_strided": "uninitialised memory",
    "resize_": "uninitialised memory",
    "resize_as_": "uninitialised memory",
    "torch._scaled_mm": "float8 values cannot be compared",
    "equal": "exact equality does not survive the rounding of a sum of parts",
    "tan": "the rounding of a sum of parts is magnified near a pole",
    "chalf": "parts in half precision",
    "half": "parts in half precision",
    "bfloat16": "parts in half precision",
}
MOST_INAPPLICABLE = 12
# Samples of numbers so large that the order in which float32 is rounded shows: logs of sums of exponentials of 10,000.
IN_FLOAT64 = {"logcumsumexp"}
LARGEST = 50_000  # elements: larger samples take long and show nothing new
GROUPS = 24


def samples(op: Any, most: int) -> Iterator[Any]:
    """Samples with dense tensors, float32 where the op has it."""
    dtypes = op.supported_dtypes(DEVICE)
    dtype = torch.float32 if torch.float32 in dtypes else torch.int64
    dtype = torch.float64 if op_name(op) in IN_FLOAT64 else dtype
    if dtype not in dtypes:
        return
    for sample in itertools.islice(op.sample_inputs(DEVICE, dtype, requires_grad=False), most):
        given = [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)]
        if given and all(t.layout is torch.strided for t in given) and sum(t.numel() for t in given) <= LARGEST:
            yield sample


def agrees(op: Any, sample: Any, mesh: mw.Mesh, most: int) -> str | None:
    """What differs from the single device, empty if nothing does; None if PyTorch itself refuses the sample."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if op_name(op).startswith("as_strided"):  # of new memory: of other memory a mesh does not know the strides
            x = x.clone(memory_format=torch.contiguous_format)
        return op.op(x, *args, **kwargs)

    try:
        mw.check_rule(run, sample.input, *sample.args, mesh=mesh, most=most, **sample.kwargs)
    except RuleError as error:
        return str(error)
    except Exception:
        return None  # the single device: what ranks raise comes as a RuleError
    return ""


def compared(ops: list[Any], check: Callable[[Any], Iterator[str | None]]) -> tuple[int, list[str]]:
    """(number of ops that were compared, what differed)."""
    count, found = 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in ops:
            if op_name(op) not in INAPPLICABLE:
                messages = [m for m in check(op) if m is not None]
                count += bool(messages)
                found += [f"{op_name(op)}: {m}" for m in messages if m]
    return count, found


@pytest.mark.thin(24)
@pytest.mark.parametrize("group", range(GROUPS))
def test_one_sample_of_each_op(group: int) -> None:
    mesh = mw.Mesh({"x": 3 if group % 2 else 4})

    def check(op: Any) -> Iterator[str | None]:
        for sample in samples(op, 3):
            if sum(isinstance(t, torch.Tensor) and t.ndim > 0 for t in tree_leaves(sample.input)):
                yield agrees(op, sample, mesh, 4)
                return

    count, differ = compared(op_db[group::GROUPS], check)
    assert not differ
    assert count >= 20  # of 29: the others have no sample with a tensor of a dim or more


@pytest.mark.long
@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("sizes", [(4,), (3,), (2, 2), (2, 3)], ids=str)
def test_samples_of_each_op(group: int, sizes: tuple[int, ...]) -> None:
    mesh = mw.Mesh({f"axis{i}": n for i, n in enumerate(sizes)})

    def check(op: Any) -> Iterator[str | None]:
        for sample in samples(op, 3):
            yield agrees(op, sample, mesh, 10)

    _, differ = compared(op_db[group::GROUPS], check)
    assert not differ


def test_few_ops_are_inapplicable() -> None:
    names = {op_name(op) for op in op_db}
    assert set(INAPPLICABLE) <= names
    assert len(INAPPLICABLE) <= MOST_INAPPLICABLE


@pytest.mark.long
def test_decompositions_are_the_op_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs where a dim that an op needs whole is split, run on one device: all samples, broadcast ones too."""
    from meshwright.dispatch import plans

    asked: set[str] = set()

    def split(rule: Any, specs: Any) -> bool:
        asked.add(rule.text)
        return True

    monkeypatch.setattr(plans, "_whole_is_split", split)
    mesh = mw.Mesh({"x": 1})

    def result(op: Any, given: Any, make: Callable[[torch.Tensor], Any]) -> list[Any] | None:
        args, kwargs = tree_map(lambda t: make(t.clone()) if isinstance(t, torch.Tensor) else t, given)
        try:
            made = tree_leaves(op.op(*args, **kwargs))
        except Exception:  # other tests say which are refused
            return None
        if any(isinstance(t, torch.Tensor) and t.layout is not torch.strided for t in made):
            return None
        return [mw.unshard(t) if isinstance(t, mw.DistTensor) else t for t in made if isinstance(t, torch.Tensor)]

    def equal(a: list[Any], b: list[Any]) -> bool:
        return all(torch.allclose(x, y, equal_nan=True) for x, y in zip(a, b, strict=True) if x.dtype == y.dtype)

    def run() -> None:
        for op in op_db:
            # Two draws may be equal.
            drawn = any(word in op.name for word in ("dropout", "rrelu", "fractional", "empty", "attention"))
            if drawn or op.name in INAPPLICABLE or torch.float64 not in op.supported_dtypes(DEVICE):
                continue
            for k, s in enumerate(itertools.islice(op.sample_inputs(DEVICE, torch.float64), 24)):
                given = (s.input, *s.args), s.kwargs
                if any(t.layout is not torch.strided for t in tree_leaves(given) if isinstance(t, torch.Tensor)):
                    continue
                want, again = (result(op, given, lambda t: t) for _ in range(2))
                if want is None or again is None or not equal(want, again):  # drawn
                    continue
                got = result(op, given, lambda t: mw.shard_tensor(t, mesh, {}))
                assert got is None or equal(got, want), (op.name, k)

    mw.simulate(run, mesh, timeout=3000)
    assert len(asked) > 20
