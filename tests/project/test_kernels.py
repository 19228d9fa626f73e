"""Kernels that PyTorch keeps behind a public function are called through ``meshwright.kernels``, which guards them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "meshwright"
GUARDED = "kernels.py"
# Private ops that the package names elsewhere: they take tensors with any strides, or no tensor at all.
ANY_STRIDES = {
    *("_to_copy", "_unsafe_view", "_reshape_alias", "_conj", "_neg_view", "_local_scalar_dense"),
    *("_assert_tensor_metadata", "_assert_scalar", "_amp_update_scale_"),
    "_amp_foreach_non_finite_check_and_unscale_",
}
# They walk through memory element by element: program/capture/update.py gives them tensors with the same strides, and
# shard/optimizers/kinds.py tries one on vectors.
SIDE_BY_SIDE = {"_fused_sgd_", "_fused_adam_", "_fused_adamw_"}


def private_ops(tree: ast.AST) -> Iterator[str]:
    """Names of the private ops of ``torch.ops.aten`` that a module reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("_foreach_"):
            base = ast.unparse(node.value)
            if base in ("aten", "_ATEN", "torch.ops.aten"):
                yield node.attr


def unguarded(folder: Path) -> list[str]:
    return [
        f"{path.relative_to(folder)}: {name}"
        for path in sorted(folder.rglob("*.py"))
        if path.name != GUARDED
        for name in private_ops(ast.parse(path.read_text()))
        if name not in ANY_STRIDES | SIDE_BY_SIDE
    ]


def test_kernels_are_guarded(tmp_path: Path) -> None:
    assert unguarded(SOURCE) == []
    (tmp_path / "rule.py").write_text("import torch\n\nx = torch.ops.aten._flash_attention_forward(1)\n")
    assert unguarded(tmp_path) == ["rule.py: _flash_attention_forward"]
