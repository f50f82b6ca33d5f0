"""Run mypy on an installed copy: type checkers do not follow the mapping of an editable install."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> int:
    """Install a copy beside the virtual environment and check it. Returns: mypy's exit status."""
    shutil.rmtree(ROOT / "build/lib", ignore_errors=True)  # An earlier copy would be copied again.
    with tempfile.TemporaryDirectory() as folder:
        options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--target", folder]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, str(ROOT)], check=True)
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "setup.cfg"), "-p", "chaosnet"]
        return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
