"""``python -m conformance.mutation``: mutate the core, and say what no test notices."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .judges import SMALL, SOURCE, judges, modules

# Imported once, for all mutants: what the tests would import, of PyTorch; of the package nothing.
_ONCE = (
    "torch", "torch._dynamo", "torch.distributions", "torch.export", "torch.testing", "torch._functorch.aot_autograd",
    "torch.export._trace", "torch._subclasses.schema_check_mode", "torch.fx.experimental.proxy_tensor", "hypothesis",
)  # fmt: skip
EQUAL = Path(__file__).parent / "equal.toml"


def _recorded() -> set[tuple[str, ...]]:
    """The mutants that are equal to what they change, by proof."""
    return {
        (module, e["function"], e["was"], e["now"])
        for module, entries in tomllib.loads(EQUAL.read_text()).items()
        for e in entries
    }


def _one(module: str, options: argparse.Namespace) -> list[Any]:
    """The verdicts on a module's mutants."""
    from .session import OUT, Session, Verdict, forked, judged_anew

    equal, last = _recorded(), OUT / f"{module.replace('/', '.')}.json"
    if options.survivors:
        alive = {_name(Verdict(**v)) for v in json.loads(last.read_text()) if v["what"] in ("survived", "unreached")}

    def wanted(v: Verdict) -> bool:
        return _name(v) not in equal and (not options.survivors or _name(v) in alive)

    def work(send: Callable[[Any], None]) -> None:
        files = options.tests or judges(module, options.small)
        session = Session(module, files, wanted, options.sample, options.seconds, options.seed)
        if session.collected():
            sys.exit(1)
        for v in session.verdicts:
            if v.what:
                send({"verdict": asdict(v)})
        for v, source, order in session.anew:
            send({"verdict": asdict(v), "source": source, "order": order})

    made, ended = forked(work, 1e9, quiet=False)
    if not ended:
        sys.exit(f"{module}: its tests cannot be run")
    found = []
    for m in made:
        found.append(Verdict(**m["verdict"]))
        if "source" in m:
            judged_anew(found[-1], m["source"], m["order"])
    found.sort(key=lambda v: v.line)
    last.write_text(json.dumps([asdict(v) for v in found], indent=1))
    return found


def _name(v: Any) -> tuple[str, ...]:
    return v.module, v.function, v.was, v.now


def _changed(v: Any) -> str:
    lines = [f"{v.module}:{v.line} {v.function}  ({v.what}; {v.tests} tests reach it)"]
    return "\n".join([*lines, *(f"  - {x}" for x in v.was.splitlines()), *(f"  + {x}" for x in v.now.splitlines())])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", help="the beginnings of their paths, as passes/ (default: all)")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="these judge them, in place of those of judges.py")
    parser.add_argument("--small", action="store_true", help="modules that tests without ranks judge alone, by those")
    parser.add_argument("--sample", type=int, default=-1, help="so many mutants of each module (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="which ones a sample takes")
    parser.add_argument("--seconds", type=float, default=20.0, help="of tests for each mutant")
    parser.add_argument(
        "--survivors", action="store_true", help="only those that were alive at the end of the last run"
    )
    parser.add_argument("--least", type=float, default=0.0, help="fail where fewer than this part are killed")
    options = parser.parse_args()
    sys.path[:0] = [str(SOURCE.parent), str(SOURCE.parents[1])]
    for name in _ONCE:
        importlib.import_module(name)
    short = []
    for module in modules(options.modules):
        if options.small and module not in SMALL:
            continue
        began = time.monotonic()
        found = _one(module, options)
        if not found:
            continue
        kinds = Counter(v.what for v in found)
        killed = kinds["killed"] + kinds["time"]
        for v in found:
            if v.what in ("survived", "unreached"):
                print(_changed(v))
        print(
            f"{module}: {killed} of {len(found)} killed ({killed / len(found):.1%}; {kinds['time']} by time), "
            f"{kinds['unreached']} unreached, {time.monotonic() - began:.0f} s", flush=True,
        )  # fmt: skip
        if killed < options.least * len(found):
            short.append(module)
    if short:
        print(f"fewer than {options.least:.0%} killed: {', '.join(short)}")
    return bool(short)


if __name__ == "__main__":
    sys.exit(main())
