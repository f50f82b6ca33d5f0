"""Link-local: tensors on their way from the holder of one layer to that of the next."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .fields import Count, Id, Message, ViewKey

MOST_TENSORS, MOST_DIMENSIONS = 64, 16

Shape = Annotated[tuple[Count, ...], Meta(max_length=MOST_DIMENSIONS)]
Row = tuple[Annotated[str, Meta(max_length=32)], Shape]


class Tensor(Message, frozen=True, kw_only=True):
    """Holder to holder, bulk: what enters `layer`, or its gradient, of one micro-batch of a step in a view.

    `way`: "a", activations on the way forward; "g", their gradients on the way back. At the beginning of a step "p",
    parameters, and "s", these and what the optimizer keeps of them: then `layer` is the number of a group of them,
    and `micro_batch` that of one in it. The payload is the tensors' bytes, one behind the other, cut into
    `parts`; `rows` say of what type and shape each is, and whether something trained has made it
    (chaosnet/engines/tensor_bytes.py). Nodes on the way to `target` pass it on.
    """

    key: ViewKey
    step: Count
    target: Id
    way: Literal["a", "g", "p", "s"]
    micro_batch: Count
    layer: Count
    part: Count = 0
    parts: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    rows: Annotated[tuple[Row, ...], Meta(max_length=MOST_TENSORS)] = ()
