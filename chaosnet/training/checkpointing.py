"""A trainer's checkpoints: when one is written, which part of the state, what is printed; and resuming.

    due --capture--> copying (beside the next forward) --the next step is complete--> writing --> pruning

All members come to the same decision from the same commit. Whether somebody is still writing the last one
travels in each contribution, so all leave a checkpoint out, or nobody does.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from ..node.session import Session
from ..node.state import plain
from ..node.state.checkpoint import (
    FOLDER,
    Index,
    Opened,
    StoredTensor,
    check_writable,
    lacks_space,
    mark_of,
    open_checkpoint,
    prune,
    read_tensors,
    scan,
    set_aside,
    write_shard,
)
from ..node.state.checkpoint_plan import (
    Checkpoint,
    Mark,
    choose,
    describe,
    layout_of,
    part_of,
    part_of_keeper,
)
from ..node.state.flat_state import NO_MEMORY, Arrival, Capture, Entry, Manifest, Snapshot, StateChanged
from ..protocols.errors import CheckpointError, ConfigError, MalformedMessage
from ..protocols.messages import Commit
from ..scheduler.monitor import CHECKPOINT_AT_S as AT_S
from ..scheduler.monitor import CHECKPOINT_STEP as STEP
from ..scheduler.monitor import CHECKPOINT_WRITING as WRITING
from ..script.means import NO_PART, UNDER_WAY
from ..settings.resolved import CheckpointSettings
from ..terminal.progress import FIRST_S, followed

MAX_ERRNO = 4096  # Of Linux, and more than others have.
POLL_S = 0.1

Say = Callable[[str], None]
Part = Callable[[Sequence[Entry], int], Collection[int]]
"""Positions of a state's tensors, of these and how many of them (the first) all nodes have alike."""


class Checkpointing:
    """One node's part in the cluster's checkpoints.

    Methods are for the training thread; what takes long runs in a thread of its own, one at a time.

    Attributes:
        newest: Step and place of the last that this node has written its part of, or went on from.
        loaded: The folder of the one whose state this node has loaded last; "" if there is none.
        absent: By the names of all tensors of a checkpoint, the positions of those that are checked, but not loaded.
    Raises: ConfigError if the directory cannot be written.
    """

    def __init__(self, settings: CheckpointSettings, node: str, say: Say) -> None:
        self.settings, self.node, self.say = settings, node, say
        self.directory = Path(settings.directory)
        self.counters: Counter[str] = Counter()
        self.keepers: Callable[[], Mapping[str, str]] | None = None  # See part_of_keeper.
        self.busy = False
        self._leaving_out = self._told_full = False
        self._told_busy = False  # With the last contribution; the write may have ended since.
        self._all_have_it = threading.Event()  # The step of the checkpoint under way.
        self._abandoned = False
        self._is_final = False  # All leave, and nobody will have the state but the disk.
        self._thread: threading.Thread | None = None
        self._last: Mark | None = None
        self.newest: tuple[int, Path] | None = None
        self._resumed: tuple[int, Path] | None = None  # What this node goes on from, if it founds.
        self.loaded = ""
        self._read: tuple[Path, Arrival] | None = None  # The newest, about to be loaded.
        self.absent: Callable[[Sequence[str]], Collection[int]] = none_of
        # Whose parts were lacking when that was told, and who of these had said so.
        self._blamed: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        # Our last write, if it failed: of what, and the errno. Of others' parts, by number: the errno.
        self._failed: tuple[Mark, int] | None = None
        self._heard: dict[int, int] = {}
        check_writable(self.directory)

    # --- going on from one ---

    def resume(self, load: Callable[[Arrival], None]) -> bool:
        """Load the checkpoint to go on from. For a node that founds, or may; others get the state from the cluster.

        Which of the two it is, is told by `founded`.
        Returns: whether there was one to `load`. Raises: as `to_resume`; ConfigError for one that does not fit.
        """
        arrival = self.to_resume()
        if arrival is None:
            return False
        try:
            load(arrival)
        except ConfigError as error:
            raise ConfigError(f"cannot resume from {self.directory}: {error}") from None
        return True

    def founded(self) -> None:
        """This node has founded the cluster, with what `resume` has loaded. Not called if it joins one."""
        self.newest = self._resumed
        if self.newest is not None:
            step, path = self.newest
            self.say(f"goes on from step {step} in {path}")
        elif self.settings.resume:
            self.say(f"nothing to resume in {self.directory}: starts from scratch")

    def to_resume(self) -> Arrival | None:
        """The state to found the cluster with; None to start from scratch.

        Raises: CheckpointError if there is none that can be loaded, by the name of the file; ConfigError if there
            are checkpoints and the user did not say that he wants to go on from one.
        """
        found, settings = scan(self.directory), self.settings
        if FOLDER.fullmatch(self.directory.name):
            raise ConfigError(
                f"directory: {str(self.directory)!r} is a checkpoint itself "
                f"(expected the folder that holds it: {str(self.directory.parent)!r})"
            )
        if not settings.resume:
            if found:
                raise ConfigError(
                    f"directory: {str(self.directory)!r} holds checkpoints up to step {found[-1].step} already "
                    "(expected --resume to go on from the newest, or another folder)"
                )
            return None
        if not found and settings.resume_from is None:
            return None
        try:
            chosen, arrival = self._load_newest(found)
        except CheckpointError as error:
            verify = f"`chaosnet checkpoints {self.directory} --verify` shows which are whole"
            is_any = any(each.complete for each in found)
            hint = (
                f"{verify}, --resume-from STEP takes that one"
                if is_any
                else "another folder starts from scratch"
            )
            raise CheckpointError(f"cannot resume: {error} ({hint})") from error
        self._resumed = chosen.step, chosen.path
        return arrival

    def _load_newest(self, found: Sequence[Checkpoint]) -> tuple[Checkpoint, Arrival]:
        """The newest that can be loaded, or the one that the user wants.

        Raises: CheckpointError of the newest if none can be, or the wanted one cannot.
        """
        wanted, first = self.settings.resume_from, None
        left = list(found)
        while True:
            try:
                chosen = choose(left, wanted)
            except CheckpointError as error:
                raise first or error from None
            try:
                arrival = self._load(chosen)
            except CheckpointError as error:
                if wanted is not None:
                    raise
                first = first or error
                self.say(f"passed over: {error}")
                left.remove(chosen)
                continue
            for newer in found[found.index(chosen) + 1 :] if wanted is None else ():
                if not newer.complete:
                    self.say(f"ignored: {describe(newer)}")
            return chosen, arrival

    def newest_step(self) -> int:
        """The step of the newest checkpoint that `load_step` can load, all of it read; 0 if there is none."""
        try:
            left = scan(self.directory)
            while True:
                chosen = choose(left)
                try:
                    if self._read is None or self._read[0] != chosen.path:
                        self._read = chosen.path, self._load(chosen)
                    return chosen.step
                except CheckpointError as error:
                    self.say(f"passed over: {error}")
                    left = [each for each in left if each.step < chosen.step]
        except CheckpointError:
            return 0

    def load_step(self, step: int) -> Arrival:
        """The state after so many steps. Raises: CheckpointError."""
        read, self._read = self._read, None
        chosen = choose(scan(self.directory), step)
        return read[1] if read is not None and read[0] == chosen.path else self._load(chosen)

    def _load(self, chosen: Checkpoint) -> Arrival:
        arrival = load(chosen, self.absent)
        self.loaded = chosen.path.name
        return arrival

    def opened(self, folder: str) -> Opened:
        """The checkpoint in `folder`, to read single tensors.

        Raises: CheckpointError if it is not here, or not whole.
        """
        for each in scan(self.directory):
            if each.path.name == folder:
                return open_checkpoint(each)
        raise CheckpointError(
            f"{self.directory} has no {folder}, from which the cluster goes on (expected the folder of checkpoints "
            "that all members share)"
        )

    def started(self, step: int, run: str) -> None:
        """The state is that of `step`: what other runs wrote beyond it is of a history that did not happen."""
        self.counters[WRITING] += 0  # From now on the status says that there are checkpoints.
        if self.newest is not None and self.newest[0] == step and not self.counters[STEP]:
            self._tell_newest(step, self.newest[1])
        try:
            renamed = set_aside(self.directory, step, run)
        except CheckpointError as error:  # A disk that fails for a while must not end a node that rejoins.
            self.counters["checkpoints_failed"] += 1
            self.say(f"nothing set aside beyond step {step}: {error}; training goes on")
            return
        for path in renamed:
            self.say(f"set aside as {path}: it is beyond step {step}, from which this run goes on")

    def newest_whole(self) -> tuple[int, Path] | None:
        """`newest`, or if that lacks parts of others the newest complete one; None if there is none."""
        with contextlib.suppress(CheckpointError):
            found = scan(self.directory)
            if any((each.step, each.path) == self.newest and not each.complete for each in found):
                whole = [each for each in found if each.complete]
                return (whole[-1].step, whole[-1].path) if whole else None
        return self.newest

    def _tell_newest(self, step: int, path: Path) -> None:
        """For the status: the newest checkpoint of which this node has its part, and when that was there."""
        self.counters[STEP] = step
        try:
            self.counters[AT_S] = int(path.stat().st_mtime)
        except OSError:
            self.counters[AT_S] = int(time.time())

    # --- writing ---

    def due(self, step: int, run: str, commit: Commit) -> Mark | None:
        """What to write now that `step` is complete here, if anything.

        Where all leave with it, that is the last state there is: it is written whatever its number, unless it is on
        disk already.
        """
        total, settings = commit.total, self.settings
        if self.node not in total.shares:
            return None
        members = tuple(sorted(total.shares)) if settings.copies == "shard" else (self.node,)
        mark = Mark(run=run, step=step, key=commit.key, members=members, shards=len(members))
        if total.leaving:
            return self._final(mark)
        if not total.weight or step % settings.every:
            return None
        if UNDER_WAY in total.metrics:
            self._leave_out(step)
            return None
        self._leaving_out = False
        self._heard = _failures(total.metrics)
        return mark

    def _final(self, mark: Mark) -> Mark | None:
        """The mark of the last checkpoint, if all leave; None if nothing was trained, or it is on disk already."""
        if not mark.step:
            return None  # Nothing was trained.
        self._end_write()
        self._is_final = True
        last = self._last
        return None if last is not None and msgspec.structs.replace(last, layout="") == mark else mark

    def _leave_out(self, step: int) -> None:
        self.counters["checkpoints_left_out"] += 1
        if not self._leaving_out:
            who = self.node if self._told_busy else "another node"
            self.say(
                f"no checkpoint at step {step}: {who} is still writing the last one (a larger `every` helps)"
            )
        self._leaving_out = True

    def tensors_of(self, mark: Mark) -> Part:
        """Which of the state's tensors this node writes, of all and how many of these all have alike."""
        if self.keepers is not None:
            keepers, first = self.keepers(), mark.members[0]
            return lambda entries, _: part_of_keeper(
                self.node, [entry.name for entry in entries], keepers, first
            )
        shard = self._shard(mark)
        return lambda entries, alike: part_of(
            shard, [entry.stop - entry.start for entry in entries], alike, mark.shards
        )

    def _shard(self, mark: Mark) -> int:
        return mark.members.index(self.node) if mark.shards > 1 else 0

    def begin(self, capture: Capture, mark: Mark, part: Part) -> bool:
        """Write `part` of `capture` once somebody has run it, and the next step has shown that all have this one.

        Returns: False if this process has as many threads as it may; that is told.
        """
        self.busy, self._all_have_it, self._failed = True, threading.Event(), None
        self.counters[WRITING] = 1
        arguments = capture, mark, part
        thread = threading.Thread(target=self._write, args=arguments, name="chaosnet-checkpoint", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self.busy, self.counters[WRITING] = False, 0
            self._not_written(mark, error)
            return False
        self._thread = thread
        return True

    def not_begun(self, mark: Mark, number: int = 0) -> None:
        """This node does not write its part, for a reason that it has told. `number`: that of the system's error."""
        self.counters["checkpoints_failed"] += 1
        if mark.shards > 1:  # Others would look for the reason at themselves.
            self._failed = mark, number

    def next_step_done(self) -> None:
        """A step is complete: all have the state before it, as nobody contributes without it."""
        self._all_have_it.set()

    def contribute(self, metrics: dict[str, tuple[float, float]]) -> None:
        """Tell the others with this node's part of a step that it is still writing, or could not write its part."""
        self._told_busy = self.busy
        if self._told_busy:
            metrics[UNDER_WAY] = (1.0, 0.0)
        if self._failed is not None:
            mark, number = self._failed
            metrics[f"{NO_PART}{self._shard(mark)}"] = (float(number), 0.0)

    def close(self, abandon: bool) -> None:
        """End: with the write under way, or without it if the cluster went on without this node."""
        self._abandoned = abandon
        if abandon:
            self._all_have_it.set()
        else:
            self._end_write()

    def _end_write(self) -> None:
        self._all_have_it.set()
        if self._thread is None:
            return
        self._thread.join(FIRST_S)
        if self._thread.is_alive():
            self.say(f"waits for the disk: a checkpoint is still being written to {self.directory}")
            self._thread.join()  # Who does not want to wait presses Ctrl+C twice.

    def _write(self, capture: Capture, mark: Mark, part: Part) -> None:
        try:
            snapshot = capture.wait()
            mark = _laid_out(mark, snapshot)
            self._all_have_it.wait()
            if self._abandoned:
                return
            if not self._is_final:
                self._look_back(mark)
            started_s = time.monotonic()
            size = self._write_making_room(snapshot, mark, part)
            self._last, self.newest = mark, (mark.step, self.directory / mark.folder)
            self.counters["checkpoints"] += 1
            self._tell_newest(*self.newest)
            self.counters["checkpoint_ms"] = round(1e3 * (time.monotonic() - started_s))
            self.counters["checkpoint_bytes"] = size
            if self._is_final:
                # The others have had as long as this node, and have as long again.
                lacking = _lacking(self.directory, mark, time.monotonic() - started_s + FIRST_S)
                but = f", but for the part of {', '.join(lacking)}, not there yet" if lacking else ""
                self.say(f"the state after step {mark.step} is in {self.directory / mark.folder}{but}")
            self._prune(self.settings.kept)
        except (CheckpointError, StateChanged, *NO_MEMORY) as error:
            self._not_written(mark, error)
        finally:
            self.busy, self.counters[WRITING] = False, 0

    def _not_written(self, mark: Mark, error: Exception) -> None:
        self.not_begun(mark, getattr(error.__cause__, "errno", None) or 0)
        following = f"training goes on, the next try is at step {mark.step + self.settings.every}"
        self.say(
            f"no checkpoint at step {mark.step}: {error}; "
            + ("it was to be the last one" if self._is_final else following)
        )

    def _write_making_room(self, snapshot: Snapshot, mark: Mark, part: Part) -> int:
        """Write this node's part. On a full disk older checkpoints go first, never the newest complete one.

        How many there are is counted before, so nodes that share the disk do not each remove another one.
        """
        complete = sum(each.complete for each in scan(self.directory))
        for keep in range(max(complete - 1, 1), 0, -1):
            try:
                return self._write_shard(snapshot, mark, part)
            except CheckpointError as error:
                if not lacks_space(error):
                    raise
            if complete > 1 and not self._told_full:
                self._told_full = True
                self.say(
                    f"no space for another checkpoint in {self.directory}: older ones are removed for it"
                )
            # Nobody is still writing the last one (see `due`), but with the final step that is not known.
            self._prune(keep, before=0 if self._is_final else mark.step)
        return self._write_shard(snapshot, mark, part)

    def _prune(self, keep: int, before: int = 0) -> None:
        try:
            prune(self.directory, keep, before)
        except (CheckpointError, OSError) as error:
            self.say(f"old checkpoints are not removed this time: {error}")

    def _write_shard(self, snapshot: Snapshot, mark: Mark, part: Part) -> int:
        entries, shard = snapshot.manifest.entries, self._shard(mark)
        index = Index(
            mark=mark,
            round=snapshot.manifest.step,
            shard=shard,
            node=self.node,
            count=len(entries),
            tensors=(),
            plain=snapshot.manifest.plain if shard == 0 else b"",
        )
        tensors = []
        for position in part(entries, snapshot.alike):
            entry = entries[position]
            tensors.append(
                StoredTensor(
                    position=position,
                    name=entry.name,
                    dtype=entry.dtype,
                    shape=entry.shape,
                    nbytes=entry.stop - entry.start,
                )
            )
        return write_shard(
            self.directory, index, tensors, lambda n: snapshot.slice(entries[n].start, entries[n].stop)
        )

    def _look_back(self, mark: Mark) -> None:
        """Say so if a part of the last checkpoint never came: its writer had time until now."""
        last, self._last = self._last, None
        found = {each.path.name: each for each in scan(self.directory)}
        if last is None or last.folder not in found:
            return
        lacking = [n for n in range(last.shards) if n not in found[last.folder].present]
        silent = tuple(last.members[n] for n in lacking)
        failed = {last.members[n]: self._heard[n] for n in lacking if n in self._heard}
        blamed = silent, tuple(failed)
        if not silent or blamed == self._blamed:
            return
        self.counters["checkpoints_incomplete"] += 1
        gone = [node for node in silent if node not in mark.members and node not in failed]
        self._blamed = None if gone else blamed
        for node, number in failed.items():
            why = os.strerror(number) if number else "the reason is among what it has printed"
            self._tell_lack(last, [node], f"it could not write it to {self.directory}: {why}")
        if others := [node for node in silent if node not in failed]:
            self._tell_lack(last, others, _why_silent(last, gone, found.values()))

    def _tell_lack(self, last: Mark, nodes: Sequence[str], why: str) -> None:
        self.say(f"the checkpoint of step {last.step} lacks the part of {', '.join(nodes)} ({why})")


def checkpointing_of(settings: CheckpointSettings | None, session: Session) -> Checkpointing | None:
    """The Checkpointing of a session's node; None without settings. Raises: ConfigError if it cannot write there."""
    if settings is None:
        return None
    made = Checkpointing(settings, session.name, session.say)
    made.counters = session.counters
    return made


def _lacking(directory: Path, mark: Mark, patience_s: float) -> list[str]:
    """Whose parts of the checkpoint are not there, after waiting for them for so long."""
    deadline_s = time.monotonic() + patience_s
    while True:
        found: list[Checkpoint] = []
        with contextlib.suppress(CheckpointError):
            found = [each for each in scan(directory) if each.path.name == mark.folder]
        lacking = [mark.members[number] for each in found for number in each.missing]
        if not lacking or time.monotonic() >= deadline_s:
            return lacking
        time.sleep(POLL_S)


def _laid_out(mark: Mark, snapshot: Snapshot) -> Mark:
    """The mark with the layout of the tensors, which all nodes should have alike."""
    alike = snapshot.manifest.entries[: snapshot.alike]
    rows = [(entry.name, entry.dtype, entry.shape) for entry in alike]
    return msgspec.structs.replace(mark, layout=layout_of(rows))


def _failures(metrics: Mapping[str, tuple[float, float]]) -> dict[int, int]:
    """Parts of the last checkpoint that their nodes could not write, with the errno of each, or 0."""
    told = [(name.removeprefix(NO_PART), n) for name, (n, _) in metrics.items() if name.startswith(NO_PART)]
    return {int(part): int(n) if 0 < n < MAX_ERRNO else 0 for part, n in told if part.isdecimal()}


def _why_silent(last: Mark, gone: Sequence[str], found: Iterable[Checkpoint]) -> str:
    """Why parts of the `last` checkpoint never came, of whose failure nobody has told. `gone`: who left or died."""
    if gone:
        return f"{', '.join(gone)} went before it had written"
    apart = [each.path for each in found if _differs_in_layout(mark_of(each), last)]
    if apart:
        return (
            f"it is in {apart[0]}: all nodes need parameters, optimizer state and buffers of the same shapes"
        )
    return (
        "each node needs the same `every` and the same folder: where machines share no file system, set "
        'copies="whole"'
    )


def _differs_in_layout(found: Mark | None, mark: Mark) -> bool:
    """Does the found checkpoint differ in its layout, and in nothing else?"""
    if found is None or found == mark:
        return False
    return msgspec.structs.replace(found, layout=mark.layout) == mark


def none_of(names: Sequence[str]) -> Collection[int]:
    """For loading all tensors: none is left out."""
    del names
    return ()


def load(chosen: Checkpoint, absent: Callable[[Sequence[str]], Collection[int]] = none_of) -> Arrival:
    """A state, all of it checked, in memory of its own. Raises: CheckpointError that names the file.

    `absent`: by the names of its tensors, the positions of those that are not to be in it.
    """
    opened = open_checkpoint(chosen)
    first, tensors = opened.indexes[0], opened.tensors
    rows = [[tensor.name, tensor.dtype, list(tensor.shape)] for tensor in tensors]
    try:
        manifest = Manifest.from_bytes(plain.encode([first.round, rows, first.plain], "manifest"))
    except MalformedMessage as error:
        raise CheckpointError(f"{chosen.path}: {error}") from None
    sizes = [entry.stop - entry.start for entry in manifest.entries]
    if sizes != [tensor.nbytes for tensor in tensors]:
        raise CheckpointError(f"{chosen.path}: sizes do not match shapes")
    out = frozenset(absent([tensor.name for tensor in tensors]))
    arrival = Arrival(manifest, absent=out)
    for position, data in followed(read_tensors(opened), len(tensors), "tensors loaded", in_pipe=False):
        if position not in out:
            arrival.write(manifest.entries[position].start, data)
    return arrival
