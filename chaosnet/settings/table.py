"""Every setting, once: its name in a script, as an option and in the environment, and its default.

From this table come the options of `chaosnet run` (commands/node_options.py) and the checks of what is given
(resolved.py). `Trainer`'s signature, its groups (groups.py), their docstrings and the tables of docs/ repeat
it, as editors and people read those: tests/unit/test_settings.py compares them, and CHAOSNET_REWRITE_TRACES=1 writes
the docstrings and the docs anew.

Nothing here imports torch or a planner, for which --help would have to wait.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import click

from ..callbacks import Callbacks
from ..protocols.errors import ConfigError
from .groups import Checkpoints, Cluster
from .options import (
    Above,
    Address,
    AddressByName,
    Addresses,
    Amount,
    ClusterName,
    Expecting,
    File,
    Folder,
    Function,
    ListenAt,
    Made,
    Name,
    OneOf,
    OneOfOrCallable,
    PeerNames,
    StepEpochOrSamples,
    Switch,
    Whole,
)

MAX_LINKS = 64  # That a joiner may ask for (ScaleOutRequest).
MOST = 10**9
# Named where they are used, too, in modules that take long to import; test_settings.py compares them.
POLICIES = ("packed", "fapt", "single", "ring")
PROBES = ("in-band", "iperf3")
COMPRESSIONS = ("none", "bf16", "int8")
GUARDS = ("skip", "clip", "evict")
ON_DIVERGENCE = ("stop", "heal", "warn")
COPIES = ("shard", "whole")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row.

    Attributes:
        name: The argument of `Trainer`, or of the group that it belongs to; none if `annotation` is "".
        annotation: Its type, as the signature has it.
        check: What may be given; None: what takes it checks it.
        default: What holds if nobody says anything; None: nothing, or what `default_text` says.
        default_text: The default for people, if it is not seen from `default`.
        variable: Of the environment, for what is no matter of the script alone.
        option: Of `chaosnet run`.
        metavar: What the option's help calls the value, if not as `check` does.
        option_help: Instead of `help` in the option's help.
        help: What it means, for people: in the docstring, the option's help and the docs.
        more: What the docs add; Markdown.
    """

    name: str
    annotation: str = ""
    check: Expecting | None = None
    default: Any = None
    default_text: str = ""
    variable: str = ""
    option: str = ""
    metavar: str | None = None
    option_help: str = ""
    help: str
    more: str = ""

    @property
    def signature_default(self) -> Any:
        """What the argument is if the script says nothing: with a variable the environment is asked then."""
        return None if self.variable else self.default

    @property
    def shown_default(self) -> str:
        """For people; "" if it goes without saying."""
        if self.default_text or self.default is None:
            return self.default_text
        if isinstance(self.default, bool):
            return "yes" if self.default else "no"
        return f"{self.default}".removesuffix(".0")

    @property
    def turns_off(self) -> bool:
        """Does the option say no to what is else done?"""
        return self.option.startswith("--no-")

    def of(self, given: Any) -> Any:
        """What holds: what the script gives, else the environment, else the default.

        Raises: ConfigError that names the setting, the value and what was expected.
        """
        blank = isinstance(given, str) and not given and self.name != "join"  # To join nobody is a wish.
        if self.variable and (given is None or blank):
            text = os.environ.get(self.variable)
            return self._checked(self.variable, text, "convert") if text else self.default
        return given if given is self.default else self._checked(self.name, given, "of_script")

    def _checked(self, what: str, value: Any, how: Literal["convert", "of_script"]) -> Any:
        if self.check is None:
            return value
        try:
            return self.check.convert(value, None, None) if how == "convert" else self.check.of_script(value)
        except click.BadParameter as error:
            raise ConfigError(f"{what}: {error.message}") from None


MODEL = (  # What `attach` takes, too; it is checked there.
    Setting(
        name="model", annotation="nn.Module | dict[str, nn.Module] | None",
        help="Any module; all members have the same one. Several: a dictionary by name.",
        more="Or give it to `attach` later",
    ),
    Setting(
        name="optimizer", annotation="Optimizers | None",
        help="Any `torch.optim` over its parameters that steps without a closure (so not LBFGS). Several that "
        "step together, e.g. Muon and AdamW: a list. Several in turn: a dictionary by name; then each `update()` "
        "names the one that it steps, in that order.",
        more="Gradients are dense. [Several models](#several-models-and-optimizers)",
    ),
    Setting(
        name="lr_scheduler", annotation="Any", default_text="none",
        help="Trainer steps it on all nodes alike; the script's own calls of `step()` may stay. "
        "`ReduceLROnPlateau` follows `trainer.mean(loss)`.",
        more="That mean is over all steps since the schedule's last one. [The usual loop](#the-usual-loop). When a "
        "schedule has ended (`OneCycleLR` after its steps, `CosineAnnealingLR` after `T_max`, `PolynomialLR`, or a "
        "rate below 1e-9 of the initial one), Trainer says so once, and the rate stays",
    ),
    Setting(
        name="extra_state", annotation="dict[str, Any] | None", default_text="none",
        help="A dictionary of your own plain data and tensors that joiners receive, in place.",
        more="It is training state: equal on all nodes, compared between them, and changed in `after_step` only. "
        "Keep data of a single node out of it",
    ),
)  # fmt: skip

STEP = (
    Setting(
        name="updates", annotation="tuple[str, ...] | None",
        default_text="the names in the order of the dictionary",
        help='With several optimizers: the order of updates in a round, e.g. ("D", "D", "G"). The same on all nodes.',
        more="[Several models](#several-models-and-optimizers)",
    ),
    Setting(
        name="lr_scheduler_every", annotation="str | int", check=StepEpochOrSamples(), default="step",
        help='When the scheduler is stepped: "step", "epoch" (one of `batches`, by the cluster), "evaluation" (a '
        "loop over `evaluate`), or whenever the cluster has trained so many samples more. The same on all nodes.",
        more="With more nodes an epoch of `batches` has fewer steps, and a `OneCycleLR` over "
        '`epochs * len(loader)` steps never ends: use samples. `"epoch"` is refused with your own loader. '
        'With `"evaluation"` a `ReduceLROnPlateau` follows the mean `loss` of the evaluation, or its only mean. '
        "Joiners and checkpoints get the schedule's position; a run that resumes with another value goes on from it",
    ),
    Setting(
        name="max_grad_norm", annotation="float | None", check=Above(0), default_text="none",
        help="Clip the cluster's mean gradient to this norm before the optimizer steps. The same on all nodes.",
    ),
    Setting(
        name="after_step", annotation="Callable[..., None] | None", check=Function(), default_text="none",
        help="Called on every node after each step of the optimizer, also for the steps that a joiner catches up "
        "with. For whatever else changes the training state at every step, e.g. an average of weights.",
        more="It may take the trainer as its argument: a joiner calls it before `Trainer(...)` has returned "
        "([examples/accumulate.py](../examples/accumulate.py)). `trainer.metrics` already has that step's",
    ),
    Setting(
        name="callbacks", annotation="Callbacks | None", check=Made(Callbacks), default_text="none",
        help="Functions of yours that are called after steps, when state has arrived, and on events of the cluster.",
        more="[Callbacks](#callbacks)",
    ),
    Setting(
        name="on_divergence", annotation="str", check=OneOf(ON_DIVERGENCE), default="stop",
        help="What happens when nodes' training states differ, which is checked at every step: "
        '"stop": all raise `ReplicasDiffer`. "heal": the minority pulls the state anew. "warn": the difference is '
        "printed, and training goes on. The same on all nodes.",
        more="[More](#what-happens-if-it-is-not)",
    ),
    Setting(
        name="seed", annotation="int", check=Whole(), default=0,
        help="Seed of the order in which `batches` deals out samples.",
    ),
    Setting(
        name="same_rng", annotation="bool", check=Switch(), default=False,
        help="All nodes draw the same random numbers in a step. The same on all nodes. Else each node draws its "
        "own, and the founder's generators stay as the script has seeded them.",
        more="[What is equal](#what-is-equal-on-all-nodes)",
    ),
    Setting(
        name="guard", annotation="str | None", check=OneOf(GUARDS), default_text="none",
        help="What to do with a gradient that is not finite, or far larger than usual: "
        '"skip", "clip" or "evict". The same on all nodes.',
        more="[docs/guard.md](guard.md)",
    ),
    Setting(
        name="guard_factor", annotation="float", check=Above(1), default=10.0,
        help='"Far larger" is this many times the median of recent norms.',
    ),
    Setting(name="quiet", annotation="bool", check=Switch(), default=False, help="Print nothing."),
    Setting(
        name="log_format", annotation="str | None", check=OneOf(LOG_FORMATS), default="text",
        variable="CHAOSNET_LOG_FORMAT", option="--log-format",
        option_help="Lines on stderr: text, for people; json, an object per line.",
        help='What this node prints on stderr: "text", lines for people, or "json", an object per line.',
        more="Also `chaosnet run --log-format`, `CHAOSNET_LOG_FORMAT`. [Logs](#logs)",
    ),
    Setting(
        name="summary", annotation="bool", check=Switch(), default=True,
        help="Print what the run has come to when this node leaves.", more="[More](#what-a-run-has-come-to)",
    ),
)  # fmt: skip

GROUPS = (  # What is more often said where a node is started than in its script.
    Setting(
        name="cluster", annotation="Cluster | None", check=Made(Cluster),
        default_text="what `chaosnet run` and the environment say",
        help="How this node meets the others, and what goes over its links.",
        more="[Below](#the-node-and-its-cluster)",
    ),
    Setting(
        name="checkpoints", annotation="Checkpoints | None", check=Made(Checkpoints),
        default_text="what `chaosnet run` and the environment say",
        help="Where and when the state goes to disk, and whether training goes on from there.",
        more="[docs/checkpoints.md](checkpoints.md)",
    ),
    Setting(
        name="dashboard", annotation="int | str | None", check=ListenAt(),
        default_text="no page", variable="CHAOSNET_DASHBOARD", option="--dashboard",
        option_help="Serve the cluster's page, read-only, at this port of 127.0.0.1; 0: any free one.",
        help="Serve the cluster's page and metrics from this process, read-only: a port of 127.0.0.1 (0: any free "
        'one), or "HOST:PORT".',
        more="Also `chaosnet run --dashboard` and `CHAOSNET_DASHBOARD`. [docs/dashboard.md](dashboard.md)",
    ),
)  # fmt: skip

NODE = (  # `Cluster(...)`.
    Setting(
        name="listen", annotation="str | None", check=Address(any_port=True),
        default_text="127.0.0.1:0; with `cluster_name` 0.0.0.0:0", variable="CHAOSNET_LISTEN", option="--listen",
        help="Where others reach this node. Port 0: any free one; host 0.0.0.0: all interfaces.",
    ),
    Setting(
        name="join", annotation="str | None", check=Addresses(), default="",
        default_text="start a cluster", variable="CHAOSNET_JOIN", option="--join",
        help="Addresses of members of the cluster to join, or an invite.",
    ),
    Setting(
        name="join_patience_s", annotation="float | None", check=Amount(0, MOST),
        default_text="10; with `cluster_name` 5", variable="CHAOSNET_JOIN_PATIENCE_S",
        help="How long to try addresses where nobody answers yet.",
        more="Raise it if all machines start at once",
    ),
    Setting(
        name="cluster_name", annotation="str | None", check=ClusterName(),
        default_text="none", variable="CHAOSNET_CLUSTER", option="--cluster", metavar="NAME",
        option_help="Find the cluster of this name on the local network; found it if nobody has. For all nodes.",
        help="Join the nodes of the local network that have the same cluster name; start a cluster if nobody answers "
        "within `join_patience_s`. Give it to all nodes, in any order.",
        more="[On a local network](#on-a-local-network)",
    ),
    Setting(
        name="found", annotation="bool | None", check=Switch(), default=False,
        variable="CHAOSNET_FOUND", option="--found",
        option_help="Start a cluster if --join leads to none; all nodes may say so.",
        help="Start a cluster if none of the addresses of `join` leads into one within `join_patience_s`. All nodes "
        "may have it, and the same `join` with all their addresses: of the nodes that reach each other, the one "
        "named first founds the cluster.",
        more="[One command for all](#one-command-for-all)",
    ),
    Setting(
        name="new", annotation="bool | None", check=Switch(), default=False,
        variable="CHAOSNET_NEW", option="--new",
        help="Start a new cluster, even if the one in which this node last ran at its port may still live.",
    ),
    Setting(
        name="rejoin", annotation="bool | None", check=Switch(), default=True,
        variable="CHAOSNET_REJOIN", option="--no-rejoin",
        option_help="End with an error when the cluster has gone on without this node.",
        help="Come back when the cluster has gone on without this node; else `update()` raises `NodeExpelled`.",
    ),
    Setting(
        name="name", annotation="str | None", check=Name(),
        default_text="the host's name and six digits", variable="CHAOSNET_NAME", option="--name",
        help="Unique in the cluster.",
    ),
    Setting(
        name="neighbors", annotation="int | None", check=Whole(1, MAX_LINKS),
        default=2,  # Any one node or link may fail.
        variable="CHAOSNET_NEIGHBORS", option="--neighbors", metavar="K",
        help="Number of links to ask for, up to 64.",
    ),
    Setting(
        name="links", annotation="tuple[str, ...] | None", check=PeerNames(), default=(),
        default_text="none", variable="CHAOSNET_LINKS", option="--link",
        option_help="A member to link to; may be repeated. Instead of --neighbors.",
        help="Members to link to instead: names or addresses.",
    ),
    Setting(
        name="blocking", annotation="bool | None", check=Switch(), default=False,
        default_text="as suits the links", variable="CHAOSNET_BLOCKING", option="--blocking",
        option_help="Neighbours wait until they have sent the state, whatever suits the links.",
        help="Join as in the Chaos paper: neighbours wait until they have sent the state. Else they train on "
        "meanwhile, unless most of the state is trained and it is there in less than a step (with many members, "
        "in less than a part of one), or results of "
        "their steps would take more than half of this node's links.",
        more="A tenth, if several nodes join at once. They also wait as long as no step is known, and once this node "
        "falls too far behind",
    ),
    Setting(
        name="sync_policy", annotation="str | SyncPolicy | None", check=OneOfOrCallable(POLICIES),
        default="packed", variable="CHAOSNET_POLICY", option="--policy",
        option_help="Trees of the all-reduce, while this node is the scheduler: packed, fapt, single, ring.",
        help='Trees of the all-reduce, while this node is the scheduler: "packed", "fapt", "single", "ring"; in a '
        "script also a callable from the overlay (a networkx graph, edges with `rate_bps` and `rtt_s` where known) "
        "to trees (scheduler/sync_plan.py).",
    ),
    Setting(
        name="compression", annotation="str | None", check=OneOf(COMPRESSIONS), default="none",
        variable="CHAOSNET_COMPRESSION", option="--compression",
        option_help="Gradients on the wire: none (as they are), bf16 (half the bytes), int8 (a quarter).",
        help='Encoding of float32 gradients on the wire: "none" (as they are), "bf16" (half the bytes) or '
        '"int8" (a quarter). The same on all nodes.',
        more="[More](#compression)",
    ),
    Setting(
        name="chunk_bytes", annotation="int | None", check=Whole(8, 32 << 20),
        default_text="a 256th of the gradients, 64 KiB to 2 MiB",
        help="Size of the smallest piece of the gradients that travels by itself. The same on all nodes.",
        more="On fast links several travel together",
    ),
    Setting(
        name="probe", annotation="str | None", check=OneOf(PROBES), default="in-band",
        variable="CHAOSNET_PROBE", option="--probe",
        option_help="How new links are measured: in-band, iperf3.",
        help='How new links are measured: "in-band", "iperf3".',
    ),
    Setting(
        name="key", annotation="str | None", check=File(),
        default_text="that of `chaosnet keygen`, if there is one", variable="CHAOSNET_KEY", option="--key",
        help="File with the key of this node or user.",
        more="[docs/security.md](security.md)",
    ),
    Setting(
        name="allowed_keys", annotation="str | None", check=File(), default_text="none",
        variable="CHAOSNET_ALLOWED_KEYS", option="--allowed-keys",
        help="File with public keys of others that may join, one a line.",
    ),
    Setting(
        name="insecure", annotation="bool | None", check=Switch(), default=False,
        variable="CHAOSNET_INSECURE", option="--insecure",
        help="Use no key: everybody who reaches the port can join.",
    ),
    Setting(
        name="peers_at", check=AddressByName(), default={}, default_text="where they say",
        variable="CHAOSNET_PEERS_AT",
        help="By name: the addresses where this node reaches others, if not those that they announce (a forwarded "
        "port).",
        more="`NAME=HOST:PORT,...`; `NAME=`: it cannot be reached",
    ),
)  # fmt: skip

CHECKPOINTS = (  # `Checkpoints(...)`.
    Setting(
        name="directory", annotation="str | os.PathLike[str] | None", check=Folder(),
        default_text="nowhere", variable="CHAOSNET_CHECKPOINT_DIR", option="--checkpoint-dir",
        help="Write the state there, so that training survives the death of all nodes.",
        more="The same option on every node",
    ),
    Setting(
        name="every", annotation="int | None", check=Whole(1, MOST), default=100,
        variable="CHAOSNET_EVERY", option="--every", metavar="STEPS",
        help="Steps from one checkpoint to the next.",
        more="The same on every node",
    ),
    Setting(
        name="copies", annotation="str | None", check=OneOf(COPIES), default="shard",
        variable="CHAOSNET_CHECKPOINT_COPIES", option="--checkpoint-copies",
        option_help="shard: each node writes a part, to a folder that all share; whole: each writes all of it.",
        help='"shard": each node writes a part, into one folder that all share. "whole": each node writes all of the '
        "state, to a disk of its own.",
        more="[More](#one-shared-directory-or-a-disk-each)",
    ),
    Setting(
        name="kept", annotation="int | None", check=Whole(1, MOST), default=3,
        variable="CHAOSNET_CHECKPOINTS_KEPT",
        help="Number of complete checkpoints to keep.",
        more="More than one, in case the newest is damaged; three, so that with 100 steps from one to the next there "
        "is one from before nodes' states differed (that is found within 128 steps)",
    ),
    Setting(
        name="resume", annotation="bool | None", check=Switch(), default=False,
        variable="CHAOSNET_RESUME", option="--resume",
        option_help="Start the cluster with the newest checkpoint, if there is one.",
        help="Start the cluster with the newest complete checkpoint, if there is any. A joiner gets the state from "
        "the cluster.",
    ),
    Setting(
        name="resume_from", annotation="int | None", check=Whole(0, 10**12),
        variable="CHAOSNET_RESUME_FROM", option="--resume-from", metavar="STEP",
        help="Start with the checkpoint of this step instead.",
        more="Later ones are set aside (renamed `set-aside-...`)",
    ),
)  # fmt: skip

SETTINGS = {setting.name: setting for setting in (*MODEL, *STEP, *GROUPS, *NODE, *CHECKPOINTS)}
