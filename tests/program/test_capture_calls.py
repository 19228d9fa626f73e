"""How a captured step is called and what of it is named: its loss, tensors of a batch, lines, known code."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.errors import CaptureError, LayoutError, ProgramError
from meshwright.program import Plan
from meshwright.program.capture import source_lines
from meshwright.program.capture.build import build

MESH = mw.Mesh({"dp": 2})
ROWS = {"dp": mw.Shard(0)}
X = torch.arange(24.0).view(4, 6) / 9 - 1
Y = X[:, :1] * 0.3


class Regression(nn.Module):
    """Computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.o = nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        made = self.o(self.h(x).tanh())
        return F.mse_loss(made, Y if y is None else y)


def step_of(model: nn.Module, example: Any, loss: Any = None, **options: Any) -> Any:
    return mw.compile_step(model, loss, None, example, mesh=MESH, gradients=True, **options)


def refusal(model: nn.Module, batch: Any, loss: Any = None) -> str:
    with pytest.raises(CaptureError) as error:
        build(model, loss, None, batch, MESH)
    return str(error.value)


def equals_one_device(model: nn.Module, example: Any, loss: Any = None, **options: Any) -> None:
    """The loss and the gradients of a captured step."""
    one = copy.deepcopy(model)
    want = source_lines.own_loss(one, example) if loss is None else loss(one, example)
    want.backward()

    def run() -> None:
        mine = copy.deepcopy(model)
        made = step_of(mine, example, loss, **options)(example)
        torch.testing.assert_close(mw.unshard(made).detach(), want.detach())
        for name, p in one.named_parameters():
            torch.testing.assert_close(mw.unshard(mine.get_parameter(name).grad), p.grad)

    mw.simulate(run, MESH)


# ---------------------------------------------------------------------------------------------- the model's own loss


@pytest.mark.parametrize(
    ("batch", "called"),
    [
        ({"input": X}, r"calls Regression\(input=...\), and forward\(x, y\) of Regression does not take that"),
        ((X, Y, Y), r"calls Regression\(..., ..., ...\), and forward\(x, y\) of Regression"),
        ({}, r"calls Regression\(\), and forward\(x, y\)"),
    ],
    ids=["names", "too many", "none"],
)
def test_a_batch_that_forward_does_not_take(batch: Any, called: str) -> None:
    text = refusal(Regression(), batch)
    assert source_lines.re.search(called, text)
    assert "loss_fn=lambda model, batch: model(batch)" in text


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (F.mse_loss, "AttributeError: .* in mse_loss\\(model, batch\\), which compile_step calls for the loss"),
        (nn.MSELoss(), "in MSELoss\\(model, batch\\), which compile_step calls"),
        (lambda model: model, "in loss_fn\\(model, batch\\), which compile_step calls"),
        (lambda model, batch: model.h(batch[0]), r"returned a tensor of shape \(4, 4\): return its mean"),
        (lambda model, batch: {"loss": 1.0, "h": model.h(batch[0])}, "returned dict: "),
        (lambda model, batch: {"h": model.h(batch[0])}, r"returned dict that begins with one of shape \(4, 4\)"),
    ],
    ids=["function", "module", "arguments", "no mean", "a number", "a dict"],
)
def test_loss_functions_that_are_none(loss: Any, text: str) -> None:
    assert source_lines.re.search(text, refusal(Regression(), (X, Y), loss))


def test_a_model_without_a_loss_and_a_mistake_in_its_forward() -> None:
    assert "without a loss_fn Linear itself must return the loss" in refusal(nn.Linear(6, 2), X)

    class Mistaken(Regression):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            return super().forward(x, wrong=y)  # type: ignore[call-arg]

    text = refusal(Mistaken(), (X, Y))
    assert "unexpected keyword argument 'wrong'" in text
    assert "test_capture_calls.py" in text


@pytest.mark.parametrize("batch", [{"y": Y, "x": X}, (X, Y), [X], X], ids=["dict", "tuple", "list", "tensor"])
def test_a_models_own_loss(batch: Any) -> None:
    equals_one_device(Regression(), batch)


# ---------------------------------------------------------------------------------------------- names of a batch


def nested(model: Any, batch: Any) -> Tensor:
    return model(batch["images"]["pixels"], batch["y"])


@pytest.mark.parametrize(
    "said",
    [
        {"images.pixels": ROWS, "y": ROWS},
        {"batch.images.pixels": ROWS, "batch.y": ROWS},
        {"images.*": ROWS, "y": mw.Layout(MESH, ROWS)},
        {"*": [mw.Replicate()], "images.pixels": ROWS, "y": ROWS},  # the last one counts
        {"images.pixels": [mw.Replicate()], "*": ROWS},
        {"batch*": ROWS},
        ROWS,
    ],
    ids=["plain", "full", "glob", "narrow last", "wide last", "all by glob", "all"],
)
def test_tensors_of_a_batch_by_name(said: Any) -> None:
    batch = {"images": {"pixels": X}, "y": Y}
    made = build(Regression(), nested, None, batch, MESH, Plan(batch=said))
    laid = {i.name: i.spec.layout for i in made.program.inputs if i.kind == "batch"}
    assert laid == dict.fromkeys(("batch.images.pixels", "batch.y"), mw.Layout(MESH, ROWS))
    equals_one_device(Regression(), batch, nested, batch=said)


def test_a_tensor_of_a_batch_called_like_an_axis() -> None:
    made = build(Regression(), lambda m, b: m(b["dp"]), None, {"dp": X}, MESH, Plan(batch={"dp": ROWS}))
    assert [i.spec.layout for i in made.program.inputs if i.kind == "batch"] == [mw.Layout(MESH, ROWS)]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"z": ROWS}, r"'z' is neither an axis of Mesh\(dp=2\) nor a tensor of the batch.*there are: x, y"),
        ({"batch.z": ROWS}, "'batch.z' is neither .*there are: x, y"),
        ({"xs": ROWS, "y": ROWS}, "'xs' is neither"),
        ({"tp": mw.Shard(0)}, "'tp' is neither"),
        ({"x": mw.Shard(0)}, r"which does not say on which axis: {'x': {'dp': Shard\(.*0\)}} does"),
    ],
)
def test_names_that_no_batch_has(said: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        build(Regression(), None, None, {"x": X, "y": Y}, MESH, Plan(batch=said))


# ---------------------------------------------------------------------------------------------- one batch evaluated


def test_evaluating_one_batch() -> None:
    """It is the loss that one device gives in evaluation, and training goes on as it was, module by module."""

    def loss(model: Any, batch: Any) -> Any:
        return F.dropout(model[1](model[0](batch)), 0.5, model.training).square().mean()

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        model[1].eval()  # stays frozen
        return model

    def run(evaluated: bool) -> Any:
        model = net()
        step = mw.compile_step(model, loss, torch.optim.SGD(model.parameters(), 0.1), X, mesh=MESH, batch=ROWS)
        found = []
        for _ in range(3):
            torch.manual_seed(1)
            found.append(step(X).item())
            if evaluated:
                found.append(step.eval(X).item())
                assert step.training
                assert [m.training for m in model.modules()] == [True, True, False]
        assert step.eval() is step
        assert not step.training
        found += [step(X).item(), step.eval(X).item()]
        assert found[-1] == found[-2]
        assert not step.training
        with pytest.raises(ProgramError, match=r"step\(batch\) trains on a batch"):
            step.train(X)
        return found

    with_, without = mw.simulate(lambda: run(True), MESH)[0], mw.simulate(lambda: run(False), MESH)[0]
    assert with_[:6:2] + with_[6:] == without  # nothing of training has changed
    assert with_[5] == without[3]  # of the last state


# ---------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize(("causal", "inside"), [(True, True), (False, False)])
def test_masks_of_transformers_are_taken_as_they_are(causal: bool, inside: bool) -> None:
    """On one device PyTorch looks whether a mask is the causal one; a capture need not know."""
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    if not causal:
        mask = mask.roll(1, 1)
    a = torch.arange(160.0).view(4, 5, 8).sin()

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.t = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

        def forward(self, a: Tensor, given: Tensor) -> Tensor:
            m = mask if inside else given
            made: Tensor = self.t(a, a.cos(), src_mask=m, tgt_mask=m)
            return made.square().mean() + made[0].sum()

    equals_one_device(Both(), {"a": a, "given": mask}, batch={"a": ROWS})


# ---------------------------------------------------------------------------------------------- lines and known code


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package that is installed: a helper and a decorator, as transformers has them."""
    file = tmp_path / "library.py"
    file.write_text(
        "def check(cond):\n    if cond():\n        raise ValueError\n\n\n"
        "def pick(x):\n    return x[x.sum(1) > 0]\n\n\n"
        "def wrapped(fn):\n    def wrapper(*args):\n        return fn(*args)\n    return wrapper\n"
    )
    monkeypatch.setattr(source_lines, "_INSTALLED", (str(tmp_path),))
    spec = importlib.util.spec_from_file_location("library", file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("how", ["check", "pick", "pick in a block", "wrapped"])
def test_the_line_is_the_models_and_not_that_of_a_librarys_helper(library: Any, how: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            if how == "check":
                library.check(lambda: x.sum() > 0)
            if how == "pick in a block":
                with torch.no_grad():
                    x = library.pick(x)
            if how == "wrapped":
                return library.wrapped(self.chosen)(x)  # type: ignore[no-any-return]
            return self.h(library.pick(x)).mean()  # type: ignore[no-any-return]

        def chosen(self, x: Tensor) -> Tensor:
            return self.h(x).mean() * float(x.sum())  # type: ignore[no-any-return]

    text = refusal(Model(), X)
    assert "it branches on the value of a tensor" in text
    assert "test_capture_calls.py:" in text
    assert "library.py" not in text


def test_the_line_of_a_model_that_is_installed(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of a library is named, whoever calls it; what it calls of the library is not."""
    monkeypatch.setattr(source_lines, "_INSTALLED", (*source_lines._INSTALLED, str(Path(__file__).parent)))

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(library.pick(x)).mean()

    assert "test_capture_calls.py:" in refusal(Model(6, 2), X)


def batch_norm(model: Any, x: Tensor) -> Tensor:
    return model[1](model[0](x)).square().mean()  # type: ignore[no-any-return]


def ctc(model: Any, x: Tensor) -> Tensor:
    scores = model[0](x)[:, None].expand(4, 3, 6).log_softmax(-1)
    return F.ctc_loss(scores, torch.ones(3, 2, dtype=torch.long), (4, 4, 4), (2, 2, 2))


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (batch_norm, r"give the BatchNorm a momentum \(0.1\)"),
        (ctc, "shapes in ctc_loss depend on the lengths"),
    ],
)
def test_known_code_says_what_to_write(loss: Callable[[Any, Any], Any], text: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None))
    message = refusal(model, X, loss)
    assert source_lines.re.search(text, message)
    assert "test_capture_calls.py:" in message


@pytest.mark.parametrize("implementation", ["grouped_mm", pytest.param("batched_mm", marks=pytest.mark.long)])
def test_experts_of_transformers(implementation: str) -> None:
    """The refusal names a setting, and with that a step is captured and right."""
    transformers = pytest.importorskip("transformers", reason="the oracle is the transformers library")
    config = transformers.Qwen3MoeConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, experts_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config)
    ids = torch.randint(0, 50, (4, 6))
    batch = {"input_ids": ids, "labels": ids}
    text = refusal(model, batch)
    assert "model.set_experts_implementation(" in text
    assert implementation in text
    assert "modeling_qwen3_moe.py:" in text
    model.set_experts_implementation(implementation)
    equals_one_device(model, batch, lambda m, b: m(**b).loss, batch=ROWS)
