"""Fuzz the places where bytes and texts of others come in, and say how many inputs that were.

    python tests/fuzz/run.py --inputs 100000                 of all targets, in shares by how fast they are
    python tests/fuzz/run.py --inputs 100000 --target core   of one
    python tests/fuzz/run.py --keep                          put one input for each way of refusal into the corpus

An input that breaks a promise ends the run with what it raised; --seed and --target find it again.
"""

import argparse
import hashlib
import json
import random
import sys
import time
import traceback
from pathlib import Path

from targets import CORPUS, TARGETS

SHARES = {"codec": 0.7, "state": 0.2, "texts": 0.04, "core": 0.05, "sockets": 0.01}
ROUND = 20_000  # Inputs between two looks at the memory in use.
MAX_GROWTH_MB = 200.0


def fuzz(name, inputs, seed):
    """Give one target so many inputs. Returns: what was seen."""
    import psutil

    target = TARGETS[name](random.Random(f"{name} {seed}"))
    began_s, process, memory = time.monotonic(), psutil.Process(), []
    for number in range(inputs):
        try:
            target.one()
        except Exception:
            traceback.print_exc()
            sys.exit(f"{name}: input {number} of seed {seed} raised what it must not")
        if number % ROUND == 0:
            memory.append(process.memory_info().rss / 1e6)
    getattr(target, "finish", lambda: None)()
    seconds = time.monotonic() - began_s
    grown = memory[-1] - memory[min(1, len(memory) - 1)]
    if grown > MAX_GROWTH_MB:
        sys.exit(f"{name}: memory grew by {grown:.0f} MB")
    found = {"inputs": inputs, "seed": seed, "taken": target.taken, "seconds": round(seconds, 1)}
    found |= {"per_second": round(inputs / max(seconds, 1e-9)), "grown_mb": round(grown, 1)}
    return found, target


def keep(target):
    """An input for each way in which one was refused, if it is new."""
    folder = CORPUS / target.kept
    folder.mkdir(parents=True, exist_ok=True)
    for kind, frame in sorted(target.refusals.example.items()):
        path = folder / f"refused-{hashlib.sha256(kind.encode()).hexdigest()[:12]}.bin"
        if not path.exists() and len(frame) <= 4096:
            path.write_bytes(frame)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--target", choices=[*TARGETS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write what was seen")
    parser.add_argument("--keep", action="store_true", help="add to the corpus")
    options = parser.parse_args()
    shares = {options.target: 1.0} if options.target else SHARES
    report = {}
    for name, share in shares.items():
        report[name], target = fuzz(name, max(1, round(share * options.inputs)), options.seed)
        print(f"{name:8} {report[name]}", flush=True)
        if options.keep and hasattr(target, "kept"):
            keep(target)
    print(f"{sum(each['inputs'] for each in report.values()):,} inputs, nothing broke")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
