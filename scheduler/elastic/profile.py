"""What a model costs, layer by layer, as a profiler has measured it; and made-up profiles of Llama 2 to plan with.

A profile is plain data in a JSON file:

    {"model": "llama2-7b", "layers": [{"seconds": {"1": [0.011, 0.022], "2": [0.021, 0.042]},
      "parameter_bytes": ..., "gradient_bytes": ..., "optimizer_bytes": ...,
      "activation_bytes": ..., "boundary_bytes": ...}, ...]}

`seconds`: by samples in a micro-batch, [forward, backward] on a worker of speed 1. Bytes of activations and
of the boundary (what the next layer gets) are per sample, the others for the whole layer.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable
from typing import Annotated

import msgspec

from ...protocols.errors import ConfigError, PlanInfeasible

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Samples = Annotated[int, msgspec.Meta(ge=1)]


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer; fields as in the module's docstring."""

    seconds: dict[Samples, tuple[NotNegative, NotNegative]]
    parameter_bytes: NotNegative
    gradient_bytes: NotNegative
    optimizer_bytes: NotNegative
    activation_bytes: NotNegative
    boundary_bytes: NotNegative

    @property
    def static_bytes(self) -> float:
        """m_p + m_g + m_o of Chameleon, Eq. 14."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


class Sums(msgspec.Struct, frozen=True):
    """Of layers [0, l) for every l, so that those of a range are one subtraction."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A model's layers in their order."""

    model: str
    layers: tuple[Layer, ...]

    def seconds(self, start: int, stop: int, samples: float) -> tuple[float, float]:
        """Forward and backward of layers [start, stop) for `samples` at once, on a worker of speed 1.

        Between measured sizes the time is a straight line; beyond them it grows as the last two would have
        it, and with one size only, in proportion.
        """
        sums = self._sums(samples)
        return sums.forward_s[stop] - sums.forward_s[start], sums.backward_s[stop] - sums.backward_s[start]

    def _sums(self, samples: float) -> Sums:
        found = self._sums_by_size.get(samples)
        if found is None:
            times = [_interpolate(layer.seconds, samples) for layer in self.layers]
            found = Sums(_running(f for f, _ in times), _running(b for _, b in times))
            self._sums_by_size[samples] = found
        return found

    @functools.cached_property
    def _sums_by_size(self) -> dict[float, Sums]:
        return {}

    @functools.cached_property
    def static_bytes(self) -> tuple[float, ...]:
        """Parameters, gradients and optimizer state of layers [0, l), for every l."""
        return _running(layer.static_bytes for layer in self.layers)

    @functools.cached_property
    def activation_bytes(self) -> tuple[float, ...]:
        """Kept of one sample between forward and backward by layers [0, l), for every l."""
        return _running(layer.activation_bytes for layer in self.layers)

    @functools.cached_property
    def state_bytes(self) -> tuple[float, ...]:
        """What moves with layers [0, l), for every l: parameters and optimizer state."""
        return _running(layer.parameter_bytes + layer.optimizer_bytes for layer in self.layers)

    def boundary_bytes(self, layer: int) -> float:
        """Of one sample, what enters `layer` (> 0): activations on the way forward, their gradient back."""
        return self.layers[layer - 1].boundary_bytes


def check(profile: Profile) -> None:
    """Raise PlanInfeasible for times that cannot be, in a profile that was not read from a file."""
    for number, layer in enumerate(profile.layers):
        for samples, times in layer.seconds.items():
            if samples < 1 or not all(time >= 0 for time in times):
                forward_s, backward_s = times
                raise PlanInfeasible(
                    f"profile {profile.model}, layer {number}: {forward_s:g} and {backward_s:g} s for {samples}"
                    " samples (expected >= 0 s, of at least 1)"
                )
    if not any(any(times) for layer in profile.layers for times in layer.seconds.values()):
        raise PlanInfeasible(f"profile {profile.model}: no layer takes any time (expected one that does)")


def _running(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(itertools.accumulate(values, initial=0.0))


def _interpolate(seconds: dict[int, tuple[float, float]], samples: float) -> tuple[float, float]:
    if samples in seconds:
        return seconds[int(samples)]
    sizes = sorted(seconds)
    if len(sizes) == 1:
        forward, backward = seconds[sizes[0]]
        return forward * samples / sizes[0], backward * samples / sizes[0]
    upper = min(max(bisect.bisect(sizes, samples), 1), len(sizes) - 1)
    low, high = sizes[upper - 1], sizes[upper]
    share = (samples - low) / (high - low)
    (f0, b0), (f1, b1) = seconds[low], seconds[high]
    return max(f0 + share * (f1 - f0), 0.0), max(b0 + share * (b1 - b0), 0.0)


def read(text: bytes, name: str = "profile") -> Profile:
    """A profile from JSON.

    Raises: ConfigError if that is none; PlanInfeasible for costs that cannot be (a negative time), and where.
    """
    try:
        profile = msgspec.json.decode(text, type=Profile)
    except msgspec.ValidationError as error:
        raise PlanInfeasible(f"{name}: {error}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name}: {error}") from None
    if not profile.layers:
        raise PlanInfeasible(f"{name}: no layers (expected at least one)")
    for number, layer in enumerate(profile.layers):
        if not layer.seconds:
            raise PlanInfeasible(f"{name}: layer {number} has no seconds (expected of at least one size)")
    return profile


def uniform(
    layers: int, forward_s: float, backward_s: float, *, static_bytes: float = 0.0,
    activation_bytes: float = 0.0, boundary_bytes: float = 0.0, model: str = "uniform",
) -> Profile:  # fmt: skip
    """Equal layers, times in proportion to samples; parameters and gradients are 1/6 of `static_bytes` each."""
    layer = Layer(
        {1: (forward_s, backward_s)},
        static_bytes / 6,
        static_bytes / 6,
        static_bytes * 2 / 3,
        activation_bytes,
        boundary_bytes,
    )
    return Profile(model, (layer,) * layers)


# --- Llama 2 ---


class _Shape(msgspec.Struct, frozen=True):
    layers: int
    hidden: int
    feed_forward: int
    key_value: int  # Width of keys and of values: with grouped queries less than `hidden`.


LLAMA2 = {
    "7b": _Shape(32, 4096, 11008, 4096),
    "13b": _Shape(40, 5120, 13824, 5120),
    "34b": _Shape(48, 8192, 22016, 1024),
}


def llama2(
    size: str, *, device_flops: float = 1.6e14, tensor_parallel: int = 1, sequence: int = 4096
) -> Profile:
    """A made-up profile of Llama 2, from its published shape; nothing here was measured.

    Assumed: `device_flops` is what one device gets done (1.6e14: half the bfloat16 peak of an Ascend 910B); a
    layer is its matrices and its attention (2 operations a parameter and token, 4 * hidden * sequence for
    scores and their use, halved as they are causal), a backward two forwards, without recomputation; time
    grows in proportion to samples; tensor parallelism divides all by its degree and costs nothing. Memory: 2
    bytes a parameter and gradient, 12 for Adam (master copy, two moments); 34 * hidden bytes of activations a
    token (Korthikanti et al., without the scores, which flash attention does not keep). Embedding and head
    are left out, as in the papers' layer counts.
    Raises: ConfigError for an unknown size.
    """
    if size not in LLAMA2:
        raise ConfigError(f"llama2: {size!r} (expected one of {', '.join(LLAMA2)})")
    shape = LLAMA2[size]
    attention = 2 * shape.hidden * shape.hidden + 2 * shape.hidden * shape.key_value
    parameters = attention + 3 * shape.hidden * shape.feed_forward
    per_token = 2 * parameters + 4 * shape.hidden * sequence / 2
    forward_s = per_token * sequence / device_flops / tensor_parallel
    layer = Layer(
        seconds={1: (forward_s, 2 * forward_s)},
        parameter_bytes=2 * parameters / tensor_parallel,
        gradient_bytes=2 * parameters / tensor_parallel,
        optimizer_bytes=12 * parameters / tensor_parallel,
        activation_bytes=34 * shape.hidden * sequence / tensor_parallel,
        boundary_bytes=2 * shape.hidden * sequence / tensor_parallel,
    )
    return Profile(f"llama2-{size}", (layer,) * shape.layers)
