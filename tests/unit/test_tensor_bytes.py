"""`chaosnet.engines.tensor_bytes`: tensors on the wire."""

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch

from chaosnet.engines.tensor_bytes import PART_BYTES, check, cut, joined, moved
from chaosnet.protocols.errors import ConfigError, MalformedMessage
from chaosnet.protocols.messages import Tensor


class Hidden(NamedTuple):
    state: torch.Tensor
    memory: object


def over_the_wire(value):
    rows, parts = cut(value)
    messages = [
        Tensor(
            key=(1, 1), step=0, target="b", way="a", micro_batch=0, layer=1, part=index, parts=len(parts), rows=rows
        )
        for index in range(len(parts))
    ]  # fmt: skip
    return joined([(message, bytes(part)) for message, part in zip(messages, parts, strict=True)])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4), torch.randn(3, 4).t(), torch.arange(5), torch.tensor(True), torch.empty(0, 3),
        torch.randn(7).to(torch.bfloat16), torch.randn(PART_BYTES // 2 + 3),
    ],
    ids=["matrix", "transposed", "integers", "scalar", "empty", "bfloat16", "larger than a part"],
)  # fmt: skip
def test_a_tensor_comes_as_it_was(tensor):
    came = over_the_wire(tensor)
    assert came.dtype == tensor.dtype and torch.equal(came, tensor)


def test_a_tuple_comes_as_a_tuple_also_of_one():
    first, second = torch.randn(2, 2), torch.arange(3)
    came = over_the_wire((first, second))
    assert isinstance(came, tuple) and torch.equal(came[0], first) and torch.equal(came[1], second)
    assert isinstance(over_the_wire((first,)), tuple)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({"hidden": torch.zeros(1)}, "layer 3 gives dict"),
        ([torch.zeros(1)], "layer 3 gives list"),
        ((torch.zeros(1), (torch.zeros(1),)), "layer 3 gives tuple within a tuple"),
        (torch.eye(2).to_sparse(), "layer 3 gives a tensor of layout torch.sparse_coo"),
        (torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]), "layer 3 gives a nested tensor"),
        (Hidden(torch.zeros(1), torch.zeros(1)), "layer 3 gives Hidden, no plain tuple"),
        (torch.zeros(2, 2).max(1), "layer 3 gives max, no plain tuple"),
        ((torch.zeros(1),) * 65, "layer 3 gives 65 tensors"),
        (torch.zeros((1,) * 17), "layer 3 gives 17 dimensions"),
    ],
    ids=["dict", "list", "nested", "sparse", "ragged", "named", "of torch", "many", "deep"],
)
def test_what_no_message_holds_is_refused_by_its_layer(value, names):
    with pytest.raises(ConfigError, match=names):
        check(value, 3)


def test_targets_in_a_dictionary_are_moved_to_the_device_as_well():
    """They stayed where the data set had them, and a loss on an accelerator failed over them."""
    here = {"y": torch.zeros(2), "more": [torch.zeros(1), "text"]}
    there = moved(here, torch.device("meta"))
    assert there["y"].is_meta and there["more"][0].is_meta and there["more"][1] == "text"
    assert not here["y"].is_meta


def test_targets_keep_their_class():
    """The loss got a plain tuple of a named one, and an OrderedDict stayed where the data set had it."""
    here = Hidden(torch.zeros(2), OrderedDict(y=torch.zeros(1)))
    there = moved(here, torch.device("meta"))
    assert type(there) is Hidden and there.state.is_meta
    assert type(there.memory) is OrderedDict and there.memory["y"].is_meta
    assert not here.memory["y"].is_meta


@pytest.mark.parametrize("rows", [(("float32", (9,)),), (("no such type", (1,)),)])
def test_rows_that_do_not_fit_the_bytes_are_malformed(rows):
    message = Tensor(key=(1, 1), step=0, target="b", way="a", micro_batch=0, layer=1, rows=rows)
    with pytest.raises(MalformedMessage):
        joined([(message, bytes(8))])
