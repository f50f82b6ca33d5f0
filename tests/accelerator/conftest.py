"""The device that these tests run on: torch's accelerator, or with CHAOSNET_TEST_DEVICE=sham one that is none.

They have a process of their own: where the sham device is loaded, `torch.accelerator` finds it ever after.
"""

import os
from pathlib import Path

import pytest
import sham
import torch

NONE = "torch.accelerator finds no device (CHAOSNET_TEST_DEVICE=sham takes one that only behaves like one)"
HERE = Path(__file__).parent
WANTS_SHAM = os.environ.get("CHAOSNET_TEST_DEVICE") == sham.NAME


def missing():
    """Why these tests cannot run here, as a sentence; None if they can."""
    if WANTS_SHAM:
        return sham.missing()
    return None if torch.accelerator.is_available() else NONE


def pytest_collection_modifyitems(config, items):
    """Without a device there is one sentence, and not one for each test."""
    if missing() and (ours := [item for item in items if HERE in item.path.parents]):
        items[:] = [item for item in items if item not in ours]
        config.hook.pytest_deselected(items=ours)


def pytest_terminal_summary(terminalreporter):
    if reason := missing():
        terminalreporter.write_line(f"tests/accelerator were skipped: {reason}")


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and missing():
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(scope="session")
def device():
    """The first device."""
    if WANTS_SHAM:
        return sham.load()
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, 0)


@pytest.fixture
def last_device(device):
    """The last one: another than that of now, where there are several."""
    return torch.device(device.type, torch.accelerator.device_count() - 1)


@pytest.fixture
def only_sham(device):
    """For what only the sham device tells."""
    if device.type != sham.NAME:
        pytest.skip("of the sham device only")


@pytest.fixture(autouse=True)
def nothing_to_complain_of(device):
    """Whatever a test does, the sham device has seen no race."""
    yield
    if device.type == sham.NAME:
        assert sham.complaints() == []
