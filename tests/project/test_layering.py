"""The order of the layers: a module imports only from layers above its own (docs/design.md, "Layers")."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

FACADE = "meshwright"  # `import meshwright` pulls everything in: only what comes after it may do so
# Of two layers that are named "a" and "a.b", a module of a.b belongs to the latter.
LAYERS = (
    *(
        "errors",
        "torch_changes",
        "compat",
        "untrusted_files",
        "documents",
        "ranks",
        "ranks.launchers",
        "operators",
        "kernels",
        "drawing",
        "mesh",
        "layout",
        "machines",
    ),
    *("ranks.runtime", "local_tensor"),
    *("ranks.simulation", "ranks.process_group", "failures", "collective", "generator", "rules", "resharding"),
    *("strategy_selection", "dispatch", "tensor", "tensor.api"),
    *("shard.parameters", "shard.gradients", "shard.units", "shard.initialization", "shard.modules"),
    *("shard.optimizers", "shard.data", "shard"),
    *("program.ir", "program.check", "passes", "program.capture", "program.run", "program", "explanation"),
    "program.standalone",
    *(
        "program.step",
        "program.compile",
        "planner",
        "planning",
        "checkpoint",
        "testing",
        "integrations",
        "verification",
    ),
    *(FACADE, "train", "cli", "__main__"),
)
# collective moves the data, mesh and tensor meet DeviceMesh and DTensor; cli and train start processes
# mesh, layout and api speak torch's DeviceMesh, placements and DTensor; runtime reads rank and world.
# program reads the calls of torch.distributed in steps that users wrote by hand; it makes none.
USE_TORCH_DISTRIBUTED = {
    *("collective", "failures", "mesh", "layout", "ranks.runtime", "ranks.process_group", "tensor.api", "train", "cli"),
    *("program.capture", "program.compile", "program.standalone"),
}
READ_ENVIRONMENT = {"ranks.launchers"}
TORCH_DISTRIBUTED = ("torch.distributed", "torch._C._distributed_c10d")
ENVIRONMENT = ("os.environ", "os.environb", "os.getenv", "os.putenv", "sys.argv")

SOURCE = Path(__file__).parents[2] / "src" / FACADE


def used_names(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import and each attribute access; a relative import is made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if is_package else module.split(".")[:-1]
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = [*base, node.module] if node.module else base
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def under(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def is_private(name: str) -> bool:
    """Whether it is a name of torch that its documentation does not have (it has those of ops)."""
    parts = name.split(".")
    own = any(part.startswith("_") and not part.startswith(("__", "_foreach_")) for part in parts)
    return parts[0] == "torch" and own and not name.startswith("torch.ops.")


def layer_of(module: str) -> str:
    """The layer with the longest name that the module lies in; its first part where there is none."""
    name = module.partition(".")[2]
    while name and name not in LAYERS and "." in name:
        name = name.rpartition(".")[0]
    return name or FACADE


def violations(source: Path) -> list[str]:
    """What breaks the order in the package at `source`, one line each."""
    files = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        files[".".join((FACADE, *(part for part in parts if part != "__init__")))] = path

    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        layer, graph[module] = layer_of(module), set()
        if layer not in LAYERS:
            found.append(f"{module}: unknown layer {layer!r}: add it to LAYERS in tests/project/test_layering.py")
            continue
        if module == FACADE:
            continue
        for line, name in used_names(ast.parse(path.read_text()), module, path.name == "__init__.py"):
            where = f"{path.relative_to(source.parent)}:{line}"
            if under(name, TORCH_DISTRIBUTED) and layer not in USE_TORCH_DISTRIBUTED:
                found.append(f"{where}: {layer} uses {name}; only {sorted(USE_TORCH_DISTRIBUTED)} may")
            if is_private(name) and layer != "compat":
                found.append(f"{where}: {layer} uses {name}, which torch does not document: add it to compat.py")
            if under(name, ENVIRONMENT) and layer not in READ_ENVIRONMENT:
                found.append(f"{where}: {layer} reads {name}; only {sorted(READ_ENVIRONMENT)} may")
            while under(name, (FACADE,)) and name not in files:
                name = name.rpartition(".")[0]  # from a name inside a module to the module
            if name not in files or name == module:
                continue
            graph[module].add(name)
            target = layer_of(name)
            if target in LAYERS and LAYERS.index(target) > LAYERS.index(layer):
                found.append(f"{where}: {layer} imports {name}, which comes later in LAYERS")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"import cycle: {' <- '.join(error.args[1])}")
    return list(dict.fromkeys(found))


def test_imports_go_only_upwards() -> None:
    assert (SOURCE / "__init__.py").exists(), "nothing to check"
    found = violations(SOURCE)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "text", "report"),
    [
        ("layout.py", "from meshwright.tensor import DistTensor", "layout imports meshwright.tensor"),
        ("layout.py", "def f():\n    from .rules import core", "py:2: layout imports meshwright.rules.core"),
        ("rules/core.py", "from .. import tensor", "rules imports meshwright.tensor"),
        ("rules/core.py", "from ..tensor import DistTensor", "rules imports meshwright.tensor"),
        ("rules/core.py", "import meshwright as mw", "rules imports meshwright, which comes later"),
        ("rules/core.py", "from . import matmul", "import cycle: "),
        (
            "strategy_selection/types.py",
            "import torch.distributed as dist",
            "strategy_selection uses torch.distributed",
        ),
        ("strategy_selection/types.py", "from torch import distributed", "selection uses torch.distributed"),
        (
            "strategy_selection/types.py",
            "import torch\ntorch.distributed.get_rank()",
            "py:2: strategy_selection uses torch.distributed",
        ),
        ("train/loop.py", "import os\nos.environ['RANK']", "train reads os.environ"),
        ("train/loop.py", "from sys import argv", "train reads sys.argv"),
        (
            "strategy_selection/types.py",
            "from torch._ops import OpOverload",
            "strategy_selection uses torch._ops.OpOverload, which torch does",
        ),
        ("strategy_selection/types.py", "import torch\nx = torch._C._nn.gelu", "add it to compat.py"),
        (
            "strategy_selection/types.py",
            "import torch\nx = torch.ops.aten._to_copy, torch._foreach_add, torch.__version__",
            None,
        ),
        ("program/ir/nodes.py", "from ..capture import export", "program.ir imports meshwright.program.capture"),
        ("utils.py", "", "unknown layer 'utils': add it to LAYERS"),
        ("tensor.py", "from meshwright.layout import Layout\nfrom .rules.matmul import linear", None),
        ("rules/__init__.py", "from . import core, matmul", None),
        (
            "layout.py",
            "if TYPE_CHECKING:\n    from meshwright.tensor import DistTensor",
            "layout imports meshwright.tensor",
        ),
        ("train/loop.py", "import meshwright as mw\nimport torch.distributed", None),
        ("collective.py", "import torch.distributed as dist", None),
        ("ranks/launchers.py", "import os\nos.environ.get('RANK')", None),
    ],
)
def test_a_wrong_import_is_reported(tmp_path: Path, path: str, text: str, report: str | None) -> None:
    tree = dict.fromkeys(["__init__.py", "layout.py", "tensor.py", "rules/__init__.py", "rules/core.py"], "")
    tree |= dict.fromkeys(["program/__init__.py", "program/ir/__init__.py", "program/capture/__init__.py"], "")
    tree |= {"program/capture/export.py": "", "rules/matmul.py": "from meshwright.rules import core", path: text}
    for name, content in tree.items():
        file = tmp_path / FACADE / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    found = violations(tmp_path / FACADE)
    if report is None:
        assert not found
    else:
        assert any(report in line for line in found), found


def test_no_class_name_twice() -> None:
    """One word, one meaning: classes that callers see have names of their own."""
    homes: dict[str, list[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(file.relative_to(SOURCE)))
    assert not {name: files for name, files in homes.items() if len(files) > 1}
