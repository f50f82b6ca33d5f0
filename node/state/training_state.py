"""All that a joiner must receive to train on as if it had always been there, taken from a run's live objects.

The tensors become one flat run of bytes (flat_state.py). Beside it goes a plain part (plain.py): hyperparameters,
LR scheduler, counters, random generators, and what refers to which tensor. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from ...protocols.errors import ConfigError, MalformedMessage
from ..collector import held_off
from ..devices import Moment, accelerators
from ..memory import fresh
from . import plain
from .flat_state import (
    DTYPES,
    SMALL_BYTES,
    Arrival,
    Capture,
    Entry,
    FrozenTensor,
    Manifest,
    Row,
    Snapshot,
    as_bytes,
    dtype_name,
    gather,
    lay_out,
    merged,
    row_of,
)
from .generators import get_generators, set_generators
from .optimizer_loading import EXECUTION, load_optimizer
from .plain import TensorTable
from .trainable import buffer_slots, check_optimizer, check_parameter, is_read_only

Spec = tuple[Row, ...]

# While the training thread waits for a joiner, tensors of this size or more are sent from where they lie. Smaller
# ones are copied together: a piece of the state would else be joined from many parts.
HELD_BYTES = 64 << 10
MANY = 1000  # Of small tensors. Their copying is mostly calls that hold the GIL: no gain in another thread.


class TrainingState:
    """The live objects of one training run, as something to copy, ship and compare.

    Buffers registered with persistent=False are caches: a joiner gets them too, but they are neither compared
    nor hashed, and may differ in shape.
    Args:
        optimizer: Any torch.optim optimizer over parameters of `model`.
        lr_scheduler: Anything with torch's state_dict() and load_state_dict(); None for none.
        extra_state: A dict of plain data and tensors of the user's own. A joiner's is filled in place: the
            dict, the dicts and lists in it, and tensors of unchanged shape stay the same objects.
        terms: What else all nodes must have set alike: rows of `spec`, by name.
    Raises: ConfigError for what cannot be shipped, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any = None,
        extra_state: dict[Any, Any] | None = None,
        terms: Mapping[str, str] | None = None,
    ) -> None:
        self.model = model
        self.terms = terms or {}
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.extra_state = extra_state
        if not isinstance(extra_state, dict | None):
            raise ConfigError(f"extra_state: {type(extra_state).__name__} (expected a dictionary)")
        for name, parameter in model.named_parameters():
            check_parameter(name, parameter)
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                raise ConfigError(
                    f"{name!r} has max_norm={module.max_norm}: forward would change rows on this node alone "
                    "(expected None; clip its weights at every step instead)"
                )
        self._check_optimizer()
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._in_place: dict[str, FrozenTensor] = {}
        self.parted: Collection[nn.Parameter] = ()  # Kept by some members only: not sent to joiners.
        # Has the script changed what only optimizer.step() should? Then all is copied at the step boundary.
        self._at_once = False
        self._order = self._find_order()
        self._spec = self._make_spec()  # Once: a script may freeze and thaw parameters as it goes.
        self._sections(TensorTable(), canonical=False)  # To refuse now what the first join would refuse.

    def _check_optimizer(self) -> None:
        check_optimizer(self.optimizer)
        known = {id(parameter) for parameter in self.model.parameters()}
        for number, group in enumerate(self.optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise ConfigError(
                        f"optimizer.param_groups[{number}]['params'][{index}], of shape "
                        f"{list(parameter.shape)}, is no parameter of the model, so nobody would average it; "
                        "make it part of the model"
                    )

    # --- what the state is made of ---

    def _make_spec(self) -> Spec:
        spec: list[Row] = []
        for name, parameter in self.model.named_parameters():
            dtype = dtype_name(parameter) if parameter.requires_grad else f"frozen {dtype_name(parameter)}"
            spec.append((name, dtype, tuple(parameter.shape)))
        for slot in buffer_slots(self.model):
            if slot.persistent and slot.tensor is not None:
                spec.append(row_of(slot.name, slot.tensor))
        for name, _, _ in spec:
            _check_name(name)
        groups = tuple(len(group["params"]) for group in self.optimizer.param_groups)
        spec.append(("optimizer", _kind(self.optimizer) + self._order, groups))
        for part, value in (("lr_scheduler", self.lr_scheduler), ("extra_state", self.extra_state)):
            spec.append((part, _kind(value), ()))
        spec += [(name, value, ()) for name, value in sorted(self.terms.items())]
        return tuple(spec)

    def spec(self) -> Spec:
        """What must be the same on every node: (name, dtype, shape) of each parameter and persistent buffer.

        The dtype of a parameter that had requires_grad=False at the start reads "frozen float32". Three rows
        more hold the type of the optimizer, with the sizes of its parameter groups and the order of what is in
        them, of the LR scheduler and of extra_state; then comes one for each of `terms`.
        """
        return self._spec

    def spec_digest(self) -> str:
        """The spec in 32 hex digits."""
        return xxhash.xxh3_128_hexdigest(plain.encode(self._spec, "spec"))

    def state_bytes(self) -> int:
        """Bytes of the tensors that a joiner would be sent now; an optimizer may add some at its first step."""
        table = TensorTable()
        self._sections(table, canonical=False, without=self.parted)
        return sum(tensor.nbytes for tensor in table.tensors)

    def layer_bytes(self) -> tuple[int, int]:
        """Bytes of the smallest and the largest parameter: where the paper's Algorithm 1 starts looking."""
        sizes = [parameter.nbytes for parameter in self.model.parameters() if parameter.numel()]
        return (min(sizes), max(sizes)) if sizes else (0, 0)

    def _sections(
        self, table: TensorTable, *, canonical: bool, without: Collection[nn.Parameter] = ()
    ) -> tuple[dict[str, bytes], int, int]:
        """Every part of the state but RNG and runtime, encoded; `table` gets the tensors, in flat order.

        Args:
            canonical: For hashing: dicts sorted, and without what may differ between nodes.
            without: Parameters to leave out, with the optimizer's state of them.
        Returns: (encoded sections, only_stepped, alike). Of `table`, the first `only_stepped` tensors change only in
            optimizer.step(), and the first `alike` are the same on all nodes.
        """
        state = self.optimizer.state_dict()
        out = {*without}
        parameters = {name: p for name, p in self.model.named_parameters() if p not in out}
        for name, parameter in parameters.items():
            table.add(parameter, name)
        by_index = dict(state["state"])
        if self.parted:  # Each node's optimizer has met parameters in an order of its own.
            left_out = self._indices_of(without)
            by_index = {
                index: by_index[index] for index in sorted(by_index, key=_turn) if index not in left_out
            }
        sections = {
            "parameters": plain.encode(parameters, "parameters", table),
            "optimizer.state": plain.encode(by_index, "optimizer.state", table, canonical=canonical),
        }
        only_stepped = len(table.tensors)
        buffers: dict[str, torch.Tensor | None] = {}
        alike = only_stepped
        for slot in sorted(buffer_slots(self.model), key=lambda slot: not slot.persistent):  # Caches last.
            if canonical and not slot.persistent:
                break
            assert slot.tensor is not None
            table.add(slot.tensor, slot.name)
            buffers[slot.name] = slot.tensor
            if slot.persistent:
                alike = len(table.tensors)
        rest = {
            "buffers": buffers,
            "optimizer": _settings(state, EXECUTION if canonical else frozenset()),
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
            "extra_state": self.extra_state,
            "kinds": self._kinds() if canonical else {**self._kinds(), "order": self._order},
        }
        for name, part in rest.items():
            sections[name] = plain.encode(part, name, table, canonical=canonical)
        return sections, only_stepped, alike

    def _indices_of(self, parameters: Collection[nn.Parameter]) -> set[int]:
        """The indices of these in the optimizer's state_dict(), which counts through its groups."""
        wanted = {*parameters}
        counted = enumerate(p for group in self.optimizer.param_groups for p in group["params"])
        return {index for index, parameter in counted if parameter in wanted}

    def _kinds(self) -> dict[str, str]:
        """The types that the state belongs to: an SGD's would load into an Adam, and fail at its next step."""
        return {"optimizer": _kind(self.optimizer), "lr_scheduler": _kind(self.lr_scheduler)}

    def _find_order(self) -> str:
        """The order of parameters in the optimizer's groups, by which it numbers its state; "" if as in the model."""
        index_of = {id(parameter): index for index, parameter in enumerate(self.model.parameters())}
        order = [index_of[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        if order == list(range(len(index_of))):
            return ""
        digest = xxhash.xxh3_64_hexdigest(plain.encode(order, "order"))
        return f" with parameters in an order of its own ({digest})"

    # --- copying it ---

    def watch(self) -> None:
        """From now on send frozen parameters from where they lie, each as long as its hashes show no change."""
        self._in_place = {
            name: FrozenTensor(name, parameter)
            for name, parameter in self._frozen.items()
            if parameter.device.type == "cpu"
            and parameter.is_contiguous()
            and as_bytes(parameter).data_ptr() == parameter.data_ptr()  # Not so of one element of a slice.
        }

    @held_off()
    def begin_capture(
        self,
        step: int,
        runtime: dict[Any, Any],
        only: Callable[[Sequence[Entry], int], Collection[int]] | None = None,
        for_joiner: bool = False,
        held: bool = False,
    ) -> Capture:
        """Start a snapshot of the state after `step` steps; call it between steps.

        Args:
            runtime: The caller's own plain data, e.g. the data cursor; `load` returns it.
            only: Called with all tensors, and how many of them (the first) are alike on all nodes. Returns: the
                indices of those to copy. Default: all.
            for_joiner: Leave out `parted` parameters.
            held: The training thread waits until all has been sent, so large tensors on the CPU are not copied.
        Returns: a Capture; someone has to call its `run`, and its `wait` before optimizer.step().
        Raises: ConfigError if the user's state holds what cannot be shipped.
        """
        table = TensorTable()
        without = self.parted if for_joiner else ()
        sections, only_stepped, alike = self._sections(table, canonical=False, without=without)
        if any(each.changed for each in self._in_place.values()):
            self._in_place = {}  # If the script changes one frozen parameter, it likely changes them all.
        sections["rng"] = plain.encode(get_generators(self.accelerators()), "rng")
        sections["runtime"] = plain.encode(runtime, "runtime")
        rows = map(row_of, table.names, table.tensors)
        manifest = Manifest(tuple(lay_out(rows)), plain.encode(sections, "state"), step)
        sizes = [entry.stop - entry.start for entry in manifest.entries]
        wanted = range(len(sizes)) if only is None else sorted(only(manifest.entries, alike))
        parts: dict[int, np.ndarray | FrozenTensor] = {}
        late, now = list[int](), list[int]()
        for index in wanted:
            name = table.names[index]
            if not sizes[index]:
                continue
            if frozen := self._sent_in_place(name):
                parts[manifest.entries[index].start] = frozen
            elif index < only_stepped and name not in self._frozen and not self._at_once:
                tensor = table.tensors[index]
                if held and sizes[index] >= HELD_BYTES and tensor.device.type == "cpu":
                    parts[manifest.entries[index].start] = as_bytes(tensor).numpy()
                else:
                    late.append(index)
            else:
                now.append(index)
        if len(late) >= MANY and sum(sizes[index] for index in late) < SMALL_BYTES * len(late):
            late, now = [], sorted(late + now)  # See MANY.
        late_bytes = sum(sizes[index] for index in late)
        copied = fresh(late_bytes + sum(sizes[index] for index in now))
        offset, data = 0, copied.numpy()
        for start, stop in merged(manifest.entries[index] for index in late + now):
            parts[start] = data[offset : offset + stop - start]
            offset += stop - start
        if now:
            gather([table.tensors[index] for index in now], copied[late_bytes:])
        snapshot = Snapshot(manifest, parts, alike)
        lying = [table.tensors[index] for index in late]
        # Only the caller keeps it, as it is as large as the state.
        return Capture(snapshot, lying, copied, Moment(accelerators(lying)), self._copy_at_once)

    def _copy_at_once(self) -> None:
        self._at_once = True

    def _sent_in_place(self, name: str) -> FrozenTensor | None:
        """The parameter of that name, if it is frozen, and has not been given other memory."""
        frozen = self._in_place.get(name)
        return frozen if frozen is not None and frozen.address == self._frozen[name].data_ptr() else None

    @torch.no_grad()
    def load(self, arrival: Arrival, without: Collection[nn.Parameter] = ()) -> dict[Any, Any]:
        """Become the state in `arrival`, whose tensors must not be used any more; random generators included.

        Parameters, buffers and `extra_state` are overwritten in place. The optimizer's state is replaced.
        `without`: parameters that stay as they are, and without state in the optimizer.
        Returns: the `runtime` given to `begin_capture`.
        Raises: ConfigError if it is the state of another kind of run than ours, MalformedMessage if it is
            none. Nothing of ours has changed then, but parameters that the state has arrived in (`places`).
        """
        assert arrival.complete, f"bytes {arrival.missing[:3]} have not arrived"
        sections = plain.decode(arrival.manifest.plain)
        if not isinstance(sections, dict) or set(sections) != _SECTIONS:
            raise MalformedMessage("the plain part of the state has other sections than ours")
        parts = {name: plain.decode(section, arrival.tensors) for name, section in sections.items()}
        try:
            difference = self._difference(parts)
        except (AttributeError, KeyError, TypeError) as error:
            raise MalformedMessage(f"no training state: {type(error).__name__}: {error}") from error
        if difference is not None:
            raise ConfigError(difference)
        out, left_out = {*without}, self._indices_of(without)
        names = {name for name, parameter in self.model.named_parameters() if parameter in out}
        values = {name: value for name, value in parts["parameters"].items() if name not in names}
        known = {index: value for index, value in parts["optimizer.state"].items() if index not in left_out}
        self._load_model(values, parts["buffers"])
        if self.lr_scheduler is not None:  # Before the optimizer: a scheduler may touch it when it loads.
            self.lr_scheduler.load_state_dict(parts["lr_scheduler"])
        load_optimizer(self.optimizer, known, parts["optimizer"])
        if self.extra_state is not None:
            _restore(self.extra_state, parts["extra_state"])
        set_generators(parts["rng"], self.accelerators())
        return parts["runtime"]

    def _difference(self, parts: dict[str, Any]) -> str | None:
        """What in the decoded `parts` does not fit our own objects, for a person to read; None if all fits."""
        parted = {id(parameter) for parameter in self.parted}
        if any(name in parts["parameters"] for name, p in self.model.named_parameters() if id(p) in parted):
            parted = set()  # It is a checkpoint, which has all parameters.
        ours = [row_of(name, p) for name, p in self.model.named_parameters() if id(p) not in parted]
        theirs = [row_of(*named) for named in parts["parameters"].items()]
        for slot in buffer_slots(self.model):
            if slot.persistent and slot.tensor is not None:
                ours.append(row_of(slot.name, slot.tensor))
                if slot.name in parts["buffers"]:
                    theirs.append(row_of(slot.name, parts["buffers"][slot.name]))
        mine = {**self._kinds(), "order": self._order} if "order" in parts["kinds"] else self._kinds()
        for rows, kinds, groups, extra_state in (
            (ours, mine, self.optimizer.param_groups, self.extra_state),
            (theirs, parts["kinds"], parts["optimizer"]["param_groups"], parts["extra_state"]),
        ):
            kind = kinds["optimizer"] + kinds.get("order", "")
            rows.append(("optimizer", kind, tuple(len(group["params"]) for group in groups)))
            rows.append(("lr_scheduler", kinds["lr_scheduler"], ()))
            rows.append(("extra_state", "None" if extra_state is None else "given", ()))
        return first_difference(tuple(ours), tuple(theirs))

    def places(self) -> dict[str, torch.Tensor]:
        """By name, parameters into which a state may arrive directly; they are lost if it arrives only in part."""
        named = self.model.named_parameters()
        return {name: p.detach() for name, p in named if p.device.type == "cpu" and p.is_contiguous()}

    def _load_model(self, parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            if name in parameters and parameter.data_ptr() != parameters[name].data_ptr():
                parameter.copy_(parameters[name])
        for slot in buffer_slots(self.model):
            mine, theirs = slot.tensor, buffers.get(slot.name)
            if mine is None or theirs is None:
                continue
            fits = mine.shape == theirs.shape and mine.dtype == theirs.dtype
            if fits and not is_read_only(mine):  # As caches may be.
                mine.copy_(theirs)
            else:
                slot.module._buffers[slot.key] = theirs.to(mine.device)

    # --- comparing it ---

    @torch.no_grad()
    def state_hash(self) -> str:
        """32 hex digits, the same on two nodes if and only if their states are, to the bit.

        Covers all of the state but random generators, `runtime` and non-persistent buffers.
        """
        table = TensorTable()
        sections, _, _ = self._sections(table, canonical=True)
        digest = xxhash.xxh3_128(plain.encode(sections, "state"))
        rows = list(map(row_of, table.names, table.tensors))
        digest.update(plain.encode(rows, "tensors"))
        for tensor in table.tensors:
            digest.update(as_bytes(tensor).cpu().numpy().data)
        return digest.hexdigest()

    def accelerators(self) -> tuple[torch.device, ...]:
        """The accelerators that the model lies on: forward draws from their random generators, too."""
        return accelerators(self.model.parameters())


_SECTIONS = {
    "parameters", "optimizer.state", "buffers", "optimizer", "lr_scheduler", "extra_state", "kinds", "rng", "runtime",
}  # fmt: skip


def _turn(key: Any) -> tuple[bool, Any]:
    """What to sort an optimizer's state by: parameters by their index, then what it keeps under other names."""
    return (False, key) if isinstance(key, int) else (True, repr(key))


def _settings(state: dict[str, Any], without: Collection[str]) -> dict[str, Any]:
    """An optimizer's state_dict without the state of parameters, and without these keys of its groups."""
    groups = [{key: group[key] for key in group if key not in without} for group in state["param_groups"]]
    return {**{key: value for key, value in state.items() if key != "state"}, "param_groups": groups}


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name!r} of the model: {error.reason} (expected a name of Unicode letters)"
        ) from None


def first_difference(ours: Spec, theirs: Spec) -> str | None:
    """What keeps two nodes from training together, for a person to read; None if nothing does.

    For example: "'fc.weight' is float32 [10, 84] here, float32 [10, 80] there".
    """
    for mine, other in zip(ours, theirs, strict=False):
        if mine == other:
            continue
        if mine[0] == other[0]:
            return f"{mine[0]!r} is {_describe(mine)} here, {_describe(other)} there"
        break
    our_names, their_names = {row[0] for row in ours}, {row[0] for row in theirs}
    for row in ours:
        if row[0] not in their_names:
            return f"{row[0]!r} is {_describe(row)} here, absent there"
    for row in theirs:
        if row[0] not in our_names:
            return f"{row[0]!r} is absent here, {_describe(row)} there"
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine[0] != other[0]:
            return f"tensor {index} is {mine[0]!r} here, {other[0]!r} there"
    return None


def _describe(row: Row) -> str:
    return f"{row[1]} {list(row[2])}" if row[2] or row[1] in DTYPES else row[1]


def _kind(value: Any) -> str:
    """The name of its type, with those of LR schedulers inside it: "SequentialLR of LinearLR, StepLR"."""
    name, inner = type(value).__name__, getattr(value, "_schedulers", None)
    if isinstance(inner, list | tuple):
        return f"{name} of {', '.join(map(_kind, inner))}"
    return "None" if value is None else name


def _restore(mine: Any, theirs: Any) -> Any:
    """`theirs`, in the containers and tensors of `mine` where they fit, so that references to them hold."""
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if mine.shape == theirs.shape and mine.dtype == theirs.dtype and not is_read_only(mine):
            mine.copy_(theirs)
            return mine
        return theirs.to(mine.device)
    if type(mine) is type(theirs) and isinstance(mine, dict):
        merged = {key: _restore(mine.get(key), value) for key, value in theirs.items()}
        mine.clear()
        mine.update(merged)
        return mine
    if type(mine) is type(theirs) and isinstance(mine, list):
        mine[:] = [_restore(mine[i] if i < len(mine) else None, value) for i, value in enumerate(theirs)]
        return mine
    return theirs
