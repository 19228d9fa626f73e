"""Decoders of transformers, unchanged, with a split sequence or split experts: every gradient against one device.

``python -m conformance.decoders`` trains one step of each on simulated ranks, eagerly and captured: of ``context`` five
with a sequence of 8,192 that four ranks split (windows, a state space and a gated delta rule among them), of
``experts`` four whose experts are split over ``ep`` beside ``dp``.  Widths are small and all is float64, upcasts too.
A row says how far loss and gradients are off, in parts of the largest number of each tensor, and what a rank sent.
The exit code is 1 if one is further off than 1e-9.
"""

from __future__ import annotations

import argparse
import fnmatch
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

import meshwright as mw
from meshwright import collective

from .doubled import float64

Tensor = torch.Tensor
MOST = 1e-9
BASE = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "head_dim": 8, "use_cache": False,
}  # fmt: skip
_MAMBA = {"num_heads": 8, "state_size": 8, "n_groups": 2, "chunk_size": 64, "num_hidden_layers": 1}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
CONTEXT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma3 with windows": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 128}),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", _MAMBA),
    "qwen3-next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _DELTA),
    "qwen3-next by parts": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _DELTA),  # with set_recurrences
}
_DEEPSEEK = {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 12,
    "first_k_dense_replace": 0, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "head_dim": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4,
}  # fmt: skip
_MIXTURE = {"num_experts_per_tok": 2, "output_router_logits": True}
EXPERTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 5, **_MIXTURE}),
    "qwen3-moe": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"num_experts": 5, "moe_intermediate_size": 12, **_MIXTURE},
    ),
    "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _DEEPSEEK),
    "gpt-oss": (
        "GptOssConfig", "GptOssForCausalLM",
        {"num_local_experts": 5, "num_experts_per_tok": 2},
    ),
}  # fmt: skip


class Case(NamedTuple):
    """A decoder on a mesh."""

    name: str
    made: Any  # called; a model with its values
    ids: Tensor
    mesh: mw.Mesh
    batch: dict[str, mw.Shard]
    layouts: dict[str, Any]


class Step(NamedTuple):
    """What one step gave: loss, gradients, and what a rank sent, as kinds and bytes."""

    loss: float
    grads: dict[str, Tensor]
    kinds: dict[str, int]
    bytes: int


def decoder(table: dict[str, tuple[str, str, dict[str, Any]]], name: str, **more: Any) -> Any:
    """A model of a table, with values drawn from one seed: its own, or of experts, some of which have none, any."""
    import transformers

    config, model, own = table[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**BASE | own | more)).double()
    for p in made.parameters() if table is EXPERTS else ():
        p.data.normal_(0, 0.2)
    if name.endswith("by parts"):
        from meshwright.integrations.transformers import set_recurrences

        set_recurrences(made)
    return made


def cases(which: str, length: int, names: str, attention: str | None) -> list[Case]:
    """The rows of ``context`` or ``experts`` whose names a glob fits; their modules are there, for float64."""
    import transformers

    import meshwright.integrations.transformers  # noqa: F401  (experts by name)

    table = CONTEXT if which == "context" else EXPERTS
    names_of = [name for name in table if fnmatch.fnmatch(name, names)]
    for name in names_of:
        getattr(transformers, table[name][1])
    more: dict[str, Any] = {"max_position_embeddings": length, "experts_implementation": "meshwright"}
    if attention:
        more["attn_implementation"] = attention
    torch.manual_seed(1)
    ids = torch.randint(0, BASE["vocab_size"], (1 if which == "context" else 4, length))
    mesh = mw.Mesh({"cp": 4} if which == "context" else {"dp": 2, "ep": 2})
    batch = {"cp": mw.Shard(1)} if which == "context" else {"dp": mw.Shard(0), "ep": mw.Shard(0)}
    layouts = {} if which == "context" else {"*.experts.*": {"ep": mw.Shard(0)}}
    return [Case(name, lambda name=name: decoder(table, name, **more), ids, mesh, batch, layouts) for name in names_of]


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """The loss of the library."""
    found: Tensor = model(input_ids=ids, labels=ids).loss
    return found


def alone(case: Case) -> Step:
    """One device, experts one by one as the library has them."""
    model = case.made()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    loss = loss_of(model, case.ids)
    loss.backward()
    grads = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.named_parameters()}
    return Step(loss.item(), grads, {}, 0)


def eager(case: Case) -> Step:
    """A step of sharded tensors, on this rank."""
    model = mw.shard_module(case.made(), case.mesh, case.layouts)
    ids = mw.shard_tensor(case.ids, case.mesh, case.batch)
    with collective.counting() as counts:
        loss = loss_of(model, ids)
        loss.backward()
    grads = {k: mw.unshard(p.grad) for k, p in model.named_parameters() if p.grad is not None}
    return Step(mw.unshard(loss).item(), grads, dict(counts.kinds), counts.total_bytes)


def captured(case: Case) -> Step:
    """The first step of a program, on this rank; what was learned at a rate of one are the gradients."""
    model = case.made()
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    step = mw.compile_step(
        model, loss_of, torch.optim.SGD(model.parameters(), lr=1.0), case.ids, mesh=case.mesh, layouts=case.layouts,
        batch=case.batch,
    )  # fmt: skip
    with collective.counting() as counts:
        loss = float(step(case.ids))
    return Step(
        loss, {k: before[k] - mw.unshard(p) for k, p in model.named_parameters()}, dict(counts.kinds),
        counts.total_bytes,
    )  # fmt: skip


def off(want: Step, made: Step) -> tuple[float, float, str]:
    """How far the loss is off, and the worst gradient, in parts of its largest number; and which."""
    worst, which = 0.0, ""
    for k, grad in want.grads.items():
        apart = (made.grads.get(k, torch.zeros_like(grad)) - grad).abs().max().item()
        scale = grad.abs().max().item()
        part = apart / max(scale, 1e-6)
        if not part <= worst:  # NaN is the worst
            worst, which = part, k
    return abs(made.loss - want.loss) / abs(want.loss), worst, which


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and print the rows of a table."""
    parser = argparse.ArgumentParser(prog="python -m conformance.decoders", description=__doc__.partition("\n")[0])
    parser.add_argument("which", choices=["context", "experts"], nargs="?", default="context")
    parser.add_argument("--length", type=int, help="of the sequence (default: 8192, of experts 64)")
    parser.add_argument("--models", default="*", help='a glob on the names, such as "qwen3*"')
    parser.add_argument("--modes", default="eager,captured", help="default: %(default)s")
    parser.add_argument("--attention", help="attn_implementation (default: the library's own)")
    given = parser.parse_args(argv)
    length = given.length or (8192 if given.which == "context" else 64)
    print("| model | mode | loss off by | gradient off by, at most | sent by a rank | collectives | seconds |")
    print("|---|---|---|---|---|---|---|")
    wrong = 0
    for case in cases(given.which, length, given.models, given.attention):
        with float64(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want = alone(case)
            for mode in given.modes.split(","):
                begin = time.monotonic()
                steps = mw.simulate(lambda: {"eager": eager, "captured": captured}[mode](case), case.mesh)  # noqa: B023
                loss, grad, which = max((off(want, s) for s in steps), key=lambda found: found[1])
                wrong += not (loss <= MOST and grad <= MOST)
                kinds = ", ".join(f"{n} {k}" for k, n in sorted(steps[0].kinds.items()))
                print(
                    f"| {case.name} | {mode} | {loss:.0e} | {grad:.0e} ({which}) | {steps[0].bytes / 2**20:.1f} MiB | "
                    f"{kinds} | {time.monotonic() - begin:.0f} |", flush=True,
                )  # fmt: skip
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
