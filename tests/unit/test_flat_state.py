"""Manifests: what no node has written is refused, whatever it claims."""

from collections import Counter
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chaosnet.node import plain
from chaosnet.node.flat_state import Arrival, Manifest, Snapshot
from chaosnet.protocols.errors import MalformedMessage

SMALL_MANIFEST = Manifest((), plain.encode({"a": (1, [2.0], Counter("x"))}, "v"), 3).to_bytes()


def test_a_model_without_tensors_is_complete_from_the_start():
    snapshot = Snapshot(Manifest((), b"", 0), {})
    assert Arrival(snapshot.manifest).complete
    assert len(snapshot.slice(0, 0)) == 0


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
