"""Plain data survives the way to another node, and what would not is refused by name."""

import math
from collections import Counter, OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chaosnet.node.state import plain
from chaosnet.protocols.errors import ConfigError, MalformedMessage

keys = st.recursive(
    st.text() | st.integers() | st.floats(allow_nan=False) | st.booleans(),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
plain_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
    ),
)


def same(a, b):
    """Equal, and of equal types all the way down."""
    return a == b and repr(a) == repr(b)


@given(plain_data)
def test_plain_data_comes_back_as_it_was(value):
    assert same(plain.decode(plain.encode(value, "value")), value)


def test_special_floats_and_tensors_come_back():
    table, tensor = plain.TensorTable(), torch.ones(2)
    data = plain.encode([math.nan, -math.inf, -0.0, tensor, {"again": tensor}, "\ud800"], "value", table)
    nan, inf, zero, first, again, surrogate = plain.decode(data, table.tensors)
    assert math.isnan(nan) and inf == -math.inf and math.copysign(1, zero) == -1 and surrogate == "\ud800"
    assert first is again["again"] is tensor
    assert table.names == ["value[3]"]


def test_numbers_of_numpy_come_back_as_those_of_python():
    value = [np.float32(0.5), np.float64(0.5), np.int64(3), np.bool_(True)]
    assert same(plain.decode(plain.encode(value, "value")), [0.5, 0.5, 3, True])


def test_what_would_not_fit_into_a_frame_is_refused():
    with pytest.raises(ConfigError, match=r"history takes \d+ bytes; at most 62914560 fit"):
        plain.encode(["x" * (1 << 20)] * 60, "history")


def test_data_that_contains_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="nested"):
        plain.encode(loop, "loop")


def test_the_deepest_data_allowed_comes_back():
    value = ()
    for _ in range(plain.MAX_DEPTH - 1):
        value = (value,)
    assert plain.decode(plain.encode(value, "value")) == value


def test_keys_and_enums_that_would_not_come_back_are_refused():
    with pytest.raises(ConfigError, match="a NoneType; expected str"):
        plain.encode({None: 1}, "value")
    with pytest.raises(ConfigError, match="value is a set"):
        plain.encode({1, 2}, "value")


def test_a_named_tuple_which_would_come_back_as_a_plain_one_is_refused_by_its_place():
    pair = namedtuple("Pair", "a b")(1, torch.zeros(2))
    for value, place in ((pair, "value"), ({"x": [pair]}, r"value\['x'\]\[0\]")):
        with pytest.raises(ConfigError, match=rf"^{place} is a \S+\.Pair; expected plain data"):
            plain.encode(value, "value", plain.TensorTable())


def test_a_huge_claim_in_few_bytes_costs_nothing():
    for claim in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
        with pytest.raises(MalformedMessage):
            plain.decode(claim * 30)
