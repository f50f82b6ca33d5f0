"""Checkpoints on disk.

    DIR/step-00001200-3f9a1c2b/00003-of-00005.safetensors   the tensors of shard 3, of 0 to 4
    DIR/step-00001200-3f9a1c2b/00003-of-00005.json          its index: their names, types and hashes; in shard 0 also
                                                            the plain part of the state

Any tool that reads safetensors opens the first, a person reads the second. Nothing is pickled. Each file gets
its name only when all of it is on disk, and the tensors before the index; so a crash leaves no torn file, and
a shard is there when its index is. What is torn all the same (a damaged disk, a broken copy) is found by size
and hash.

The format is written and read here, not by the safetensors package: that wants a copy of every tensor, and
reads through mmap, where a disk's error kills the process instead of naming the file. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal

import msgspec
import xxhash

from ...protocols.errors import CheckpointError, ConfigError
from .checkpoint_plan import Checkpoint, Mark, order, superseded

FOLDER = re.compile(r"step-(\d{8,})-[0-9a-f]{8}")
SHARD = re.compile(r"(\d{5,})-of-(\d{5,})\.json")
FORMAT: Final = "chaosnet checkpoint 2"
NO_SPACE = errno.ENOSPC, errno.EDQUOT
OFF_FOR_A_WHILE = (
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
)  # Mostly of a disk behind a network.
SET_ASIDE, REMOVING = "set-aside-", ".removing-"

SAFETENSORS_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32",
    "uint32": "U32", "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}  # fmt: skip


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of a shard. `position` numbers the tensors of the whole state's manifest."""

    position: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    hash: str = ""  # xxh3_128 of its bytes: against damage, not against malice.

    @property
    def itemsize(self) -> int:
        return self.nbytes // max(math.prod(self.shape), 1)


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the JSON beside a shard says.

    Attributes:
        mark: The checkpoint's, the same in all shards.
        round: Number of all-reduces behind it, also those without samples.
        node: Who wrote this shard.
        count: Number of tensors in the whole state, as this node had it. Shard 0's number counts, as all tensors that
            need not be alike on all nodes are in that shard.
        plain: All of the state that is no tensor (plain.py), in base64; only in shard 0.
        digest: A hash of this index with an empty digest.
    """

    format: Literal["chaosnet checkpoint 2"] = FORMAT
    mark: Mark
    round: int
    shard: int
    node: str
    count: int
    tensors: tuple[StoredTensor, ...]
    plain: bytes = b""
    digest: str = ""

    def signed(self) -> Index:
        """This index with its digest."""
        unsigned = msgspec.structs.replace(self, digest="")
        digest = xxhash.xxh3_128_hexdigest(msgspec.json.encode(unsigned))
        return msgspec.structs.replace(self, digest=digest)


@dataclass(frozen=True, slots=True)
class Opened:
    """A complete checkpoint with all of its indexes read."""

    checkpoint: Checkpoint
    indexes: tuple[Index, ...]  # By shard.

    @property
    def tensors(self) -> list[StoredTensor]:
        """The tensors of all shards, by position."""
        return sorted((t for index in self.indexes for t in index.tensors), key=lambda t: t.position)


# --- the directory ---


def check_writable(directory: Path) -> None:
    """Make the directory if need be, and write a file in it for a test.

    A full disk is no reason against it where older checkpoints make room for the next.
    Raises: ConfigError that says why not.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        is_full = error.errno in NO_SPACE
        if is_full and sum(each.complete for each in scan(directory)) > 1:
            return
        refused = ConfigError(
            f"directory: {str(directory)!r} cannot be written: {error.strerror} (expected a folder "
            "with free space that this process may write)"
        )
        refused.lasting = error.errno not in (*NO_SPACE, *OFF_FOR_A_WHILE)
        raise refused from None


def scan(directory: Path) -> list[Checkpoint]:
    """Every checkpoint in a directory, complete or not, by step. Raises: CheckpointError if that cannot be read."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: {error.strerror}") from None
    paths = [(directory / name, match) for name in names if (match := FOLDER.fullmatch(name))]
    return sorted((_look(path, int(match[1])) for path, match in paths), key=order)


def _look(path: Path, step: int) -> Checkpoint:
    shards, present, size_bytes, written_s = 0, set(), 0, 0.0
    with contextlib.suppress(OSError):  # Another node may be removing it.
        for entry in os.scandir(path):
            stat = entry.stat()
            size_bytes += stat.st_size
            if match := SHARD.fullmatch(entry.name):
                present.add(int(match[1]))
                shards, written_s = int(match[2]), max(written_s, stat.st_mtime)
    return Checkpoint(path, step, shards, frozenset(present), size_bytes, written_s)


def prune(directory: Path, keep: int, before: int = 0) -> None:
    """Remove what the newest `keep` complete checkpoints have superseded; others may be doing the same.

    `before`: also incomplete ones before that step, as nobody writes them any more.
    """
    for checkpoint in superseded(scan(directory), keep, before):
        doomed = checkpoint.path.with_name(REMOVING + checkpoint.path.name)
        with contextlib.suppress(OSError):
            checkpoint.path.rename(doomed)  # So that nobody finds half of it.
    for leftover in directory.glob(f"{REMOVING}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def set_aside(directory: Path, step: int, run: str) -> list[Path]:
    """Rename what other runs wrote beyond `step`: it is of a history that did not happen. Returns: new names.

    A complete checkpoint without any valid index is renamed, too, or pruning would prefer it to this run's.
    An incomplete one, whose nodes died over it, stays: pruning removes it once this run is beyond its step.
    """
    renamed = []
    for checkpoint in scan(directory):
        if checkpoint.complete and checkpoint.step > step and _is_foreign(checkpoint, run):
            path = checkpoint.path.with_name(SET_ASIDE + checkpoint.path.name)
            with contextlib.suppress(OSError):
                checkpoint.path.rename(path)
                renamed.append(path)
    return renamed


def _is_foreign(checkpoint: Checkpoint, run: str) -> bool:
    """Is it of another run, or damaged? False for one without an index yet, or that cannot be read just now."""
    causes = []
    for shard in sorted(checkpoint.present):
        try:
            return read_index(checkpoint, shard).mark.run != run
        except CheckpointError as error:
            causes.append(error.__cause__)
    return bool(causes) and not any(isinstance(cause, OSError) for cause in causes)


def mark_of(checkpoint: Checkpoint) -> Mark | None:
    """The mark that any readable index of it has; None if none can be read."""
    for shard in sorted(checkpoint.present):
        with contextlib.suppress(CheckpointError):
            return read_index(checkpoint, shard).mark
    return None


# --- writing ---


def write_shard(
    directory: Path, index: Index, tensors: Sequence[StoredTensor], read: Callable[[int], memoryview]
) -> int:
    """Write one shard so that it is there whole or not at all.

    Args:
        index: This shard's, still without its tensors.
        read: Returns the bytes of the tensor at a position.
    Returns: bytes written.
    Raises: CheckpointError that names the file and the reason.
    """
    folder = directory / index.mark.folder
    stem = _stem(index.shard, index.mark.shards)
    hashes: list[str] = []
    # The largest items first: so each tensor is aligned to its item size.
    tensors = sorted(tensors, key=lambda tensor: (-tensor.itemsize, tensor.position))

    def write_tensors(file: BinaryIO) -> None:
        file.write(_header(tensors))
        for tensor in tensors:
            data = read(tensor.position)
            hashes.append(xxhash.xxh3_128_hexdigest(data))
            file.write(data)

    with _naming(folder):
        folder.mkdir(exist_ok=True)
        _sync_folder(directory)
    size = _write_file(folder / f"{stem}.safetensors", index.node, write_tensors)
    hashed = [msgspec.structs.replace(t, hash=digest) for t, digest in zip(tensors, hashes, strict=True)]
    whole = msgspec.structs.replace(index, tensors=tuple(hashed)).signed()
    text = msgspec.json.format(msgspec.json.encode(whole), indent=1)
    return size + _write_file(folder / f"{stem}.json", index.node, lambda file: file.write(text))


def _write_file(path: Path, node: str, write: Callable[[BinaryIO], object]) -> int:
    temporary = path.with_name(f".{path.name}.{xxhash.xxh3_64_hexdigest(node.encode())}.tmp")
    with _naming(path):
        try:
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            temporary.rename(path)
            _sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    return size


def lacks_space(error: CheckpointError) -> bool:
    """Was a file not written as the disk, or this user's part of it, is full?"""
    return getattr(error.__cause__, "errno", None) in NO_SPACE


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise an OSError of the block as a CheckpointError that names `path`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def _sync_folder(path: Path) -> None:
    """Make new names in a folder survive a power loss; Windows has no call for that."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stem(shard: int, shards: int) -> str:
    return f"{shard:05}-of-{shards:05}"


def _header(tensors: Sequence[StoredTensor]) -> bytes:
    """The front of a safetensors file: the length of a JSON text, 8 bytes little endian, and that text."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt", "written_by": "chaosnet"}}
    start = 0
    for tensor in tensors:
        known = SAFETENSORS_NAMES.get(tensor.dtype)
        fields[tensor.name] = {
            # A type that safetensors has no name for is written as bytes; the index names it.
            "dtype": known or "U8",
            "shape": list(tensor.shape) if known else [tensor.nbytes],
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# --- reading ---


def read_index(checkpoint: Checkpoint, shard: int) -> Index:
    """The index of a shard. Raises: CheckpointError that names the file if it cannot be read, or is damaged."""
    path = checkpoint.path / f"{_stem(shard, checkpoint.shards)}.json"
    with _naming(path):
        data = path.read_bytes()
    try:
        index = msgspec.json.decode(data, type=Index)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(f"{path} {_other_format(data) or f'is torn: {error}'}") from None
    if index.signed().digest != index.digest:
        raise CheckpointError(f"{path} is damaged: it does not match its hash")
    mark = index.mark
    if (mark.folder, index.shard, mark.shards) != (checkpoint.path.name, shard, checkpoint.shards):
        raise CheckpointError(f"{path} is of another checkpoint: {mark.folder}, shard {index.shard}")
    return index


class _AnyIndex(msgspec.Struct):
    """What an index of every version has."""

    format: str


def _other_format(data: bytes) -> str | None:
    """What is wrong with an index of another format; None if it names no other."""
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        found = msgspec.json.decode(data, type=_AnyIndex).format
        if found != FORMAT:
            return f"is of another checkpoint format, {found!r} (this version reads {FORMAT!r})"
    return None


def open_checkpoint(checkpoint: Checkpoint) -> Opened:
    """Read and compare all indexes, and the sizes of all files.

    Raises: CheckpointError that names the first file that is torn, damaged or missing.
    """
    opened = Opened(checkpoint, tuple(read_index(checkpoint, n) for n in range(checkpoint.shards)))
    for index in opened.indexes:
        path = _tensors_of(checkpoint, index)
        with _naming(path):
            size = path.stat().st_size
        expected = len(_header(index.tensors)) + sum(tensor.nbytes for tensor in index.tensors)
        if size != expected:
            raise CheckpointError(f"{path} is torn: it has {size} bytes (expected {expected})")
    positions = [tensor.position for tensor in opened.tensors]
    if positions != list(range(opened.indexes[0].count)):
        raise CheckpointError(
            f"{checkpoint.path}: its shards have {len(positions)} tensors (expected "
            f"{opened.indexes[0].count}, each once)"
        )
    return opened


def read_tensors(opened: Opened, only: Collection[int] | None = None) -> Iterator[tuple[int, bytearray]]:
    """(position, bytes) of every tensor, or of those at these positions, each checked by its hash, file by file.

    Raises: CheckpointError that names the file and the first tensor that is damaged.
    """
    for index in opened.indexes:
        if only is not None and not any(tensor.position in only for tensor in index.tensors):
            continue
        path = _tensors_of(opened.checkpoint, index)
        with _naming(path), path.open("rb") as file:
            header = _header(index.tensors)
            if file.read(len(header)) != header:
                raise CheckpointError(f"{path} is damaged: its header is not the one that was written")
            for tensor in index.tensors:
                if only is not None and tensor.position not in only:
                    file.seek(tensor.nbytes, os.SEEK_CUR)
                    continue
                data = bytearray(tensor.nbytes)
                if file.readinto(data) != tensor.nbytes:
                    raise CheckpointError(f"{path} is torn: it ends inside of {tensor.name!r}")
                if xxhash.xxh3_128_hexdigest(data) != tensor.hash:
                    raise CheckpointError(f"{path} is damaged: {tensor.name!r} does not match its hash")
                yield tensor.position, data


def _tensors_of(checkpoint: Checkpoint, index: Index) -> Path:
    return checkpoint.path / f"{_stem(index.shard, checkpoint.shards)}.safetensors"
