"""`chaosnet.protocols.sentences`: what happens, in words."""

import pytest

from chaosnet.protocols.sentences import lasting


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0 s"), (0.0004, "0 ms"), (0.3, "300 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (1.24, "1.2 s"),
        (9.96, "10 s"), (42.4, "42 s"), (99.4, "99 s"), (99.6, "1 min 40 s"), (200, "3 min 20 s"),
        (599.6, "10 min"), (3569, "59 min"), (3599, "1 h"), (3900, "1 h 05 min"), (40_000, "11 h"),
        (169_000, "47 h"), (7 * 86_400, "7 days"),
    ],
)  # fmt: skip
def test_a_duration_is_told_everywhere_in_the_same_way(seconds, told):
    """The status, the summary of a run and the line on who comes last each had another way."""
    assert lasting(seconds) == told
