"""Descriptions of hardware: presets, files, links of an axis, and what is said of those that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.errors import HardwareError, PassError
from meshwright.machines import PRESETS, bytes_from, strides
from meshwright.passes import PassManager


def test_an_axis_has_the_slowest_link_that_it_crosses() -> None:
    h100 = mw.hardware("h100-8x400g")
    inner, outer = h100.links
    assert [h100.link(s, n) for s, n in zip(strides((8, 8)), (8, 8), strict=True)] == [outer, inner]
    assert h100.link(1, 16) == outer, "two nodes"
    assert h100.link(4, 2) == inner, "halves of a node"
    assert h100.link(2, 3) == outer, "groups of six do not fit into nodes of eight"
    network = h100.network(8, 8, "bfloat16")
    assert network.seconds(1e9, 8) == pytest.approx(3 * outer.latency + 1e9 / outer.bandwidth)
    assert network.seconds(1e9, 1) == 0.0
    assert network.compute(1e12, 0.0) == pytest.approx(1e12 / h100.flops["bfloat16"] + h100.launch)
    assert h100.speed("float64") == h100.flops["*"]


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_saved_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    PRESETS[name].save(path)
    assert mw.hardware(path) == PRESETS[name]
    assert mw.hardware(PRESETS[name]) is PRESETS[name]


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match=r"did you mean 'h100-8x400g'.*meshwright calibrate"):
        mw.hardware("h100")
    with pytest.raises(HardwareError, match="cannot be read"):
        mw.hardware(tmp_path / "none.json")
    path, good = tmp_path / "a.json", PRESETS["cpu-gloo"].to_dict()
    for more, words in (
        ({"memory": -1}, r"memory=-1: a number above 0"),
        ({"memory": True}, r"memory=True: a number above 0"),
        ({"flops": {}}, r"at least one link"),
        ({"links": [{"ranks": 8, "latency": 1e-6, "bandwidth": 1e9}]}, r"groups of \[8\] ranks"),
        ({"links": [{"ranks": 0}]}, r"missing 2 required"),
        ({"speed": 3}, r"an object with"),
    ):
        path.write_text(json.dumps(good | more))
        with pytest.raises(HardwareError, match=words):
            mw.hardware(path)


@pytest.mark.parametrize(
    ("said", "value"), [("70GB", 70e9), ("40 GiB", 40 * 2**30), (5e9, 5e9), ("1.5tb", 1.5e12), ("512", 512.0)]
)
def test_bytes_are_read_as_people_write_them(said: Any, value: float) -> None:
    assert bytes_from(said, "memory") == value


@pytest.mark.parametrize("said", ["70 apples", "", "-3GB", 0, True, "1.2.3GB"])
def test_bytes_that_are_none(said: Any) -> None:
    with pytest.raises(HardwareError, match="a number of bytes was expected"):
        bytes_from(said, "memory")


def test_the_pass_asks_the_same_model() -> None:
    (made,) = PassManager(["data-parallel-optimization:hardware=a100-8x200g,gb_per_s=5"]).passes
    network = made._network(type("P", (), {"mesh": mw.Mesh({"dp": 16})}))
    assert network.bandwidth == 5e9
    assert network.latency == PRESETS["a100-8x200g"].links[1].latency
    with pytest.raises(PassError, match="hardware 'b100' is unknown"):
        PassManager(["data-parallel-optimization:hardware=b100"])
