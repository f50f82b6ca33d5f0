"""Large memory comes in huge pages, where there are some; and how much of it is free, in a container, too."""

import mmap
import re
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
import torch

from chaosnet.node.memory import HUGE_BYTES, free_bytes, fresh
from chaosnet.node.state.flat_state import NO_MEMORY

SMAPS, HUGE = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage")


@pytest.mark.parametrize("size", [0, 1, HUGE_BYTES - 1, HUGE_BYTES, HUGE_BYTES + 12345])
def test_it_is_as_large_as_was_asked_and_may_be_written(size):
    memory = fresh(size)
    assert memory.dtype == torch.uint8 and memory.shape == (size,)
    memory.fill_(7)
    assert memory.sum() == 7 * size


def test_what_is_too_much_is_an_error_of_those_that_are_expected():
    with pytest.raises(NO_MEMORY):
        fresh(1 << 60)


def test_it_may_hold_any_type():
    for dtype in (torch.float64, torch.complex64, torch.bool, torch.bfloat16):
        assert fresh(HUGE_BYTES).view(dtype).view(2, -1).dtype == dtype


class Asked(mmap.mmap):
    """Notes the sizes of mappings for which the kernel was asked for huge pages."""

    sizes: ClassVar[list[int]] = []

    def madvise(self, option, *where):
        if option == mmap.MADV_HUGEPAGE:
            self.sizes.append(len(self))
        super().madvise(option, *where)


@pytest.mark.skipif(not HUGE.exists(), reason="of a Linux that has huge pages")
def test_the_kernel_is_asked_for_huge_pages_only_if_it_is_large(monkeypatch):
    """Malloc's memory, which a small one is, may have the flag below from others: numpy asks for its large arrays."""
    monkeypatch.setattr(mmap, "mmap", Asked)
    monkeypatch.setattr(Asked, "sizes", [])
    for size in (HUGE_BYTES - 4096, HUGE_BYTES):
        fresh(size)
    assert Asked.sizes == [HUGE_BYTES]


@pytest.mark.skipif(not (SMAPS.exists() and HUGE.exists()), reason="of a Linux that has huge pages")
def test_what_is_large_lies_where_the_kernel_gives_huge_pages():
    """Flag `hg` of the mapping that it lies in."""
    memory = fresh(HUGE_BYTES)
    address, flags = memory.data_ptr(), None
    for line in SMAPS.read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(found[1], 16) <= address < int(found[2], 16)
        elif line.startswith("VmFlags:") and is_here:
            flags = line.split()
    assert "hg" in flags


class Free:
    available = 7


def files(folder, **texts):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def of_cgroups(tmp_path):
    """The free bytes of a process whose /proc/self/cgroup says so."""

    def found(*lines):
        (tmp_path / "own").write_text("".join(f"{line}\n" for line in lines))
        return free_bytes(tmp_path / "cgroups", tmp_path / "own")

    return found


def test_a_container_has_no_more_memory_than_its_limit_and_the_cache_of_files_counts_as_free(
    tmp_path, of_cgroups
):
    stat = "anon 500000\ninactive_file 300000"
    files(tmp_path / "cgroups", memory__max=1_000_000, memory__current=900_000, memory__stat=stat)
    assert of_cgroups("0::/") == 400_000


def test_so_it_is_with_cgroups_of_version_1_whose_path_a_container_may_not_see(tmp_path, of_cgroups):
    files(
        tmp_path / "cgroups" / "memory",
        memory__limit_in_bytes=1_000_000,
        memory__usage_in_bytes=900_000,
        memory__stat="inactive_file 1\ntotal_inactive_file 300000",
    )
    assert of_cgroups("5:cpu,cpuacct:/docker/1", "4:memory:/docker/1", "0::/") == 400_000


def test_of_a_job_within_others_the_tightest_limit_counts(tmp_path, of_cgroups):
    job = tmp_path / "cgroups" / "jobs" / "7"
    files(job, memory__max="max", memory__current=10, memory__stat="inactive_file 0")
    files(job.parent, memory__max=100, memory__current=120, memory__stat="inactive_file 5")
    files(job.parent.parent, memory__max=500, memory__current=120, memory__stat="inactive_file 5")
    assert of_cgroups("0::/jobs/7") == 0


@pytest.mark.parametrize("lines", [(), ("0::/",), ("no line of the kernel",)])
def test_without_a_limit_the_machine_s_memory_counts(monkeypatch, of_cgroups, lines):
    monkeypatch.setattr(psutil, "virtual_memory", Free)
    assert of_cgroups(*lines) == 7


def test_where_there_are_no_control_groups_it_does_too(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", Free)
    assert free_bytes(tmp_path, tmp_path / "none") == 7
