"""Little memory beside a model, however large its tensors are, in loads, saves and exports: the system's own count."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MOST = 64 << 20
# Each process holds 48 MiB of rows, columns and a long row, and 96 MiB that lie on both.
SCRIPT = """
import json, sys
from pathlib import Path
import torch, torch.nn as nn
import meshwright as mw

torch.manual_seed(0)
folder, what = Path(sys.argv[1]), sys.argv[2]
shapes = {"rows": (4096, 6144), "columns": (4096, 6144), "whole": (4096, 6144), "long": (1, 4096 * 6144)}

class Net(nn.Module):
    def reset_parameters(self):
        pass

def model(*around):
    net = Net()
    with torch.device("meta" if around else "cpu"):
        for name, shape in shapes.items():
            net.register_parameter(name, nn.Parameter(torch.empty(shape)))
    return mw.shard_module(net, *around) if around else net

def status(key):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])

sizes = {}
def peak(name, do):
    Path("/proc/self/clear_refs").write_text("5")  # the count begins anew
    before = status("VmRSS")
    do()
    sizes[name] = status("VmHWM") - before

if what == "export":
    from meshwright.checkpoint.export import chosen, export
    export(chosen(folder / "small", None).path, folder / "small-out")
    peak("export", lambda: export(chosen(folder / "run", None).path, folder / "out", 10**8))
    net = model()
    mw.load_weights(net, folder / "weights")
    from safetensors.torch import load_file
    for file in (folder / "out").glob("*.safetensors"):
        for name, t in load_file(file).items():
            assert torch.equal(t, net.get_parameter(name))
    import torch.distributed.checkpoint as dcp
    dcp.save(net.state_dict(), checkpoint_id=folder / "dcp", no_dist=True)
    print("sizes", json.dumps(sizes), flush=True)
    sys.exit()

mesh = mw.init_mesh({"dp": 2})
net = model(mesh, {"rows": {"dp": mw.Shard(0)}, "columns": {"dp": mw.Shard(1)}, "long": {"dp": mw.Shard(1)}})
here = mesh.coordinate(int(__import__("os").environ["RANK"]))[0]
small = mw.shard_module(nn.Linear(8, 8, bias=False), mesh, {"*": {"dp": mw.Shard(0)}})
mw.Checkpoints(folder / "small").save(0, model=small, wait=True)  # imports and first uses
mw.Checkpoints(folder / "small").load(model=small)
mw.save_weights(small, folder / "small-weights")
mw.load_weights(small, folder / "small-weights")
store = mw.Checkpoints(folder / "run")

def numbers(at):
    own = 0 if net.get_parameter(at).to_local().shape == shapes[at] else here
    return torch.arange(net.get_parameter(at).to_local().numel(), dtype=torch.float32) * (own + 1)

with torch.no_grad():
    for name in shapes:
        net.get_parameter(name).to_local().view(-1).copy_(numbers(name) if what == "save" else torch.zeros(1))
if what == "save":
    peak("save", lambda: store.save(1, model=net, wait=True))
    peak("save_weights", lambda: mw.save_weights(net, folder / "weights", shard_bytes=10**8))
else:
    for name, do in (
        ("load", lambda: store.load(model=net)),
        ("load_weights", lambda: mw.load_weights(net, folder / "weights")),
        ("load_weights of DCP", lambda: mw.load_weights(net, folder / "dcp")),
    ):
        peak(name, do)
        with torch.no_grad():
            for at in shapes:
                assert torch.equal(net.get_parameter(at).to_local().view(-1), numbers(at)), (name, at)
                net.get_parameter(at).to_local().zero_()
print("sizes", json.dumps(sizes), flush=True)
"""


def ran(folder: Path, what: str) -> dict[str, int]:
    """The most that any process held beside its parts, by what it did."""
    path = folder / "run.py"
    path.write_text(SCRIPT)
    launch = [] if what == "export" else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launch, path, folder, what], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line.partition("sizes ")[2]) for line in done.stdout.splitlines() if "sizes " in line]
    return {name: max(one[name] for one in found) for name in found[0]}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is Linux's count")
def test_little_memory_beside_the_parts(tmp_path: Path) -> None:
    sizes = ran(tmp_path, "save") | ran(tmp_path, "export") | ran(tmp_path, "load")
    print({name: f"{size / 2**20:.1f} MiB" for name, size in sizes.items()})
    assert {name: size for name, size in sizes.items() if size > MOST} == {}
