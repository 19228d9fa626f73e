"""``--model DIR``: a causal language model of Transformers, on packed documents; with adapters of PEFT."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.data import Dataset

import meshwright as mw
from meshwright.documents import Packed
from meshwright.errors import extra
from meshwright.program import Plan
from meshwright.verification.doubled import doubled

from .config import TrainConfig
from .options import OptionError
from .plan import AXES_OF_BATCH
from .subject import TrainingSubject


class LibraryModel(TrainingSubject):
    """A causal language model of Transformers, from a directory, on packed documents."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.library: Any = extra("transformers", "hf", "meshwright train --model")
        extra("meshwright.integrations.transformers", "hf", "meshwright train --model")  # registers experts
        assert config.model is not None
        self.folder = Path(config.model)
        self.settings = _settings(self.library, self.folder)
        self.settings.use_cache = False  # with a cache packed documents would see each other
        self.tokenizer = None if config.tokenizer is None else _tokenizer(self.library, config.tokenizer)
        data = self._packed(config.data)
        self.rows, self.digest = data, data.digest
        of = f"{data.number_of_documents:,} documents, {data.tokens:,} tokens"
        self.source = f"{', '.join(config.data[:3])}: {of} in {len(data):,} rows of {config.seq}, {data.fill:.1%} full"
        self.title = f"{type(self.settings).__name__.removesuffix('Config')} of {config.model}"
        self._check(data)

    def _packed(self, files: tuple[str, ...]) -> Packed:
        config = self.config
        return Packed(
            files, self.tokenizer, length=config.seq, fit=config.fit, column=config.column, folder=config.tokens
        )

    def held_out(self) -> Dataset[Any]:
        data = self._packed(self.config.evaluate)
        self._check_vocabulary(data)
        return data

    def count_labels(self, batch: Any) -> int:
        return int((batch["labels"][:, 1:] != -100).sum())

    def _check_vocabulary(self, data: Packed) -> None:
        config, size = self.config, self.settings.get_text_config().vocab_size
        if data.largest >= size:
            name = f"--tokenizer {config.tokenizer}" if config.tokenizer else "text read as bytes"
            raise OptionError(
                f"--model {config.model} has a vocabulary of {size}, and {name} gave token {data.largest}: pass the "
                "--tokenizer of this model"
            )

    def _check(self, data: Packed) -> None:
        """Raises OptionError for data that do not fit to the model or the batch."""
        config, text = self.config, self.settings.get_text_config()
        self._check_vocabulary(data)
        positions = getattr(text, "max_position_embeddings", None) or config.seq
        if config.seq > positions:
            raise OptionError(
                f"--seq {config.seq}: --model {config.model} has {positions} positions: pass --seq {positions} or less"
            )
        if len(data) < config.batch:
            raise OptionError(
                f"--batch {config.batch}: --data has {len(data)} rows of --seq {config.seq}: give more text, a smaller "
                "batch, or shorter rows"
            )

    @property
    def loads(self) -> bool:
        return self.config.lora is None and self._has_weights

    @property
    def _has_weights(self) -> bool:
        return self.folder.is_dir() and any(self.folder.glob("*.safetensors"))

    def model(self, device: str | torch.device) -> nn.Module:
        dtype, kind = self.config.torch_dtype, self.library.AutoModelForCausalLM
        made: nn.Module
        # On one device as the library computes it: grouped products are not computed in float64.
        settings = copy.deepcopy(self.settings)
        settings._experts_implementation = "meshwright" if torch.device(device).type == "meta" else "eager"
        loaded: Any = None
        if self._has_weights and torch.device(device).type != "meta":
            loaded = kind.from_pretrained(self.folder, config=settings, dtype=dtype).to(device)
        if loaded is not None and self.config.lora is None:
            return loaded.train()
        with torch.device(device):
            made = kind.from_config(settings, dtype=dtype)
            if self.config.lora is not None:
                made = _adapted(made, self.config.lora)
        if loaded is not None:
            without_adapters(made).load_state_dict(loaded.state_dict())
        return made.train()

    def fill(self, model: nn.Module) -> None:
        if self._has_weights:
            mw.load_weights(without_adapters(model) if self.config.lora else model, self.folder)

    @functools.cached_property
    def _loss(self) -> Callable[..., Tensor]:
        def loss(model: Callable[..., Any], batch: Any) -> Tensor:
            made: Tensor = model(**batch).loss
            return made

        # Models ask for float32 by name; in float64 that alone would be seen beside one device.
        return doubled(loss) if self.config.dtype == "float64" else loss

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        return self._loss(model, batch)

    def plan(self, mesh: mw.Mesh) -> Plan:
        config = self.config
        batch: dict[str, Any] = {a: mw.Shard(AXES_OF_BATCH[a]) for a in mesh.axes if a in AXES_OF_BATCH}
        layouts: Any = {}
        if config.layouts == "auto" or (config.layouts is None and "tp" in mesh.axes):
            layouts = mw.layouts(self.model("meta"), mesh, self.example(), self.loss)
        elif config.layouts is not None:
            if not Path(config.layouts).is_file():
                raise OptionError(
                    f"--layouts {config.layouts}: there is no such file. Pass auto, or a file that "
                    "mw.layouts(...).save(...) wrote."
                )
            layouts = mw.load_layouts(config.layouts)
        return Plan(layouts, batch)

    def export(self, model: nn.Module, folder: str, first: bool) -> None:
        if self.config.lora is None:
            super().export(model, folder, first)
        else:
            adapters = {name: mw.unshard(p.detach()) for name, p in model.named_parameters() if p.requires_grad}
            if first:
                model.save_pretrained(folder, state_dict=adapters)  # type: ignore[operator]
        if first and self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def _adapted(model: nn.Module, rank: int) -> nn.Module:
    """The model with adapters in all its linear layers but the head, the rest frozen."""
    peft = extra("peft", "lora", "meshwright train --lora")
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    before = torch.get_default_dtype()
    torch.set_default_dtype(next(model.parameters()).dtype)  # in which PEFT creates adapters
    try:
        made: nn.Module = peft.get_peft_model(model, config)
    finally:
        torch.set_default_dtype(before)
    return made


def without_adapters(model: nn.Module) -> nn.Module:
    """The weights of a model of PEFT under the names that they had before, the same tensors."""
    root = nn.Module()
    for name, p in model.named_parameters(remove_duplicate=False):
        if ".lora_" in name:
            continue
        *path, last = name.removeprefix("base_model.model.").replace(".base_layer.", ".").split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(last, p)
    return root


def _settings(library: Any, folder: Path) -> Any:
    try:
        return library.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of the library, of many kinds
        raise OptionError(
            f"--model {folder}: no configuration can be read ({type(error).__name__}: {_first_line(error)}). "
            "Pass a directory with config.json, or that file"
        ) from None


def _tokenizer(library: Any, folder: str) -> Any:
    try:
        return library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise OptionError(
            f"--tokenizer {folder} cannot be read ({type(error).__name__}: {_first_line(error)}). Pass a folder with "
            "tokenizer.json, or leave it out to read bytes"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


__all__ = ["LibraryModel", "without_adapters"]
