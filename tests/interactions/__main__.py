"""Run arrays outside of pytest: ``python -m tests.interactions --strength 3 --salt today --part 1/8``."""

from __future__ import annotations

import argparse
import time
from collections import Counter

from meshwright.program.step import CompiledStep

from .arrays import array
from .factors import short
from .judge import BAD, judge, script, shrink
from .limits import known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strength", type=int, default=2, help="how many values meet")
    parser.add_argument("--salt", default="", help="another one gives other cases")
    parser.add_argument("--part", default="0/1", help="of the cases, every n-th from the i-th on")
    parser.add_argument("--shrink", action="store_true", help="print each finding as a script")
    parser.add_argument("--slow", type=float, default=1e9, help="name cases that take this many seconds")
    parser.add_argument("--check", action="store_true", help="have captured steps compare their passes, too")
    args = parser.parse_args()
    CompiledStep.compares = args.check
    start, of = map(int, args.part.split("/"))
    counts, seconds, begin = Counter[str](), Counter[str](), time.process_time()
    for number, made in enumerate(array(args.strength, args.salt)):
        if number % of != start:
            continue
        before, class_of = time.process_time(), known(made)
        verdict = judge(made)
        kind = f"known ({verdict.kind})" if class_of is not None else verdict.kind
        counts[kind] += 1
        if kind in (*BAD, "invalid"):
            print(f"{number} {kind} {short(made)} {verdict.why}", flush=True)
            if args.shrink and kind != "invalid":
                print(script(*shrink(made, verdict)), flush=True)
        seconds[made["mode"]] += (took := time.process_time() - before)
        if took > args.slow:
            print(f"{number} took {took:.1f} s {short(made)}", flush=True)
        if sum(counts.values()) % 100 == 0:
            print(dict(counts), f"{time.process_time() - begin:.0f} s of CPU", flush=True)
    modes = ", ".join(f"{mode} {took:.0f}" for mode, took in seconds.most_common())
    print("end", dict(counts), f"{time.process_time() - begin:.0f} s of CPU: {modes}", flush=True)


if __name__ == "__main__":
    main()
