"""Names of what is called, and tensors among arguments, by hand."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.dispatch.calls import OPS, function_named, map_tensors, mesh_of, op_name, resolve, spec_of, tensors_in
from meshwright.errors import LayoutError, RuleError
from meshwright.operators import INTERNAL

Tensor = torch.Tensor
aten = torch.ops.aten
# Python's operators whose name is not that of the op.
OPERATORS = {
    "truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "invert": "bitwise_not", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
    "radd": "add", "rmul": "mul", "rand": "bitwise_and", "ror": "bitwise_or", "rxor": "bitwise_xor", "div": "div",
    "add": "add", "sub": "sub", "mul": "mul", "matmul": "matmul", "eq": "eq", "getitem": "getitem",
}  # fmt: skip
WRITES = {
    "iadd": "add", "isub": "sub", "imul": "mul", "idiv": "div", "itruediv": "div", "iand": "bitwise_and",
    "ior": "bitwise_or", "ixor": "bitwise_xor", "ilshift": "bitwise_left_shift", "irshift": "bitwise_right_shift",
    "imod": "remainder", "ifloordiv": "floor_divide", "ipow": "pow", "setitem": "setitem",
}  # fmt: skip


@torch.library.custom_op("mwcalls::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """2 x."""
    return x * 2


def test_operators_of_python() -> None:
    for name, of in {**OPERATORS, **WRITES}.items():
        func = getattr(Tensor, f"__{name}__")
        op = resolve(func)
        assert (op.name, op.inplace) == (of, name in WRITES), name
        assert op.python or op.rule is not None, "one of Python is run for the ops that it calls"
        assert resolve(func) is op is OPS[func]


@pytest.mark.parametrize(
    ("func", "name", "inplace", "python", "pointwise"),
    [
        (torch.add, "add", False, False, True),
        (Tensor.add_, "add", True, False, True),
        (torch.relu_, "relu", True, False, True),
        (Tensor.t_, "t", True, False, False),
        (Tensor.copy_, "copy", True, False, True),
        (torch.sum, "sum", False, False, False),
        (F.cross_entropy, "F.cross_entropy", False, True, False),
        (F.gelu, "gelu", False, False, True),
        (torch.nn.init.normal_, "torch.nn.init.normal_", True, True, False),
        (torch.masked.sum, "torch.masked._ops.sum", False, True, False),
        (torch.einsum, "einsum", False, True, False),
        (Tensor.norm, "norm", False, True, False),
        (Tensor.unflatten, "unflatten", False, False, False),
        (aten.add.Tensor, "add", False, False, True),
        (torch.ops.mwcalls.twice.default, "mwcalls::twice", False, False, False),
        (torch.ops.mwcalls.twice, "mwcalls::twice", False, False, False),
        (twice, "mwcalls::twice", False, False, False),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_names_of_functions(func: Any, name: str, inplace: bool, python: bool, pointwise: bool) -> None:
    op = resolve(func)
    assert op.func is func
    assert (op.name, op.inplace, op.python, op.pointwise) == (name, inplace, python, pointwise)
    assert op.custom == ("::" in name)
    assert op.turns == (func is Tensor.t_)


def test_names_without_a_function() -> None:
    class Called:
        def __call__(self) -> None:
            """Nothing."""

    assert op_name(Called()) == "Called"
    assert op_name(aten.add) == op_name(aten.add.Tensor) == op_name(torch.add) == "add"
    assert op_name(twice) == op_name(torch.ops.mwcalls.twice) == "mwcalls::twice"


def test_functions_by_name() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    found = {
        "mwcalls::twice": torch.ops.mwcalls.twice, "mwcalls::twice.default": torch.ops.mwcalls.twice,
        "getitem": Tensor.__getitem__, "setitem": Tensor.__setitem__, "gelu": torch._C._nn.gelu,
        "F.cross_entropy": F.cross_entropy, "nn.functional.cross_entropy": F.cross_entropy,
        "linalg.inv": torch.linalg.inv,
        "special.erfcx": torch.special.erfcx, "fft.fft": torch.fft.fft, "add": torch.add, "index": aten.index,
        "zero_": torch.zero_, "view": Tensor.view, "dropout": torch.dropout, "F.gelu": F.gelu,
        "erfcx": torch.special.erfcx,
        "layer_norm": torch.layer_norm,
        "native_layer_norm": torch.native_layer_norm, "cholesky_ex": torch.linalg.cholesky_ex,
        "_softmax": torch._softmax, "one_hot": torch._C._nn.one_hot, "silu": torch._C._nn.silu,
        "cross_entropy": F.cross_entropy, "fill": torch.fill, "new_zeros": Tensor.new_zeros,
        "is_nonzero": torch.is_nonzero,
    }  # fmt: skip
    for name, function in found.items():
        assert function_named(name) is function, name
    for name, function in INTERNAL.items():
        assert function_named(name) is function, name
    for name, want in {"T": x.T, "real": x, "shape": x.shape, "mT": x.mT}.items():
        made = function_named(name)(x)
        assert torch.equal(made, want) if isinstance(want, Tensor) else made == want, name


@pytest.mark.parametrize(
    "name",
    ["nonsense", "mwcalls::nothing", "nonsense::twice", "F.nonsense", "linalg.nonsense", "mwcalls.twice"],
)
def test_names_of_nothing(name: str) -> None:
    with pytest.raises(RuleError, match=f"no function is known by the name '{name}'"):
        function_named(name)


class Pair(NamedTuple):
    """A class of tuples with names."""

    left: Any
    right: Any


def test_tensors_among_arguments() -> None:
    a, b, c, d, e = (torch.full((1,), float(i)) for i in range(5))
    given = (a, [b, (1, None, "no")], {"x": c, "y": [{"z": d}]}, Pair(e, 2.0), torch.float32, {a}, ..., ())
    assert [int(t) for t in tensors_in(given)] == [0, 1, 2, 3, 4]
    assert tensors_in(a) == [a]
    assert tensors_in(None) == tensors_in(()) == tensors_in("a") == []
    made = map_tensors(given, lambda t: int(t) + 10)
    assert made[:4] == (10, [11, (1, None, "no")], {"x": 12, "y": [{"z": 13}]}, Pair(14, 2.0))
    assert made[4:] == given[4:]
    assert [type(m) for m in made[1:4]] == [list, dict, Pair]
    assert map_tensors(OrderedDict(x=a), int) == {"x": 0}
    assert map_tensors([a, a], int) == [0, 0]


def test_specs_and_meshes() -> None:
    mesh, other = mw.Mesh({"a": 2, "b": 2}), mw.Mesh({"a": 4})

    def run() -> None:
        plain = torch.zeros(3, 2, dtype=torch.float64)
        x = mw.shard_tensor(plain, mesh, {"a": mw.Shard(0)})
        y = mw.shard_tensor(plain, other, {})
        assert spec_of(x, mesh) is x.__dict__["_spec"]
        spec = spec_of(plain, mesh)
        assert (spec.shape, spec.dtype, spec.mesh) == (plain.shape, torch.float64, mesh)
        assert spec.layout.placements == (mw.Replicate(), mw.Replicate())
        assert (spec.grad_partial_mask, spec.undecided_mask) == (0, mesh.everywhere)
        leaf = spec_of(plain.clone().requires_grad_(), mesh)
        assert (leaf.grad_partial_mask, leaf.undecided_mask) == (0, 0)
        assert mesh_of([plain, x, plain, x], "op") == mesh
        with pytest.raises(LayoutError, match=r"^op: no argument is a DistTensor"):
            mesh_of([plain], "op")
        with pytest.raises(LayoutError, match=r"^op: arguments lie on different meshes, .*a=2.*a=4"):
            mesh_of([x, plain, y], "op")

    mw.simulate(run, mesh)
