"""What is built of the sources, and that the core does without the extras."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import fresh

HERE = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
# Their names are taken: importing one is an error, as where it is not installed.
EXTRAS = ("safetensors", "matplotlib", "jinja2", "transformers", "accelerate", "lightning_fabric")
WITHOUT = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS}));"


def test_the_core_imports_no_extras() -> None:
    code = f"""{WITHOUT}
import importlib, pkgutil, meshwright
for module in pkgutil.walk_packages(meshwright.__path__, "meshwright."):
    if not module.name.startswith(("meshwright.__main__", "meshwright.integrations.")):
        importlib.import_module(module.name)
"""
    fresh.run(code, "torch")


def test_a_command_that_computes_has_the_guards() -> None:
    """Random programs came without ``mw.`` in front: there ``autograd.Function`` was given local tensors."""
    code = (
        "import sys; sys.argv[0] = '/bin/meshwright'; import meshwright; assert meshwright._COMMAND\n"
        "from meshwright.tensor import api; import torch\n"
        "from meshwright import torch_changes; api.Mesh({'x': 1})\n"
        "target = next(t for c in torch_changes.TABLE for t in c.targets if t.endswith('.apply'))\n"
        "owner, name = torch_changes.find(target)\n"
        "print(getattr(owner, name).__func__.__module__)"
    )
    assert fresh.run(code, "torch") == "meshwright.tensor.autograd_functions\n"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_built_trains_without_extras(kind: str, tmp_path: Path) -> None:
    copy, into = tmp_path / "copy", tmp_path / "installed"
    copy.mkdir()
    for name in SOURCES:
        shutil.copy(HERE / name, copy)
    shutil.copytree(HERE / "src" / "meshwright", copy / "src" / "meshwright")
    build = f"import setuptools.build_meta as made; made.build_{kind}('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True, timeout=120)
    (built,) = (copy / "dist").iterdir()
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(into), str(built)], check=True, capture_output=True, timeout=120)
    code = f"{WITHOUT} sys.argv[0] = 'meshwright'; import meshwright.cli as made; print(made.__file__); made.main()"
    words = ["train", "--mesh", "dp=2", "--steps", "2", "--verify", "--json"]
    environment = os.environ | {"PYTHONPATH": str(into)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    where, summary = done.stdout.splitlines()
    assert where.startswith(str(into))
    assert json.loads(summary)["max_rel_grad_diff"] < 1e-3
