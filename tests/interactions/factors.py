"""The table: factors, each with its values, one line each.  The first value is the default, to which cases shrink."""

from __future__ import annotations

from typing import Any

from .blocks import BLOCKS
from .losses import LOSSES

# Axes of the mesh: the rows of a batch are split over dp, its positions over cp, weights over tp.
MESHES: dict[str, dict[str, int]] = {
    "dp=2": {"dp": 2},
    "dp=3": {"dp": 3},
    "dp=4": {"dp": 4},
    "tp=2": {"tp": 2},
    "tp=3": {"tp": 3},
    "cp=2": {"cp": 2},
    "dp=2,tp=2": {"dp": 2, "tp": 2},
    "dp=2,cp=2": {"dp": 2, "cp": 2},
    "dp=2,cp=2,tp=2": {"dp": 2, "cp": 2, "tp": 2},
}

# Rows of a batch, of the number of ranks that share it.
ROWS: dict[str, Any] = {
    "even": lambda n: 2 * n,
    "uneven": lambda n: 3 * n - 1,
    "one on the last": lambda n: 2 * n - 1 if n > 1 else 3,
    "one each": lambda n: n,
    "none on some": lambda n: {1: 2, 2: 1, 3: 4}.get(n, 5),
}

# Rows of the second batch, of the number of ranks and the rows of the first.
SECOND: dict[str, Any] = {
    "same": lambda n, rows: rows,
    "more": lambda n, rows: rows + n,
    "one on the last": lambda n, rows: n + 1 if n == 2 else 2 * n - 1 if n > 1 else 1,
    "one": lambda n, rows: 1,
}

MODES: dict[str, dict[str, Any]] = {
    "eager": {"kind": "eager"},
    "captured": {"kind": "captured"},
    "data-parallel": {"kind": "captured", "passes": ["data-parallel-optimization"]},
    "by hand": {"kind": "by hand"},
    "by hand, data-parallel": {"kind": "by hand", "passes": ["data-parallel-optimization"]},
    "stages": {"kind": "captured", "stages": 2},
    "pipeline": {"kind": "captured", "stages": 2},
}

# Of a pipeline; elsewhere it means nothing.
SCHEDULES: tuple[str, ...] = ("1f1b", "gpipe", "zero-bubble", "looped,chunks=2", "v")

# Micro-batches of an update: by no_sync, gradient-merge, a loop in a step by hand, the pipeline.
MICRO: dict[str, int] = {"1": 1, "2": 2, "3": 3}

# Over (or on) what parameters or states are stored; "data" is the first axis of the mesh.
STORAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fsdp": {"fsdp": "data"},
    "fsdp, kept": {"fsdp": "data", "reshard_after_forward": False},
    "offload": {"offload": "cpu"},
    "fsdp and on": {"fsdp": "data", "offload": "cpu"},
    "shard_states": {"shard_states": "data"},
}

# How weights of the model are split over the last axis of the mesh.
LAYOUTS: tuple[str, ...] = ("none", "columns and rows", "rows", "found", "planned", "Partial", "sequence")

# "sequence first": a batch of (positions, rows, ...), as recurrent models have it.
INPUTS: tuple[str, ...] = ("contiguous", "transposed", "expanded", "every second", "sliced", "sequence first")
VALUES: tuple[str, ...] = ("contiguous", "last dim outside", "positions first", "expanded", "every second", "flat")

INITIAL: tuple[str, ...] = ("as built", "meta", "loaded", "meta, loaded", "from a file")

UPDATES: dict[str, dict[str, Any]] = {
    "SGD": {"kind": "SGD"},
    "SGD, momentum, clipped": {"kind": "SGD", "momentum": 0.9, "clip": 0.05},
    "AdamW": {"kind": "AdamW"},
    "AdamW, clipped": {"kind": "AdamW", "clip": 0.05},
    "RMSprop": {"kind": "RMSprop"},
    "Adagrad": {"kind": "Adagrad"},
    "Lamb": {"kind": "Lamb"},  # each parameter whole at one rank
    "Prodigy": {"kind": "Prodigy"},  # all parameters whole on each rank
    "two optimizers": {"kind": "SGD", "two": True},
    "made before": {"kind": "AdamW", "before": True},  # than the model is on the mesh, and not sharded by itself
    "scheduled": {"kind": "SGD", "scheduled": True},
    "gradients only": {"kind": None},
}

CONTEXTS: tuple[str, ...] = (
    "none",
    "checkpoint",
    "reentrant checkpoint",
    "shard_checkpoint_inputs",
    "every layer checkpointed",  # and what it reads is sharded
    "forward hook",
    "tensor hook",
    "hook after gradients",  # of each parameter, of which one is used in the first step alone
    "frozen",
    "frozen in between",
    "eval in between",
    "inference in between",
    "device",
    "no_grad",
    "exception",
    "function",
)

# (stored, computed, reduced) where they are not float64.
PRECISIONS: dict[str, dict[str, Any]] = {
    "float64": {},
    "float32": {"stored": "float32"},
    "computed in float32": {"compute": "float32", "reduce": "float64"},
    "reduced in float32": {"reduce": "float32"},
    "autocast": {"stored": "float32", "autocast": True},
}

RANDOM: tuple[str, ...] = ("none", "dropout", "noise")

# An embedding that is added to the first activations: positions repeated for each row by expand, as Transformers has
# them; tokens of the first row, which all rows get.
POSITIONS: tuple[str, ...] = ("none", "expanded", "of the first row")

# Whether a weight is the sum of two parameters, which get the same tensor as gradient from autograd; one of them may be
# used in the first layer, too.
HEADS: tuple[str, ...] = ("one weight", "two weights added", "the first weight added")

# Where batches come from (of a dataset each rank reads its own rows); a rank that skips one must be an error.
LOADERS: tuple[str, ...] = ("tensors", "shard_dataloader", "dataset", "one rank skips a batch")

# Positions of each batch.
LENGTHS: dict[str, tuple[int, ...]] = {"one": (4, 4, 4), "two": (4, 6, 4), "many": (4, 6, 8, 5)}

# After the first step: a checkpoint, which another program loads; or weights move to another mesh and come back halved.
RESUMED: tuple[str, ...] = ("no", "same mesh", "other layout", "moved")

FACTORS: dict[str, tuple[str, ...]] = {
    "mesh": tuple(MESHES),
    "rows": tuple(ROWS),
    "second": tuple(SECOND),
    "mode": tuple(MODES),
    "schedule": SCHEDULES,
    "micro": tuple(MICRO),
    "storage": tuple(STORAGES),
    "block": tuple(BLOCKS),
    "layouts": LAYOUTS,
    "loss": tuple(LOSSES),
    "inputs": INPUTS,
    "values": VALUES,
    "initial": INITIAL,
    "update": tuple(UPDATES),
    "context": CONTEXTS,
    "precision": tuple(PRECISIONS),
    "random": RANDOM,
    "positions": POSITIONS,
    "head": HEADS,
    "loader": LOADERS,
    "lengths": tuple(LENGTHS),
    "resumed": RESUMED,
}
DEFAULTS: dict[str, str] = {name: values[0] for name, values in FACTORS.items()}
Case = dict[str, str]


def case(**values: str) -> Case:
    """A case, of the values that are not the defaults."""
    for name, value in values.items():
        if value not in FACTORS[name]:
            raise ValueError(f"{name}={value!r}: one of {FACTORS[name]} was expected")
    return {**DEFAULTS, **values}


def short(made: Case) -> Case:
    """Of a case, the values that are not the defaults."""
    return {name: value for name, value in made.items() if value != DEFAULTS[name]}
