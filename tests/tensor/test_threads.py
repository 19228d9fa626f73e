"""Other threads that look at distributed tensors while a call or a step works on their parts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw

Tensor = torch.Tensor
TP = mw.Mesh({"tp": 2})
ONE = mw.Mesh({"tp": 1})


def beside(look: Callable[[], Any]) -> Any:
    """What another thread sees now."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    thread.join()
    return found[0] if found else "it failed"


class Looking(TorchDispatchMode):
    """Looks from another thread at each native call, in the middle of it."""

    def __init__(self, look: Callable[[], Any]) -> None:
        super().__init__()
        self.look, self.seen = look, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(beside(self.look))
        return func(*args, **kwargs or {})


def about(t: Any) -> Any:
    """What whoever looks at a tensor may ask it."""
    copy = t.detach().clone()
    return (
        isinstance(t, mw.DistTensor), tuple(t.shape), t.size(), t.numel(), len(t), t.ndim, t.spec.layout,
        isinstance(copy, mw.DistTensor), tuple(copy.shape), tuple(t.to_local().shape), tuple((t.detach() * 1).shape),
        t.requires_grad, t.nbytes, isinstance(t, nn.Parameter),
    )  # fmt: skip


def indices() -> Tensor:
    return torch.tensor([0, 3, 1])


CALLS: dict[str, Callable[[Any], Any]] = {
    "embedding": lambda w: F.embedding(indices(), w),
    "index": lambda w: w[indices()],
    "gathered": lambda w: torch.linalg.inv(w),
    "reshard": lambda w: mw.reshard(w, {"tp": mw.Shard(1)}),
    "unshard": mw.unshard,
    "softmax": lambda w: w.softmax(0),
    "cross_entropy": lambda w: F.cross_entropy(w.T, indices().new_zeros(4)),
    "written": lambda w: w.detach().copy_(mw.reshard(w.detach() + 1, {"tp": mw.Shard(1)})),
    "cumsum_": lambda w: w.detach().cumsum_(0),
    "norm": lambda w: torch.nn.utils.clip_grad_norm_([w], 1.0),
    "native": lambda w: w * 2,
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:.*has no rule")
def test_a_call_shows_other_threads_what_a_tensor_is(name: str, grad: bool) -> None:
    def fn() -> int:
        w = mw.shard_tensor(torch.eye(4) + 0.1, TP, {"tp": mw.Shard(0)}).requires_grad_()
        w.grad = torch.ones(4, 4)
        expected = about(w)
        with torch.set_grad_enabled(grad), Looking(lambda: about(w)) as looking:
            CALLS[name](w)
        assert about(w) == expected
        for seen in looking.seen:
            assert seen == expected
        return len(looking.seen)

    assert max(mw.simulate(fn, TP)) > 0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"foreach": False}])
def test_a_step_shows_other_threads_what_tensors_are(kind: Any, options: Any) -> None:
    def fn() -> None:
        torch.manual_seed(0)
        model = mw.shard_module(nn.Linear(4, 6), TP, {"*": {"tp": mw.Shard(0)}})
        optimizer = kind(model.parameters(), lr=0.1, **options)

        def look() -> Any:
            states = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
            return [about(t) for t in (*model.state_dict().values(), *(p.grad for p in model.parameters()), *states)]

        for step in range(3):
            model(torch.ones(2, 4)).sum().backward()
            before = look()
            with Looking(look) as looking:
                optimizer.step()
            assert looking.seen
            assert all(seen[: len(before)] == before for seen in looking.seen if step)
            optimizer.zero_grad()

    mw.simulate(fn, TP)


def test_state_dict_in_a_thread_beside_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 8))
    model = mw.shard_module(model, ONE, {"0.weight": {"tp": mw.Shard(0)}, "*.weight": {"tp": mw.Shard(0)}})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    plain: list[str] = []
    looked, done = [0], threading.Event()

    def look() -> None:
        while not done.is_set() or looked[0] < 100:
            plain.extend(n for n, t in model.state_dict().items() if not isinstance(t, mw.DistTensor))
            looked[0] += 1

    thread, interval = threading.Thread(target=look), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(40):
            loss = F.cross_entropy(model(torch.arange(8)), torch.arange(8))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not plain, (len(plain), looked)


def test_two_threads_that_work_on_one_tensor() -> None:
    """The one that is ready first does not take the part away from the other."""

    def fn() -> None:
        w = mw.shard_tensor(torch.arange(8.0).view(4, 2), TP, {"tp": mw.Shard(0)})
        with Looking(lambda: F.embedding(torch.tensor([0]), w).shape) as looking:
            F.embedding(indices(), w)
        assert set(looking.seen) == {torch.Size([1, 2])}
        assert about(w)[1] == (4, 2)

    mw.simulate(fn, TP)
