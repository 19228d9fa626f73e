"""Which tests judge which module: fast ones, on simulated ranks."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "meshwright"

_CONVERSIONS = "conversions resharding convert convert_steps reduce_types partial_precision"
_RULES = "rule_strategies notation rules_book rules_basic choose partial arguments errors"
_CHOICE = "choice_types choice_prices choose moved_splits routes partial offload warm_plans inference cut_graphs"
_DISPATCH = "routes warm_plans errors api autograd writes views partial moved_splits pieces tensor autocast"
_DISPATCH += " inference gradient_types cut_graphs arguments call_counts check_mode lengths plain_tensors"
_DISPATCH += " keys written_bases written_memory attention rows_of_shards zero_sizes calls_by_name"
_DISPATCH += " functions modes copies_of_views operators autocast_weights calls leaves casts binding experts sending"
_DISPATCH += " views_by_hand runs_by_hand"
_PASSES = "passes passes_by_hand program_passes data_parallel_optimization gradient_merge batch_weights"
_PASSES += " gathers_on_wires program_recompute shard_checkpoint_inputs_captured captured_zero buckets"
_PASSES += " levels gradients fused_graphs losses_of_micro_batches loss_scale_exact reshard_after_forward"
_PASSES += " recompute_by_hand gathers_by_hand split_checkpoints"
_CHECK = "check_by_hand program_verify program_errors program_files agreement passes passes_by_hand"

# What tests without ranks judge alone, in seconds: a sample of them is in ``make test``.
SMALL = {
    "resharding/conversions.py": ("conversions",),
    "resharding/planner.py": ("resharding", "conversions"),
    "rules/strategies.py": ("rule_strategies",),
    "rules/factor_notation.py": ("notation",),
    "strategy_selection/types.py": ("choice_types",),
}

CASES = 3  # of a test with many, taken evenly
MANY = 12  # of one of a module's own

# What judges a module first: more cases of it are run.
_OWN = {
    "passes/batch_weights.py": "batch_weights losses_of_micro_batches micro_batch_axis",
    "program/capture/loss_terms.py": "micro_batch_axis batch_weights losses_of_micro_batches",
    "program/capture/micro_batches.py": "micro_batch_axis batch_weights losses_of_micro_batches",
    "dispatch/autocast.py": "casts autocast autocast_weights",
    "passes/buckets.py": "buckets data_parallel_optimization",
    "passes/data_parallel_optimization.py": "fused_graphs passes_by_hand",
    "passes/fusing.py": "fused_graphs passes_by_hand",
    "passes/gathers.py": "gathers_by_hand gathers_on_wires",
    "passes/gradient_merge.py": "gradient_merge batch_weights",
    "passes/gradients.py": "gradients passes_by_hand",
    "passes/levels.py": "levels passes_by_hand",
    "passes/scaling.py": "passes_by_hand",
    "passes/recompute.py": "recompute_by_hand program_recompute",
    "passes/reshard_after_forward.py": "reshard_after_forward program_recompute",
    "passes/split_checkpoints.py": "split_checkpoints shard_checkpoint_inputs_captured",
    "passes/splitting.py": "fused_graphs",
    "dispatch/binding.py": "binding calls_by_name",
    "dispatch/calls.py": "calls operators",
    "dispatch/execution.py": "runs_by_hand routes",
    "dispatch/keys.py": "keys",
    "dispatch/leaves.py": "leaves written_memory",
    "dispatch/rows.py": "experts sending",
    "dispatch/sending.py": "sending",
    "dispatch/views.py": "views_by_hand written_bases views",
}

# By the beginning of a module's path: the tests, without "test_" and ".py".
_JUDGES = {
    "resharding/conversions.py": _CONVERSIONS,
    "resharding/executor.py": _CONVERSIONS + " partial check_mode gradient_types check_by_hand",
    "resharding/planner.py": _CONVERSIONS + " moved_splits",
    "rules/strategies.py": _RULES,
    "rules/factor_notation.py": _RULES,
    "strategy_selection/": _CHOICE,
    "dispatch/": _DISPATCH,
    "passes/": _PASSES,
    "program/check/": _CHECK,
}


def modules(only: list[str]) -> list[str]:
    """The modules that are mutated, the most central first; those whose path begins with one of ``only``."""
    found = [
        path.relative_to(SOURCE).as_posix()
        for begin in _JUDGES
        for path in (sorted((SOURCE / begin).glob("*.py")) if begin.endswith("/") else [SOURCE / begin])
    ]
    return [m for m in found if not only or m.startswith(tuple(only))]


def judges(module: str, small: bool = False) -> list[str]:
    """The files of tests that judge a module, relative to the checkout; ``small``: without those on ranks."""
    (names,) = (tests for begin, tests in _JUDGES.items() if module.startswith(begin))
    found = {path.stem: path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    return [found[f"test_{name}"] for name in (SMALL[module] if small else names.split())]


def cases(module: str, file: str) -> int:
    """How many cases of each test of a file judge a module."""
    return MANY if Path(file).stem.removeprefix("test_") in _OWN.get(module, "").split() else CASES
