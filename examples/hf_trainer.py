"""A Llama of Transformers, trained by its ``Trainer`` on a mesh: the losses and files of one device.

torchrun --nproc-per-node 4 examples/hf_trainer.py --tp 2
python examples/hf_trainer.py                              # one process, the same losses
"""

from __future__ import annotations

import argparse
import os

import torch
import transformers

import meshwright as mw
from meshwright.integrations.trainer import MeshTrainer

CONFIG = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=64, max_position_embeddings=64,
)  # fmt: skip
COLUMNS, ROWS = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}
LAYOUTS = {
    **{f"*.{name}_proj.*": COLUMNS for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj.*": ROWS for name in ("o", "down")},
}


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Texts of 12 tokens; three labels in ten are ignored, so that ranks have other numbers of them."""
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, CONFIG.vocab_size, (count, 12), generator=g)
    labels = torch.where(torch.rand(ids.shape, generator=g) < 0.3, -100, ids)
    return [{"input_ids": i, "labels": t} for i, t in zip(ids, labels, strict=True)]


def main() -> None:
    """Train, evaluate, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="processes that share each layer (default: 1)")
    parser.add_argument("--steps", type=int, default=6, help="steps of the optimizer (default: 6)")
    parser.add_argument("--folder", default="runs/hf_trainer", help="where checkpoints go (default: runs/hf_trainer)")
    parser.add_argument("--resume", metavar="DIR", help="a checkpoint of any mesh to go on from")
    given = parser.parse_args()
    mesh = mw.init_mesh({"dp": int(os.environ.get("WORLD_SIZE", 1)) // given.tp, "tp": given.tp})

    transformers.set_seed(0)  # on every rank: they build the same model
    model = mw.shard_module(transformers.LlamaForCausalLM(CONFIG).double(), mesh, LAYOUTS)
    args = transformers.TrainingArguments(
        given.folder, per_device_train_batch_size=6, gradient_accumulation_steps=2, max_steps=given.steps,
        learning_rate=1e-2, logging_steps=1, eval_strategy="steps", eval_steps=3, save_steps=3, report_to=[],
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    data = rows(40)
    trainer = MeshTrainer(model, args, train_dataset=data, eval_dataset=data[:7], batch={"dp": mw.Shard(0)})
    trainer.train(resume_from_checkpoint=given.resume)
    if args.process_index == 0:
        for entry in trainer.state.log_history:
            for name in entry.keys() & {"loss", "eval_loss"}:
                print(f"step {entry['step']} {name} {entry[name]:.6f}")


if __name__ == "__main__":
    main()
