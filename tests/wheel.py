"""`make wheel-test`: what is uploaded, as somebody gets it who has no clone.

Builds the sdist, and from it the wheel; installs that in an empty environment in another folder; looks at what came
along; trains on two nodes there. Packages are those of constraints.txt.
"""

from __future__ import annotations

import configparser
import json
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "build" / "dist"

BROUGHT = {
    "click", "msgpack", "msgspec", "networkx", "numpy", "psutil", "pyyaml", "pyzmq", "rich", "torch", "uvloop",
    "xxhash",
}  # fmt: skip
"""What a node needs. What these need themselves comes, too."""

DATA = (
    "chaosnet/py.typed", "chaosnet/page/static/index.html", "chaosnet/protocols/status.py",
    "chaosnet/benchmarks/peers_workers/peer.py",
)  # fmt: skip

SCRIPT = """
import hashlib, torch
from chaosnet import Trainer

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
together = 0
while together < 60 and (trainer.world_size == 2 or not together):
    x = torch.randn(8, 4)
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    trainer.update()
    trainer.check_state_replication()
    together += trainer.world_size == 2
    if together and trainer.step % 10 == 0:
        print("state", trainer.step, hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest(), flush=True)
trainer.request_node_exit()
"""


def main() -> None:
    """Raises: AssertionError or CalledProcessError for what is not as it should be."""
    sdist, wheel = _built()
    _check_contents(sdist, wheel)
    with tempfile.TemporaryDirectory(prefix="chaosnet-wheel-") as folder:
        here = Path(folder)
        python = _installed(here / "venv", wheel)
        _check_brought(python)
        _check_commands(here, python.parent / "chaosnet")
        _train(here, python.parent / "chaosnet")
    print(f"wheel-test: {wheel.name} and {sdist.name} are good")


def _built() -> tuple[Path, Path]:
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # An earlier copy would be copied again.
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return sdist, wheel


def _check_contents(sdist: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        inside = set(opened.namelist())
    strange = {name for name in inside if not re.match(r"chaosnet(-[\d.]+\.dist-info)?/", name)}
    assert not strange, f"{wheel.name} has {sorted(strange)} (expected all of it in chaosnet/)"
    assert not any("test" in name.split("/")[1] for name in inside), "tests are in the wheel"
    static = [path.name for path in (ROOT / "chaosnet/page/static").iterdir() if path.is_file()]
    wanted = {*DATA, *(f"chaosnet/page/static/{name}" for name in static)}
    assert wanted <= inside, f"{wheel.name} lacks {sorted(wanted - inside)}"
    assert any(name.endswith("/licenses/LICENSE") for name in inside), "the wheel has no licence"
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"setup.cfg", "pyproject.toml", "README.md", "LICENSE"} <= names, (
        f"{sdist.name} has {sorted(names)[:20]}"
    )
    print(f"{wheel.name}: {len(inside)} files, {wheel.stat().st_size / 1e6:.1f} MB")


def _installed(at: Path, wheel: Path) -> Path:
    venv.create(at, with_pip=True)
    python = at / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--constraint", ROOT / "constraints.txt", wheel], check=True)
    return python


def _check_brought(python: Path) -> None:
    listed = subprocess.check_output([python, "-m", "pip", "list", "--format", "json"], text=True)
    there = {each["name"].lower().replace("_", "-") for each in json.loads(listed)}
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert _names(config["options"]["install_requires"]) == BROUGHT, (
        "install_requires is not what a node needs"
    )
    assert there >= BROUGHT, f"not installed: {sorted(BROUGHT - there)}"
    extras = {name for lines in config["options.extras_require"].values() for name in _names(lines)} - {
        "chaosnet"
    }
    assert not there & extras, f"installed without being asked for: {sorted(there & extras)}"
    subprocess.run([python, "-m", "pip", "check"], check=True, stdout=subprocess.DEVNULL)
    print(f"installed: {', '.join(sorted(there - {'pip', 'setuptools'}))}")


def _names(requirements: str) -> set[str]:
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in requirements.split("\n") if line}


def _check_commands(here: Path, chaosnet: Path) -> None:
    for args in (["--help"], ["--version"], ["run", "--help"], ["bench", "join", "--help"]):
        subprocess.run([chaosnet, *args], check=True, cwd=here, stdout=subprocess.DEVNULL)
    simulated = subprocess.run(
        [chaosnet, "simulate", "--schedules", "20"], cwd=here, capture_output=True, text=True, check=False
    )
    assert simulated.returncode == 0, simulated.stderr
    refused = subprocess.run([chaosnet, "demo"], cwd=here, capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and "pip install 'chaosnet[demo]'" in refused.stderr, refused.stderr


def _train(here: Path, chaosnet: Path) -> None:
    (here / "train.py").write_text(SCRIPT)
    first, second = _address(), _address()
    run = [chaosnet, "run", "--listen"]
    nodes = [[*run, first, "train.py"], [*run, second, "--join", first, "train.py"]]
    with subprocess.Popen(nodes[0], cwd=here, stdout=subprocess.PIPE, text=True) as founder:
        joined = subprocess.run(
            nodes[1], cwd=here, stdout=subprocess.PIPE, text=True, check=True, timeout=120
        )
        printed, _ = founder.communicate(timeout=60)
        assert founder.returncode == 0, printed
    states = [dict(re.findall(r"state (\d+) (\w+)", each)) for each in (printed, joined.stdout)]
    both = states[0].keys() & states[1].keys()
    assert both and all(states[0][step] == states[1][step] for step in both), f"{printed}\n{joined.stdout}"
    print(f"two nodes have trained together; at {len(both)} steps their weights were looked at, and equal")


def _address() -> str:
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probing.getsockname()[1]}"


if __name__ == "__main__":
    main()
