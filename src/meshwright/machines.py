"""What machines are like: links, memory and arithmetic.  The one model of costs that planner and passes ask.

A description is data: presets by name, or a JSON file that ``meshwright calibrate`` writes.  Sending takes latency and
bytes by the slowest link that a group of ranks crosses; an op takes the longer of arithmetic and memory traffic, and a
launch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import HardwareError, near
from .untrusted_files import read_regular

_SUFFIX = ".json"


@dataclass(frozen=True)
class Network:
    """What sending costs a group of ranks, and what computes meanwhile.

    Attributes:
        latency: seconds per collective.
        bandwidth: bytes per second and rank.
        flops: arithmetic of one rank per second, against which sending is set.
        memory: bytes per second that ops without much arithmetic read and write.
        launch: seconds that any op takes at least.
    """

    latency: float
    bandwidth: float
    flops: float
    memory: float = 10e9
    launch: float = 5e-6

    def seconds(self, nbytes: float, ranks: int) -> float:
        """Of one collective among so many ranks that sends so many bytes from each."""
        return 0.0 if ranks < 2 else self.latency * math.ceil(math.log2(ranks)) + nbytes / self.bandwidth

    def compute(self, flops: float, moved: float) -> float:
        """Seconds of one op."""
        return max(flops / self.flops, moved / self.memory) + self.launch


@dataclass(frozen=True)
class LinkLevel:
    """A level of links: what connects groups of so many ranks.

    Attributes:
        ranks: size of the groups; 0: all ranks.
        latency: seconds that a message takes (alpha).
        bandwidth: bytes per second that a rank sends (beta).
    """

    ranks: int
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Hardware:
    """A machine, as the planner knows it.

    Attributes:
        name: of the preset, or of the file.
        links: from the innermost level (GPUs of a node) outwards; the last one connects all ranks.
        memory: bytes of one device.
        flops: name of a dtype to operations per second that products reach; ``"*"`` for the others.
        memory_bandwidth: bytes per second that a device reads and writes.
        launch: seconds that an op takes at least.
        note: where the numbers are from.
    """

    name: str
    links: tuple[LinkLevel, ...]
    memory: float
    flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    launch: float
    note: str = ""

    def __post_init__(self) -> None:
        """Raises HardwareError for numbers that cannot be."""
        numbers = {"memory": self.memory, "memory_bandwidth": self.memory_bandwidth, "launch": self.launch}
        numbers |= {f"flops[{k}]": v for k, v in self.flops.items()}
        for i, link in enumerate(self.links):
            numbers |= {f"links[{i}].bandwidth": link.bandwidth, f"links[{i}].latency": link.latency}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise HardwareError(f"hardware {self.name}: {name}={value!r}: a number above 0 was expected")
        if not self.links or not self.flops:
            raise HardwareError(f"hardware {self.name}: give at least one link, and flops of one dtype")
        sizes = [link.ranks for link in self.links]
        if any(type(n) is not int or n < 0 for n in sizes) or [n for n in sizes[:-1] if n < 1] or sizes[-1] not in (0,):
            raise HardwareError(
                f"hardware {self.name}: links connect groups of {sizes} ranks. Give sizes from the innermost level "
                "outwards, and 0 (all ranks) for the last one."
            )

    @property
    def node(self) -> int:
        """How many ranks the innermost links connect; 0: all."""
        return self.links[0].ranks

    def speed(self, dtype: str) -> float:
        """Operations per second in a dtype, by its name in torch."""
        found = self.flops.get(dtype, self.flops.get("*"))
        return min(self.flops.values()) if found is None else found

    def link(self, stride: int, size: int) -> LinkLevel:
        """The slowest link that a group crosses: of so many ranks, each so many numbers from the next."""
        span = stride * size
        for link in self.links:
            if link.ranks == 0 or (span <= link.ranks and link.ranks % span == 0) or span == 1:
                return link
        return self.links[-1]

    def network(self, stride: int, size: int, dtype: str = "*") -> Network:
        """What sending costs a group of ranks, and what computing does."""
        link = self.link(stride, size)
        return Network(link.latency, link.bandwidth, self.speed(dtype), self.memory_bandwidth, self.launch)

    def seconds(self, sizes: Sequence[int], axes: Sequence[int], nbytes: float) -> float:
        """Of a collective over some axes of a mesh, which sends so many bytes from each rank."""
        apart = strides(sizes)
        stride, outer = min(apart[a] for a in axes), min(axes)
        link = self.link(stride, apart[outer] * sizes[outer] // stride)
        ranks = math.prod(sizes[a] for a in axes)
        return Network(link.latency, link.bandwidth, 1.0).seconds(nbytes, ranks)

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self) | {"flops": dict(self.flops)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, to be edited and read by [hardware][meshwright.hardware].

        Raises:
            OSError: If the file cannot be written.
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


def _gpu(name: str, memory: float, bf16: float, fp32: float, read: float, inner: float, outer: float, note: str) -> Any:
    flops = {"bfloat16": bf16, "float16": bf16, "float32": fp32, "*": fp32}
    links = (LinkLevel(8, 4e-6, inner), LinkLevel(0, 8e-6, outer))
    return Hardware(name, links, memory, flops, read, 4e-6, note)


_NOTE = "vendor's peak numbers; products at 60 %, links at 80 % of them"
PRESETS: dict[str, Hardware] = {
    h.name: h
    for h in (
        _gpu("h100-8x400g", 80e9, 0.6 * 989e12, 0.6 * 67e12, 3.0e12, 0.8 * 450e9, 0.8 * 50e9, _NOTE),
        _gpu("h200-8x400g", 141e9, 0.6 * 989e12, 0.6 * 67e12, 4.3e12, 0.8 * 450e9, 0.8 * 50e9, _NOTE),
        _gpu("a100-8x200g", 80e9, 0.6 * 312e12, 0.6 * 19.5e12, 1.8e12, 0.8 * 300e9, 0.8 * 25e9, _NOTE),
        Hardware(
            "cpu-gloo", (LinkLevel(0, 100e-6, 1e9),), 8e9, {"*": 100e9}, 10e9, 5e-6,
            "one core per process, gloo on one machine",
        ),
    )
}  # fmt: skip
_KEYS = {f.name for f in dataclasses.fields(Hardware)}


def hardware(name: str | os.PathLike[str] | Hardware) -> Hardware:
    """Return a description of hardware, for `mw.plan` and for passes.

    Args:
        name: Name of a preset (`"h100-8x400g"`, `"h200-8x400g"`, `"a100-8x200g"`, `"cpu-gloo"`), or the path of a JSON
            file, which `meshwright calibrate` writes. There is no default.

    Raises:
        HardwareError: If there is no such preset or file, or a number in it is wrong.

    Examples:
        ```python
        h100 = mw.hardware("h100-8x400g")
        assert h100.node == 8 and h100.memory == 80e9
        assert h100.link(stride=1, size=8).bandwidth > h100.link(stride=8, size=8).bandwidth
        ```
    """
    if isinstance(name, Hardware):
        return name
    if not isinstance(name, (str, os.PathLike)):
        raise HardwareError(
            f"hardware={name!r}: the name of a preset ({', '.join(PRESETS)}), or the path of a file of meshwright "
            "calibrate, was expected"
        )
    text = os.fspath(name)
    if text in PRESETS:
        return PRESETS[text]
    if not text.endswith(_SUFFIX):
        raise HardwareError(
            f"hardware {text!r} is unknown{near(text, PRESETS)}. Take one of these, or measure this machine: "
            "meshwright calibrate --save machine.json, and pass the file."
        )
    try:
        found = json.loads(read_regular(Path(text)).decode())
    except (OSError, ValueError) as error:
        raise HardwareError(f"hardware {text}: cannot be read: {error}. meshwright calibrate writes one.") from error
    return _read(text, found)


def _read(path: str, found: Any) -> Hardware:
    if not isinstance(found, dict) or found.keys() - _KEYS or not {"links", "memory", "flops"} <= found.keys():
        raise HardwareError(f"hardware {path}: an object with {', '.join(sorted(_KEYS))} was expected")
    try:
        links = tuple(LinkLevel(**link) for link in found["links"])
        return Hardware(**{"name": Path(path).stem, "note": "", **found, "links": links})
    except (TypeError, AttributeError) as error:
        raise HardwareError(f"hardware {path}: {error}") from error


_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def bytes_from(said: str | float, what: str) -> float:
    """A number of bytes as people write it: ``"70GB"``, ``"40 GiB"``.

    Raises:
        HardwareError: If it is none.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]i?|)b?\s*", str(said).lower())
    try:
        value = float(said) if not isinstance(said, str) else float(match[1]) * _UNITS[match[2]] if match else math.nan
    except (TypeError, ValueError):
        value = math.nan
    if isinstance(said, bool) or not 0 < value < math.inf:
        raise HardwareError(f"{what}={said!r}: a number of bytes was expected, as in {what}='70GB'")
    return value


def strides(sizes: Sequence[int]) -> list[int]:
    """Of each axis of a mesh: how far the numbers of neighbours along it lie apart."""
    return [math.prod(sizes[a + 1 :]) for a in range(len(sizes))]


__all__ = ["PRESETS", "Hardware", "LinkLevel", "Network", "bytes_from", "hardware", "strides"]
