"""A node's CURVE key pair and the files that keys are kept in.

Public keys are shown and sent as 52 characters of base32, which need no quoting anywhere. The secret one leaves
its file only for libzmq, and an invite's for its token.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from ..protocols.errors import ConfigError
from .endpoint import KEY

HEADER = "# chaosnet key. Who reads the last line can act as this node: keep it to yourself."


@dataclass(frozen=True, slots=True)
class KeyPair:
    """`secret`: 32 bytes, not to be shown to anybody; `repr` does not."""

    public: str
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        return cls.of(z85.decode(zmq.curve_keypair()[1]))

    @classmethod
    def of(cls, secret: bytes) -> KeyPair:
        return cls(key_text(z85.decode(zmq.curve_public(z85.encode(secret)))), secret)


def key_text(raw: bytes) -> str:
    """A key's 32 bytes as text for people."""
    return base64.b32encode(raw).decode().rstrip("=").lower()


def key_bytes(text: str) -> bytes:
    """The 32 bytes of a public key."""
    return base64.b32decode(text.upper() + "====")


def save(pair: KeyPair, path: Path, force: bool = False) -> None:
    """Write a file that only this user can read. Raises: ConfigError if there is one, unless `force`."""
    if force and is_there(path) and not _is_key(path):
        raise ConfigError(
            f"{path}: --force replaces a key, and this is none (expected a file of `chaosnet keygen`)"
        )
    if not _kept(pair, path, force):
        raise ConfigError(f"{path}: there is a key already (--force replaces it, and it is gone then)")


def is_there(path: Path) -> bool:
    """Is there a file? Also True if a folder on the way is closed to us: opening it then tells why."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _is_key(path: Path) -> bool:
    """Does the file begin as our key files do? It may still be damaged, or readable by others."""
    try:
        with path.open("rb") as lines:
            return lines.read(len(HEADER)) == HEADER.encode()
    except OSError:
        return False


def make(path: Path) -> None:
    """Make a key file, unless there is one: another machine that sees the same folder may have been quicker."""
    if not is_there(path):
        _kept(KeyPair.new(), path)


def _kept(pair: KeyPair, path: Path, force: bool = False) -> bool:
    """Write the file in one piece. Returns: False if there is one. Raises: ConfigError if it cannot be written."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(6)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(f"{HEADER}\n# Its public key: {pair.public}\n{key_text(pair.secret)}\n")
        return _named(draft, path, force)
    except OSError as error:
        raise ConfigError(f"{path}: the key cannot be written ({error.strerror})") from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def _named(draft: Path, path: Path, force: bool) -> bool:
    """Give the draft its name. Returns: False if there is a file of that name."""
    try:
        if not force:
            path.hardlink_to(draft)
            return True
    except FileExistsError:
        return False
    except OSError:  # A file system without such links.
        if path.exists():
            return False
    draft.replace(path)
    return True


def load(path: Path) -> KeyPair:
    """The pair in a file of `save`. Raises: ConfigError that names the file, and never what is in it."""
    try:
        mode = path.stat().st_mode
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"{path}: the key cannot be read ({reason}; chaosnet keygen makes one)") from None
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"{path}: others can read this key (mode {mode & 0o777:o}, expected 600: chmod 600)"
        )
    kept = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if len(kept) != 1 or not KEY.fullmatch(kept[0]):
        raise ConfigError(f"{path}: there is no key in it (expected a file of `chaosnet keygen`)")
    return KeyPair.of(key_bytes(kept[0]))


def load_allowed(path: Path) -> tuple[str, ...]:
    """Public keys, one a line; what follows a # is for people. Raises: ConfigError."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"allowed keys: {path} cannot be read ({reason})") from None
    found = []
    for number, line in enumerate(lines, 1):
        key = line.partition("#")[0].strip()
        if key and not KEY.fullmatch(key):
            raise ConfigError(
                f"{path}, line {number}: no public key (expected 52 letters and digits, as keygen prints)"
            )
        if key:
            found.append(key)
    return tuple(found)
