"""`chaosnet` with its cores compiled, for long searches: the same lives, to the bit, in half the time.

    .venv/bin/python tests/compiled.py simulate --schedules 300000 --json found.json

Compiles a copy in build/compiled (mypyc, from mypy, and a C compiler; minutes), or takes the one that is there if
nothing has changed since. Transitions of compiled cores cannot be watched, so coverage lacks them.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import xxhash

ROOT = Path(__file__).parent.parent
COPY = ROOT / "build" / "compiled"
FOLDERS = ("protocols", "scheduler", "node", "simulator", "netem", "benchmarks", "trials")
CORES = (
    *sorted(f"node/agent/{part}.py" for part in (
        "core", "joining", "leaving", "missing", "neighbors", "node", "parking", "recovery", "relayouts", "reports",
        "role", "routes", "steps", "strikes", "views", "welcome",
    )),
    *sorted(f"scheduler/{part}.py" for part in (
        "changes", "core", "flushes", "joins", "notices", "repairs", "tenure", "views",
    )),
    *sorted(f"simulator/{part}.py" for part in ("cluster", "history", "network", "nodes", "rates")),
)  # fmt: skip
# Read by msgspec, or small; and so are all of protocols/messages/.
INTERPRETED = ("__init__", "codec", "errors", "events", "effects", "keyring", "status")


def main() -> None:
    """Compile, if need be, and become `chaosnet`."""
    stamp, mark = COPY / "of", _hash()
    if not stamp.exists() or stamp.read_text() != mark:
        _compile()
        stamp.write_text(mark)
    run = "from chaosnet.cli import main; main()"
    os.environ["PYTHONPATH"] = str(COPY)
    os.chdir(os.environ.get("PWD", "."))
    os.execv(sys.executable, [sys.executable, "-P", "-c", run, *sys.argv[1:]])


def _hash() -> str:
    files = sorted(path for folder in ("chaosnet", *FOLDERS) for path in (ROOT / folder).rglob("*.py"))
    return xxhash.xxh3_128_hexdigest(b"".join(path.read_bytes() for path in files))


def _compile() -> None:
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(ROOT / "chaosnet", COPY / "chaosnet")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, COPY / "chaosnet" / folder)
    protocols = [path for path in (COPY / "chaosnet/protocols").glob("*.py") if path.stem not in INTERPRETED]
    modules = [str(path.relative_to(COPY)) for path in sorted(protocols)]
    modules += [f"chaosnet/{path}" for path in CORES]
    print(f"compiling {len(modules)} modules in {COPY}: takes a few minutes, once", file=sys.stderr)
    command = [sys.executable, "-m", "mypyc", "--ignore-missing-imports", *modules]
    environment = os.environ | {"MYPYC_OPT_LEVEL": "1"}
    done = subprocess.run(command, cwd=COPY, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}mypyc failed; is there a C compiler (gcc)?")


if __name__ == "__main__":
    main()
