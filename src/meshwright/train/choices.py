"""What options of training may be: names, defaults and bounds, and how a mesh and passes are read."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from meshwright.errors import MeshError, PassError, near
from meshwright.mesh import Mesh, parse_mesh

if TYPE_CHECKING:
    from meshwright.passes import PassManager

PRECISIONS = ("bf16",)
WIRES = ("bf16", "float8")
DTYPES = ("float64", "float32", "bfloat16")
LEARNING_RATES = {"adamw": 3e-3, "sgd": 0.1}
OPTIMIZERS = tuple(LEARNING_RATES)
DEVICES = ("cpu", "cuda")
HOSTS = ("cpu",)
VOCABULARY = 256  # one entry per byte
BATCH = 8
MOMENTUM = 0.9
MERGE = "gradient-merge"  # the pass that accumulates
# Those that come with the package.
PASSES = ("data-parallel-optimization", MERGE, "pipeline", "recompute", "reshard-after-forward", "split-checkpoints")
CHUNKED = ("looped", "v")  # of which a rank has several stages
SCHEDULES = ("1f1b", "gpipe", "zero-bubble", *CHUNKED, "uncut")
AUTO_PLAN = "auto"  # of --plan: found when training begins
STAGES = "pp"  # the axis over which the blocks of the built-in models are spread
AXES = {  # of the plan of the built-in models
    "dp": "splits the batch",
    "cp": "splits the sequence",
    "tp": "splits heads, MLP and vocabulary",
    "ep": "splits experts and the batch",
    STAGES: "spreads the blocks",
}
FITS = ("best", "cut")
EXAMPLE = "example"  # of --model: a folder of the package, with text
OF_LIBRARY = ("data", "layouts", "tokenizer", "tokens", "lora")  # options that are for a model of Transformers
OF_BUILT_IN = (  # options that say what the built-in model is
    "layers", "hidden", "heads", "experts", "experts_per_token", "expert_width", "shared_experts", "tie", "dropout",
    "packed", "sequence_parallel",
)  # fmt: skip
OF_BATCH = ("dp", "ep")  # those of them that split its sequences
# dtype to (loss, gradients): the largest relative differences that rounding explains.  float64 proves the
# mathematics.  bfloat16 has 8 bits, so sums in another order differ in the second digit: there the bound only
# tells a wrong step from a right one.
TOLERANCES = {"float64": (1e-9, 1e-8), "float32": (1e-4, 1e-3), "bfloat16": (5e-2, 5e-1)}

MESH, MODEL, TRAINING, SPLITTING = "Mesh", "Model", "Training", "Splitting more"
PROGRAM, CHECKPOINTS, OUTPUT = "Static program", "Checkpoints", "Output"


def read_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """``"dp=2,tp=4"`` as axes and sizes.  Raises MeshError."""
    mesh = parse_mesh(text)
    return tuple(zip(mesh.axes, mesh.sizes, strict=True))


def check_axes(mesh: Mesh) -> None:
    """Raises MeshError for an axis that the plan of the built-in models knows nothing to do with."""
    unknown = [a for a in mesh.axes if a not in AXES]
    if unknown:
        known = ", ".join(f"{axis} ({what})" for axis, what in AXES.items())
        raise MeshError(
            f"axis {unknown[0]!r} of {mesh!r}: the plan of this model does not know it. It knows {known}; "
            "e.g. --mesh dp=2,tp=2"
        )


def ways_of(mesh: tuple[tuple[str, int], ...]) -> int:
    """Into how many parts the sequences of a batch are split."""
    return math.prod(n for axis, n in mesh if axis in OF_BATCH)


def passes_of(texts: tuple[str, ...]) -> PassManager:
    """Passes from names and options.  Raises PassError, for a name that cannot be without importing PyTorch."""
    if "meshwright.passes" not in sys.modules:  # nobody has registered others yet
        for name in (text.partition(":")[0].strip() for text in texts):
            if name not in PASSES:
                raise PassError(f"there is no pass {name!r}{near(name, PASSES)}")
    from meshwright.passes import PassManager

    return PassManager(texts)
