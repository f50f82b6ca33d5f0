"""Manifests: what no node has written is refused, whatever it claims."""

from collections import Counter
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chaosnet.node.state import plain
from chaosnet.node.state.flat_state import (
    Arrival,
    Entry,
    Manifest,
    Snapshot,
    as_bytes,
    gather,
    lay_out,
    merged,
)
from chaosnet.protocols.errors import MalformedMessage

SMALL_MANIFEST = Manifest((), plain.encode({"a": (1, [2.0], Counter("x"))}, "v"), 3).to_bytes()


def test_a_model_without_tensors_is_complete_from_the_start():
    snapshot = Snapshot(Manifest((), b"", 0), {})
    assert Arrival(snapshot.manifest).complete
    assert len(snapshot.slice(0, 0)) == 0


PHASES = torch.randn(3, dtype=torch.complex64)
ALIKE = {
    "scalars": [torch.tensor(1.5), torch.tensor(-0.0), torch.tensor(float("nan"))],
    "narrow, turned": [torch.randn(3, 2).bfloat16().t(), torch.randn(()).bfloat16()],
    "channels last": [torch.randn(1, 3, 2, 2).to(memory_format=torch.channels_last), torch.randn(2)],
    "conjugate": [PHASES.conj(), PHASES],
    "negative": [PHASES.conj().imag, torch.randn(3)],
    "one, negative": [PHASES.conj().imag],
    "bool, empty": [torch.tensor([True, False]), torch.empty(0, dtype=torch.bool)],
    "of two types": [torch.ones(3), torch.ones(3, dtype=torch.int64)],
    "parameters": [torch.nn.Parameter(torch.randn(5)) for _ in range(3)],
    "small and large": [torch.randn(3), torch.randn(50_000), torch.randn(3)],
}


@pytest.mark.parametrize("kind", ALIKE)
def test_many_tensors_gathered_at_once_have_the_bytes_of_each(kind):
    expected = torch.cat([as_bytes(tensor) for tensor in ALIKE[kind]])
    out = torch.zeros(len(expected) + 1, dtype=torch.uint8)
    gather(ALIKE[kind], out)
    assert torch.equal(out[:-1], expected) and not out[-1]


def test_entries_one_behind_the_other_are_one_run_of_bytes():
    entries = [
        Entry("e", "uint8", (b - a,), a, b) for a, b in ((2, 4), (4, 4), (4, 9), (10, 11), (0, 0), (0, 2))
    ]
    assert list(merged(entries)) == [(2, 9), (10, 11), (0, 2)]


def test_a_manifest_is_on_the_wire_what_the_encoder_of_any_data_makes_of_it():
    rows = [("w", "float32", (2, 70_000)), ("für alle", "uint8", ()), ("b", "bool", (0,))]
    manifest = Manifest(tuple(lay_out(rows)), b"plain", 1 << 40)
    fields = [1 << 40, [[name, dtype, list(shape)] for name, dtype, shape in rows], b"plain"]
    assert manifest.to_bytes() == plain.encode(fields, "manifest")
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_layouts_are_alike_exactly_where_the_rows_are():
    rows = [("a", "uint8", (2,)), ("b", "uint8", (3,))]
    others = ([("a", "uint8", (3,)), ("b", "uint8", (2,))], [("b", "uint8", (2,)), ("a", "uint8", (3,))],
              [("a", "int8", (2,)), ("b", "uint8", (3,))], [("a", "uint8", (2, 1)), ("b", "uint8", (3,))],
              [("a' uint8 (2,)\n'b", "uint8", (5,))], rows[:1])  # fmt: skip
    layouts = [Manifest(tuple(lay_out(each)), b"", 0).layout for each in (rows, *others)]
    assert len(set(layouts)) == len(layouts)
    assert Manifest(tuple(lay_out(rows)), b"other", 7).layout == layouts[0]


@settings(max_examples=300)
@given(st.binary(max_size=80))
def test_random_bytes_are_only_ever_malformed(data):
    for parse in (plain.decode, Manifest.from_bytes):
        with suppress(MalformedMessage):
            parse(data)


@settings(max_examples=300)
@given(st.data())
def test_damaged_manifests_are_only_ever_malformed(data):
    damaged = bytearray(SMALL_MANIFEST)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(MalformedMessage):
        manifest = Manifest.from_bytes(bytes(damaged))
        plain.decode(manifest.plain)


@pytest.mark.parametrize(
    "fields",
    [
        [1, [["w", "float32", [2, -1]]], b""],
        [1, [["w", "float32", [1 << 40, 1 << 40]]], b""],
        [1, [["w", "float32", [0, 1 << 40, 1 << 40]]], b""],
        [1, [["w", "uint8", [1 << 50]], ["v", "uint8", [1]]], b""],
        [1, [["w", "no_such_dtype", [2]]], b""],
        [1, [["w", "float32", [True]]], b""],
        [1, [["w", "float32", [1]], ["w", "float32", [1]]], b""],
        [-1, [], b""],
        [True, [], b""],
        {"step": 1},
    ],
)
def test_manifests_that_make_no_sense_are_malformed(fields):
    with pytest.raises(MalformedMessage):
        Manifest.from_bytes(plain.encode(fields, "manifest"))


def test_one_element_of_a_slice_has_bytes_as_any_other():
    value = torch.tensor([1.5, 2.5])[::2]
    assert value.stride() == (2,)
    assert as_bytes(value).numpy().tobytes() == torch.tensor([1.5]).numpy().tobytes()


SMALL = st.lists(
    st.tuples(
        st.sampled_from(["float32", "bfloat16", "uint8"]),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
    ),
    max_size=30,
)


@given(SMALL, st.integers(1, 50))
def test_small_tensors_arrive_in_any_pieces_and_none_overwrites_another(kinds, piece):
    rows = [(f"t{index}", dtype, shape) for index, (dtype, shape) in enumerate(kinds)]
    arrival = Arrival(Manifest(tuple(lay_out(rows)), b"", 1))
    data = bytes(index % 251 for index in range(arrival.manifest.total_bytes))
    for start in reversed(range(0, len(data), piece)):
        arrival.write(start, data[start : start + piece])
    assert arrival.complete
    for tensor, entry in zip(arrival.tensors, arrival.manifest.entries, strict=True):
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{entry.dtype}", entry.shape)
        assert bytes(as_bytes(tensor).numpy()) == data[entry.start : entry.stop]
    assert bytes(arrival.snapshot().slice(0, len(data))) == data
