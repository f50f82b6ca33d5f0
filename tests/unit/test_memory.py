"""Large memory that is written once comes in huge pages, where there are some."""

import mmap
import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from chaosnet.node.memory import HUGE_BYTES, fresh
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
