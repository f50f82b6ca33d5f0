"""Large memory that is written once comes in huge pages, where there are some."""

import re
from pathlib import Path

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


@pytest.mark.skipif(not (SMAPS.exists() and HUGE.exists()), reason="of a Linux that has huge pages")
@pytest.mark.parametrize(("size", "huge"), [(HUGE_BYTES, True), (HUGE_BYTES - 4096, False)])
def test_the_kernel_is_asked_for_huge_pages_only_if_it_is_large(size, huge):
    """Flag `hg` of the mapping that it lies in."""
    memory = fresh(size)
    address, flags = memory.data_ptr(), None
    for line in SMAPS.read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(found[1], 16) <= address < int(found[2], 16)
        elif line.startswith("VmFlags:") and is_here:
            flags = line.split()
    assert ("hg" in flags) == huge
