"""``meshwright train --model``: models of Transformers on packed documents, equal to one device on every mesh."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.train import OptionError, TrainConfig
from meshwright.train.loop import Summary, subject_of, train
from meshwright.verification.doubled import Doubled

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
KINDS = {
    "qwen3": lambda: transformers.Qwen3Config(head_dim=8, tie_word_embeddings=True, **SIZES),
    "mixtral": lambda: transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **SIZES),
    "llama": lambda: transformers.LlamaConfig(**(SIZES | {"num_hidden_layers": 4})),  # blocks that repeat
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rng = tmp_path_factory.mktemp("models"), random.Random(0)
    for kind, config in KINDS.items():
        config().save_pretrained(path / kind)
    lines = [" ".join(rng.choice(["one", "two", "three"]) for _ in range(rng.randint(2, 9))) for _ in range(120)]
    (path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def config_for(folder: Path, kind: str, mesh: dict[str, int], **more: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "mesh": tuple(mesh.items()), "model": str(folder / kind), "data": (str(folder / "text.jsonl"),), "seq": 48,
        "batch": 4, "steps": 3, "dtype": "float64", "verify": True, "tokens": str(folder / "tokens"), "lr": 1e-2,
    }  # fmt: skip
    return TrainConfig(**(values | more))


def simulated(config: TrainConfig) -> tuple[Summary, list[float]]:
    losses: list[float] = []

    def emit(kind: str, values: dict[str, Any]) -> None:
        if kind == "step":
            losses.append(values["loss"])

    mesh = config.make_mesh()
    return mw.simulate(lambda: train(config, mesh, emit), mesh)[0], losses


BOTH, UNEVEN = {"dp": 2, "tp": 2}, {"dp": 3}


@pytest.mark.parametrize(
    ("kind", "mesh", "static"),
    [
        ("qwen3", BOTH, True),
        ("qwen3", UNEVEN, False),
        ("mixtral", BOTH, False),
        ("mixtral", UNEVEN, True),
        pytest.param("qwen3", BOTH, False, marks=pytest.mark.long),
        pytest.param("qwen3", UNEVEN, True, marks=pytest.mark.long),
        pytest.param("mixtral", BOTH, True, marks=pytest.mark.long),
        pytest.param("mixtral", UNEVEN, False, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_equal_to_one_device(folder: Path, kind: str, mesh: dict[str, int], static: bool) -> None:
    summary, _ = simulated(config_for(folder, kind, mesh, static=static))
    assert summary.max_rel_loss_diff is not None
    assert summary.max_rel_loss_diff <= 1e-9
    assert summary.max_rel_grad_diff is not None
    assert summary.max_rel_grad_diff <= 1e-8


PLANNED: dict[str, Any] = {"plan": "auto", "hardware": "cpu-gloo"}


@pytest.mark.parametrize(
    ("kind", "mesh", "more"),
    [
        ("llama", BOTH, {}),
        pytest.param("qwen3", {"dp": 3}, {"clip": 0.5}, marks=pytest.mark.long),
        pytest.param("llama", {"any": 2, "other": 2}, {"lora": 2}, marks=pytest.mark.long),
        pytest.param("mixtral", BOTH, {}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_plan_from_its_own_batch_and_loss(
    folder: Path, tmp_path: Path, kind: str, mesh: dict[str, int], more: dict[str, Any]
) -> None:
    """Planned, trained as on one device, and resumed under the plan that is found again."""
    if "lora" in more:
        pytest.importorskip("peft")
    run = PLANNED | more | {"save": str(tmp_path / "run")}
    summary, first = simulated(config_for(folder, kind, mesh, **run, steps=2))
    assert summary.max_rel_loss_diff is not None
    assert summary.max_rel_loss_diff <= 1e-9
    assert summary.max_rel_grad_diff is not None
    assert summary.max_rel_grad_diff <= 1e-8
    _, rest = simulated(config_for(folder, kind, mesh, **run, steps=3, resume=True, verify=False))
    _, whole = simulated(config_for(folder, kind, {"dp": 1}, **more, steps=3, verify=False))
    assert first + rest == pytest.approx(whole, rel=1e-9)


def test_exported_resumed_on_another_mesh_and_trained_on(folder: Path, tmp_path: Path) -> None:
    def config(mesh: dict[str, int], **more: Any) -> TrainConfig:
        return config_for(folder, "qwen3", mesh, verify=False, **more)

    _, whole = simulated(config({"dp": 1}, steps=4))
    _, first = simulated(config({"dp": 2, "tp": 2}, steps=2, save=str(tmp_path / "run")))
    out = str(tmp_path / "out")
    _, rest = simulated(config({"dp": 3}, steps=4, save=str(tmp_path / "run"), resume=True, export=out))
    assert first + rest == pytest.approx(whole, rel=1e-9)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float64
    summary, _ = simulated(config_for(folder, "", {"dp": 2}, model=out, steps=2))  # goes on from these weights
    assert summary.loss_first < whole[0]
    assert summary.max_rel_loss_diff is not None
    assert summary.max_rel_loss_diff <= 1e-9


@pytest.mark.parametrize(
    ("mesh", "static"), [({"dp": 2, "tp": 2}, False), ({"tp": 2}, True)], ids=["eager", "captured"]
)
def test_adapters_and_held_out_text(folder: Path, tmp_path: Path, mesh: dict[str, int], static: bool) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_config(KINDS["qwen3"](), dtype=torch.float64)
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "held.jsonl").write_text('{"text": "two three one"}\n{"text": "one"}\n{"text": "three one two two"}\n')
    held, seen = str(tmp_path / "held.jsonl"), []

    def emit(kind: str, values: dict[str, Any]) -> None:
        if "eval_loss" in values:
            seen.append((values["step"], values["eval_loss"]))

    config = config_for(
        folder, "", mesh, model=str(tmp_path / "base"), lora=2, static=static, evaluate=(held,),
        evaluate_every=2, export=str(tmp_path / "out"),
    )  # fmt: skip
    summary = mw.simulate(lambda: train(config, config.make_mesh(), emit), config.make_mesh())[0]
    assert summary.max_rel_loss_diff is not None
    assert summary.max_rel_loss_diff <= 1e-9
    assert [step for step, _ in seen] == [1, 2]
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "out").double()
    assert any(p.any() for n, p in tuned.named_parameters() if "lora_B" in n)
    (row,) = mw.Packed([held], length=48, folder=tmp_path)
    with torch.no_grad(), Doubled():
        loss = tuned(**{key: value[None] for key, value in row.items()}, use_cache=False).loss
    assert seen[-1][1] == pytest.approx(float(loss), rel=1e-6)  # adapters are saved in float32 or as they are


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq": 80}, r"--seq 80: .* has 64 positions"),
        ({"batch": 4000}, r"--batch 4000: --data has \d+ rows"),
        ({"model": "/none"}, "no configuration can be read"),
        ({"tokenizer": "/none"}, "--tokenizer /none cannot be read"),
        ({"hidden": 32}, "--hidden 32 is of the built-in model"),
        ({"layouts": "auto", **PLANNED}, "--layouts auto: --plan decides that"),
        ({"data": ()}, "name the text to train on"),
        ({"model": None, "layouts": "auto"}, "--layouts auto is for --model"),
        ({"mesh": (("pp", 2),)}, "no pipelines here"),
        ({"evaluate_every": 2}, "needs held-out text"),
    ],
)
def test_bad_input(folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        simulated(replace(config_for(folder, "qwen3", {"dp": 1}), **change))


USERS = """
import torch
import torch.nn as nn

def loss_fn(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def step(mesh):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x = torch.randn(40, 6, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, x[:, :2] * 2)
    layouts = {"0.*": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}} if "tp" in mesh.axes else {}
    return model, loss_fn, data, {"layouts": layouts, "evaluate": torch.utils.data.Subset(data, range(7))}

def unplanned(mesh):
    return step(mesh)[:3]

def other(mesh):
    return None

def two(mesh, rows):
    return step(mesh)

def pair(mesh):
    return step(mesh)[:2]

def kind(mesh):
    return nn.Linear, *step(mesh)[1:3]

def unlossed(mesh):
    return step(mesh)[0], "mse", step(mesh)[2]

def alone(mesh):
    return step(mesh)[0], lambda model: 0, step(mesh)[2]

def many(mesh):
    return step(mesh)[0], lambda model, batch: model(batch[0]), step(mesh)[2]

def unrowed(mesh):
    return *step(mesh)[:2], iter(())

def listed(mesh):
    return *step(mesh)[:3], ["layouts"]

def misspelt(mesh):
    return *step(mesh)[:3], {"layout": {}}

SIZE = 3
import meshwright as mw
"""

MISTAKES = {
    "two": r"two\(mesh, rows\) does not fit .*Write def two\(mesh\)",
    "other": r"other returned nothing. Return \(model, loss_fn, dataset\)",
    "pair": "pair returned a tuple of 2. Return",
    "kind": "kind returned the class Linear first, and no nn.Module",
    "unlossed": r"its loss_fn is a str. Return .* with loss_fn\(model, batch\)",
    "alone": r"loss_fn\(model\) does not fit .*Write loss_fn\(model, batch\)",
    "many": r"its loss_fn returned a tensor of shape \(2, 2\). Return the mean loss",
    "unrowed": "without rows by number",
    "listed": "returned a list last. Return a mapping",
    "misspelt": "'layout'.* layouts",
    "none": "no attribute 'none'",
    "SIZE": "SIZE is no function .int.. Name a function",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_function_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One line, before anything is trained, and no traceback."""
    (tmp_path / "mistaken.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mistaken", raising=False)

    def run() -> None:
        subject = subject_of(TrainConfig(model=f"mistaken:{name}", batch=6))
        subject.loss(subject.model("cpu"), torch.zeros(1, 2, 6, dtype=torch.float64))

    with pytest.raises(OptionError, match=MISTAKES[name]) as raised:
        run()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("static", [False, True], ids=["eager", "captured"])
def test_what_a_function_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, static: bool) -> None:
    (tmp_path / "own_steps.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    config = TrainConfig(
        mesh=(("dp", 2), ("tp", 2)), model="own_steps:step", batch=6, steps=8, dtype="float64", verify=True, lr=1e-2,
        static=static, evaluate_every=4,
    )  # fmt: skip
    seen: list[float] = []
    emit = lambda kind, values: seen.append(values["eval_loss"]) if "eval_loss" in values else None  # noqa: E731
    summary = mw.simulate(lambda: train(config, config.make_mesh(), emit), config.make_mesh())[0]
    assert summary.max_rel_loss_diff is not None
    assert summary.max_rel_loss_diff <= 1e-9
    assert len(seen) == 2
    assert seen[1] < seen[0]
    for path, message in (("own_steps:other", "returned nothing"), ("own_steps:none", "no attribute 'none'")):
        with pytest.raises(OptionError, match=message):
            simulated(replace(config, model=path))
    with pytest.raises(OptionError, match="--lora is for a model of Transformers"):
        replace(config, lora=2)


def test_a_plan_for_what_a_function_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planned_steps.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    config = TrainConfig(
        mesh=(("dp", 2), ("tp", 2)), model="planned_steps:unplanned", batch=6, steps=3, dtype="float64", verify=True,
        **PLANNED,
    )  # fmt: skip
    summary, _ = simulated(config)
    assert summary.max_rel_loss_diff is not None
    assert summary.max_rel_loss_diff <= 1e-9
    with pytest.raises(OptionError, match="--plan auto: planned_steps:step returns 'layouts' too"):
        simulated(replace(config, model="planned_steps:step"))


def test_the_example_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    summary, _ = simulated(
        TrainConfig(model="example", mesh=(("dp", 2),), dtype="float64", verify=True, steps=2, tokens=str(tmp_path))
    )
    assert summary.max_rel_loss_diff is not None
    assert summary.max_rel_loss_diff <= 1e-9
    (tmp_path / "example").mkdir()  # a folder of the user's comes first
    with pytest.raises(OptionError, match="--model example: name the text to train on"):
        TrainConfig(model="example")


@pytest.mark.parametrize("layouts", ["no/such.toml", "tests"])
def test_a_file_of_layouts_that_is_none(folder: Path, layouts: str) -> None:
    with pytest.raises(OptionError, match=rf"--layouts {layouts}: there is no such file. Pass auto"):
        simulated(config_for(folder, "llama", {"dp": 1}, layouts=layouts))


def test_tokens_outside_of_the_vocabulary(folder: Path, tmp_path: Path) -> None:
    transformers.Qwen3Config(head_dim=8, **{**SIZES, "vocab_size": 100}).save_pretrained(tmp_path / "few")
    with pytest.raises(OptionError, match="vocabulary of 100, and text read as bytes gave token 119"):
        simulated(config_for(folder, "", {"dp": 1}, model=str(tmp_path / "few")))
