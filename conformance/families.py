"""Families of transformers, built tiny by the names of their auto classes: ``mw.layouts`` alone, against one device.

``--library diffusers``: those of diffusion.py, where diffusers is installed.

No family has a line of its own here or in the package.  Each is built from its configuration class with small sizes
(those of :data:`SIZES` that it knows), in float64; one step on one device gives loss and gradients; ``mw.layouts``
lays it on each mesh, and eager and captured steps must give the same.  A row is right, wrong (another
number), refused by name, or stopped by an error of another kind.  What cannot be built so, or does not run on one
device, is no row.  The exit code is 1 if a row is wrong or stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import inspect
import json
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import diffusion
import models
import torch
import torch.nn as nn
from doubled import float64

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.explanation import explain_program

Tensor = torch.Tensor
MESHES = {"dp2tp2": {"dp": 2, "tp": 2}, "tp3": {"tp": 3}}
ROWS, LENGTH, WORDS, WIDTH, HEADS, LAYERS = 4, 10, 60, 24, 6, 1
_IMAGE = {"image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": 6, "hidden_dropout_prob": 0.0}
_MOST = 300_000  # parameters
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 36, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": 4, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "d_model": WIDTH, "d_kv": 4,
    "d_ff": 36, "num_layers": LAYERS,
    "num_decoder_layers": LAYERS, "num_heads": HEADS, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 36, "decoder_ffn_dim": 36,
    "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 32, "n_inner": 36, "rotary_dim": 4, "n_ctx": 32,
    "embedding_size": WIDTH, "emb_dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "dim": WIDTH, "hidden_dim": 36,
    "ffn_dim": 36, "word_embed_proj_dim": WIDTH, "max_seq_len": 32, "kv_channels": 4, "d_inner": 36, "dropout": 0.0,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "activation_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "resid_dropout": 0.0, "embedding_dropout": 0.0, "dropout_rate": 0.0, "classifier_dropout": 0.0,
    "attention_probs_dropout_prob": 0.0, "summary_first_dropout": 0.0, "drop_path_rate": 0.0, "layerdrop": 0.0,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "embed_dropout": 0.0, "mlp_dropout": 0.0,
    "embed_dim": WIDTH, "num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "n_routed_experts": 6, "shared_expert_intermediate_size": 12, "q_lora_rank": 12, "kv_lora_rank": 12,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_group": 1, "topk_group": 1, "state_size": 4,
    "time_step_rank": 4, "use_mambapy": False, "depths": [1, 1], "hidden_sizes": [12, 24], "num_stages": 2,
    "sliding_window": 8, "type_vocab_size": 2, "num_buckets": 8, "use_cache": False,
    "experts_implementation": "batched_mm",
    "residual_dropout": 0.0,
    "num_mel_bins": 8, "input_feat_per_channel": 8, "max_source_positions": 10, "max_target_positions": 32,
    "conv_dim": [12, 12], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
    "conformer_conv_dropout": 0.0,
    "feat_proj_dropout": 0.0, "final_dropout": 0.0, "conv_channels": 12, "max_length": 16, "projection_dim": 12,
    "conv_depthwise_kernel_size": 3, "left_max_position_embeddings": 4,
    "right_max_position_embeddings": 4, "ctc_loss_reduction": "mean", "frequency_stride": 4, "time_stride": 4,
    **_IMAGE,
}  # fmt: skip


@dataclass
class Row:
    """What became of one family on one mesh in one mode.

    Attributes:
        verdict: ``right``, ``wrong`` (another number), ``refused`` (by name) or ``stopped``.
        difference: the largest, relative to the size of what is compared.
        split: share of the parameters that is split over ``tp``.
        sums: bytes that a step sends over ``tp``, in sums of the residual stream.
        notes: what is gathered, and why; of what is refused, why.
    """

    family: str
    mesh: str
    mode: str
    verdict: str = "right"
    difference: float = 0.0
    split: float = 0.0
    sums: float | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def families() -> dict[str, tuple[str, str]]:
    """Name of each family to its class and to what it is given: text, pairs of texts, images, speech, or two of these.

    A family is listed once, by the first of these.
    """
    from transformers.models.auto import modeling_auto as auto

    lists = {
        "text": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "pair": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "speech to text": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        "speech": auto.MODEL_FOR_CTC_MAPPING_NAMES,
        "sound": auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
        "text and image": auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }
    found: dict[str, tuple[str, str]] = {}
    for kind, names in lists.items():
        for family, name in names.items():
            found.setdefault(family, (kind, name if isinstance(name, str) else name[0]))
    return found


def configured(config: Any, more: dict[str, Any]) -> Any:
    """A configuration with the small sizes that it knows, and so those that it is made of; what it refuses by name is
    left to it."""
    known = {*inspect.signature(config.__init__).parameters, *getattr(config, "attribute_map", {})}
    known |= {*getattr(config, "__dataclass_fields__", ()), "experts_implementation"}
    given = {k: v for k, v in (SIZES | more).items() if k in known}
    for part, kind in getattr(config, "sub_configs", {}).items():
        if part in known and "config" in part and hasattr(kind, "model_type") and kind.model_type:
            given[part] = configured(kind, {}).to_dict()
    for _ in range(4):
        try:
            return config(**given)
        except Exception as error:
            refused = re.search(r"for field '(\w+)'", str(error))
            if refused is None or given.pop(refused[1], None) is None:
                raise
    return config(**given)


def built(family: str, kind: str, name: str) -> nn.Module:
    """The family's model, in training mode, its weights large enough that every layer counts in the loss."""
    import transformers

    cls = getattr(transformers, name)
    config = cls.config_class
    made = configured(config, {"is_decoder": True} if kind == "text" else {})
    for word in ("decoder_start_token_id", "pad_token_id", "eos_token_id"):
        if kind == "pair" and getattr(made, word, None) is None:
            setattr(made, word, SIZES[word])
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(made).parameters())
    if size > _MOST:
        raise ValueError(f"{size} parameters: too many sizes of its own")
    torch.manual_seed(0)
    model = cls(made)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1 and 0 < p.std() < 0.05:
                p.mul_(0.15 / p.std())
            elif p.ndim == 1 and not p.any():
                p.normal_(std=0.1)
    return model.train()


def batch_of(kind: str) -> dict[str, Tensor]:
    """A batch for one device."""
    g = torch.Generator().manual_seed(1)
    if kind == "image":
        labels = torch.randint(0, 2, (ROWS,), generator=g)
        return {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=g), "labels": labels}
    if kind == "sound":
        values, labels = torch.randn(ROWS, 320, generator=g), torch.randint(0, 2, (ROWS,), generator=g)
        return {"input_values": values, "labels": labels}
    if kind == "speech":
        values, labels = torch.randn(ROWS, 320, generator=g), torch.randint(3, WORDS, (ROWS, 5), generator=g)
        return {"input_values": values, "labels": labels}
    if kind == "speech to text":
        values, labels = torch.randn(ROWS, 8, 20, generator=g), torch.randint(3, WORDS, (ROWS, 7), generator=g)
        return {"input_features": values, "labels": labels}
    if kind == "text and image":
        ids, values = torch.randint(3, WORDS, (ROWS, LENGTH), generator=g), torch.randn(ROWS, 3, 16, 16, generator=g)
        return {"input_ids": ids, "pixel_values": values, "attention_mask": torch.ones_like(ids)}
    ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=g)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, 7:] = 0
    labels = torch.randint(3, WORDS, (ROWS, 7), generator=g) if kind == "pair" else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def loss_of_both(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The contrastive loss of texts and images."""
    return model(**batch, return_loss=True).loss


Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Subject:
    """How a family is built, what it is given, and its loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    loss: Loss


def subjects(library: str) -> dict[str, Subject]:
    """All families of a library, by name."""
    if library == "diffusers":
        part = functools.partial
        return {
            n: Subject(part(diffusion.built, n), part(diffusion.batch_of, n), part(diffusion.loss_of, n))
            for n in diffusion.FAMILIES
        }
    return {
        n: Subject(
            functools.partial(built, n, kind, cls),
            functools.partial(batch_of, kind),
            loss_of_both if kind == "text and image" else loss_of,
        )
        for n, (kind, cls) in families().items()
    }


Numbers = dict[str, Tensor]


def numbers(model: nn.Module, loss: Tensor) -> Numbers:
    """Loss and gradients, whole."""
    with torch.no_grad():
        made = {"loss": mw.unshard(loss.detach())}
        return made | {n: mw.unshard(p.grad) for n, p in model.named_parameters() if p.grad is not None}


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Inside, an alarm rings after so many seconds."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


class Family:
    """One family on meshes."""

    def __init__(self, name: str, subject: Subject) -> None:
        self.name, self.make, self.batch, self.loss = name, subject.make, subject.batch, subject.loss
        model = self.make()
        self.loss(model, self.batch()).backward()
        again = self.make()
        loss = self.loss(again, self.batch())
        loss.backward()
        self.want = numbers(again, loss)
        self.exact = all(torch.equal(p.grad, self.want[n]) for n, p in model.named_parameters() if n in self.want)
        self.size = sum(p.numel() for p in model.parameters())

    def eager(self, mesh: mw.Mesh, table: mw.LayoutTable) -> tuple[Numbers, float | None]:
        model = self.make()
        mw.shard_module(model, mesh, table)
        split = table.batch if "dp" in mesh.axes else {}
        batch = {
            k: mw.shard_tensor(v, mesh, split.get(k, {}) if isinstance(split.get(k), dict) else split)
            for k, v in self.batch().items()
        }
        loss = self.loss(model, batch)
        loss.backward()
        return numbers(model, loss), None

    def captured(self, mesh: mw.Mesh, table: mw.LayoutTable) -> tuple[Numbers, float | None]:
        model, batch = self.make(), self.batch()
        step = mw.compile_step(model, self.loss, None, batch, mesh=mesh, layouts=table, gradients=True)
        loss = step(batch)
        sent = explain_program(step.program).counts.bytes if mesh.axes == ("tp",) else None
        return numbers(model, loss), None if sent is None else float(sum(sent.values()))

    def rows(self, wanted: Sequence[tuple[str, str]], limit: int) -> Iterator[Row]:
        """Of each mesh and mode that is wanted."""
        for mesh_name, sizes in MESHES.items():
            mesh, table = mw.Mesh(sizes), None
            for mode in [mode for of, mode in wanted if of == mesh_name]:
                row, started = Row(self.name, mesh_name, mode), time.perf_counter()
                try:
                    with limited(limit), warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        table = table or mw.layouts(self.make(), mesh, self.batch(), self.loss)
                        self._fill(row, mesh, table, limit)
                except MeshwrightError as error:
                    row.verdict, row.notes = "refused", [f"{type(error).__name__}: {error}"[:300]]
                except Exception as error:
                    row.verdict, row.notes = "stopped", [f"{type(error).__name__}: {error}"[:300]]
                row.seconds = round(time.perf_counter() - started, 1)
                yield row

    def _fill(self, row: Row, mesh: mw.Mesh, table: mw.LayoutTable, limit: int) -> None:
        row.notes = list(table.notes)
        names = dict(self.make().named_parameters())
        split = {n for g, p in table.items() if "tp" in p for n in fnmatch.filter(names, g)}
        row.split = round(sum(names[n].numel() for n in split) / self.size, 3)
        found = mw.simulate(lambda: getattr(self, row.mode)(mesh, table), mesh, timeout=limit - 10)
        for got, sent in found:
            row.difference = max(row.difference, models.furthest(got, self.want, "gradient"))
            if sent is not None:
                row.sums = round(sent / (2 * (mesh.size - 1) / mesh.size * ROWS * LENGTH * WIDTH * 8), 2)
        if row.difference > 1e-9:
            row.verdict = "wrong"


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="*", help="comma list of globs")
    parser.add_argument("--library", default="transformers", choices=["transformers", "diffusers"])
    parser.add_argument("--limit", type=int, default=240, help="seconds for each row")
    parser.add_argument("--modes", default="eager,captured")
    parser.add_argument("--meshes", default="dp2tp2,tp3")
    parser.add_argument("--table", help="print the rows of this file as the table of the docs, and run nothing")
    parser.add_argument("--out", help="append one JSON object per row to this file; rows in it are left out")
    return parser.parse_args()


def table(path: str) -> str:
    """The rows of a file as Markdown, a line for each family."""
    with open(path) as file:
        rows = [Row(**json.loads(line)) for line in file]
    lines = ["| family | sums | verdict | gathered, or why refused |", "|---|---|---|---|"]
    for family in dict.fromkeys(row.family for row in rows):
        own = [row for row in rows if row.family == family]
        ran = [f"{r.mode} {r.mesh}" for r in own if r.verdict == "right"]
        told = [f"{r.verdict}: {r.mode} {r.mesh}" for r in own if r.verdict != "right"]
        sums = next((f"{row.sums:g}" for row in own if row.sums is not None), "")
        notes = [
            re.sub(r", [^,]* a step.*", "", n)
            for row in (next((r for r in own if r.verdict != "right"), own[-1]),)
            for n in row.notes
        ][:2]
        notes = [re.sub(r"/\S*/(\w+\.py)", r"\1", n) for n in notes]  # files by their names alone
        notes = [re.sub(r"; (train eagerly; )?at /.*", "", n) for n in notes]  # those that were cut off
        verdict = "; ".join([*(["right: " + ", ".join(ran)] if ran else []), *told])
        lines.append(f"| {family} | {sums} | {verdict} | {'; '.join(notes).replace('|', '/')} |")
    return "\n".join(lines)


def main() -> int:
    """All families that can be built."""
    given, wrong, done = options(), 0, set[tuple[str, str, str]]()
    if given.table:
        print(table(given.table))
        return 0
    if given.out:
        with contextlib.suppress(FileNotFoundError), open(given.out) as file:
            done = {(row["family"], row["mesh"], row["mode"]) for row in map(json.loads, file)}
    every = [(mesh, mode) for mesh in given.meshes.split(",") for mode in given.modes.split(",")]
    for name, subject in subjects(given.library).items():
        wanted = [(mesh, mode) for mesh, mode in every if (name, mesh, mode) not in done]
        if not wanted or not any(fnmatch.fnmatch(name, g) for g in given.families.split(",")):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(Exception):
                subject.make()  # imports its modules
        with float64(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with limited(60):
                    family = Family(name, subject)
            except Exception as error:
                print(f"{name}: not built: {type(error).__name__}: {str(error)[:120]!r}", file=sys.stderr, flush=True)
                continue
            for row in family.rows(wanted, given.limit):
                wrong += row.verdict in ("wrong", "stopped")
                text = json.dumps(asdict(row))
                print(text, flush=True)
                if given.out:
                    with open(given.out, "a") as file:
                        file.write(text + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
