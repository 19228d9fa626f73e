"""What steps take of the machine: the most memory held, and of a GPU the share of its arithmetic."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

from .config import TrainConfig

# Dense bfloat16 of one device, operations per second, by a word of its name: from NVIDIA's data sheets.
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "A10": 125e12}


class Usage:
    """What a rank has used since this was made: make it before the model.

    Attributes:
        begin: bytes that the process had held at most, on the processor; a GPU counts what tensors take by itself.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.begin = config, 0
        self.name = torch.cuda.get_device_name() if config.device == "cuda" else ""
        self.begin = self.peak() or 0

    def peak(self) -> int | None:
        """Bytes that were held at most; None where the system does not say."""
        if self.config.device == "cuda":
            return torch.cuda.max_memory_allocated()
        with contextlib.suppress(ImportError):
            import resource

            held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return held * (1 if sys.platform == "darwin" else 1024) - self.begin
        return None

    def told(self, seconds: float, parameters: int) -> dict[str, Any]:
        """Of a step that took so long, of a model of so many parameters: what is known of it."""
        peak, share = self.peak(), flops_share(self.config, parameters, seconds, self.name)
        found = {"tokens_per_s": self.config.tokens_per_step / seconds, "peak_bytes": peak, "flops_share": share}
        return {name: value for name, value in found.items() if value is not None}


def flops_share(config: TrainConfig, parameters: int, seconds: float, name: str) -> float | None:
    """Arithmetic of a step by what devices of this name can do in that time; None where that is not known.

    Counted as for PaLM (Chowdhery et al., 2022, appendix B): 6 per parameter and token, and attention, without what is
    computed again.  Only for what computes in bfloat16: peaks of other dtypes depend on modes.
    """
    peak = next((flops for word, flops in PEAK_FLOPS.items() if word in name), None)
    if peak is None or config.model is not None or (config.dtype != "bfloat16" and config.precision is None):
        return None
    per_token = 6 * parameters + 12 * config.layers * config.hidden * config.seq
    return per_token * config.tokens_per_step / (seconds * peak * config.make_mesh().size)


__all__ = ["Usage", "flops_share"]
