"""For all tests: the key of who runs them must make no difference."""

import os
import tempfile

_config = tempfile.TemporaryDirectory(prefix="chaosnet-tests-")  # Removed when the tests end.
os.environ["XDG_CONFIG_HOME"] = _config.name
for name in ("CHAOSNET_KEY", "CHAOSNET_ALLOWED_KEYS", "CHAOSNET_INSECURE"):
    os.environ.pop(name, None)
