"""The most telling tests of each room, of ``make test-quick``: by files, for a test by its name runs whole grids.

``python -m tests.support.quick`` prints them, one to a line.  ``tests/project/test_quick.py`` holds that each room has
some.  What they cost is in their number: about 90 seconds on two cores, so that what comes in replaces something.
"""

from __future__ import annotations

QUICK: dict[str, tuple[str, ...]] = {
    "layout": ("layout/test_layout.py",),
    "mesh": ("layout/test_mesh.py",),
    "ranks": ("ranks/test_simulation.py",),
    "resharding": ("resharding/test_resharding.py",),
    "collective": ("collective/test_collective_counts.py", "collective/test_digests.py"),
    "failures": ("failures/test_agreement.py",),
    "rules": ("rules/test_notation.py", "rules/test_rule_strategies.py"),
    "strategy_selection": ("strategy_selection/test_choice_types.py", "strategy_selection/test_choose.py"),
    "dispatch": (
        "dispatch/test_call_counts.py",
        "dispatch/test_partial.py",
        "dispatch/test_routes.py",
        "dispatch/test_warm_plans.py",
    ),
    "tensor": (
        "tensor/test_autograd.py",
        "tensor/test_copies_of_views.py",
        "tensor/test_inference.py",
        "tensor/test_views.py",
        "tensor/test_writes.py",
    ),
    "documents": ("documents/test_packed.py",),
    "planner": ("planner/test_solve.py",),
    "shard": ("shard/test_shard_storage.py", "shard/test_writes_between_modules.py"),
    "program": (
        "program/test_captured_zero.py",
        "program/test_check_by_hand.py",
        "program/test_program_views.py",
        "program/test_schedules.py",
    ),
    "passes": ("passes/test_passes.py",),
    "checkpoint": ("checkpoint/test_checkpoint_pieces.py",),
    "explanation": ("explanation/test_budget.py",),
    "project": ("project/test_layering.py", "project/test_one_entry.py"),
}


def listed() -> list[str]:
    """All of them, as pytest takes them in the root of the checkout."""
    return [f"tests/{test}" for tests in QUICK.values() for test in tests]


if __name__ == "__main__":
    print("\n".join(listed()))
