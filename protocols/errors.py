"""Every error a caller may want to treat differently from the others."""

REASON_CHARACTERS = 200  # Less than MAX_REASON of a message.


class ChaosnetError(Exception):
    """Parent of everything chaosnet raises on purpose.

    Attributes:
        lasting: The same start would lead to the same error, until a person has changed something.
    """

    lasting: bool = False


class ConfigError(ChaosnetError):
    """A setting, option or model that cannot work; the text names it, its value and what was expected."""

    lasting = True


class CannotListen(ConfigError):
    """An address at which this machine cannot listen just now: another process may end, or an interface come up."""

    lasting = False


class ProtocolError(ChaosnetError):
    """Somebody broke the rules of a negotiation."""


class LocalProtocolError(ProtocolError):
    """We did: a bug here, so stop."""


class RemoteProtocolError(ProtocolError):
    """A peer did: drop the message and count it."""


class MalformedMessage(RemoteProtocolError):
    """Bytes that are no message of ours."""


class VersionMismatch(RemoteProtocolError):
    """A peer speaks another version of the protocol."""


class PeerUnreachable(ChaosnetError):
    """Nobody answers at an address."""


class PlanInfeasible(ChaosnetError):
    """No plan satisfies the constraints; the text says which one failed."""


class ScaleOutFailed(ChaosnetError):
    """This node could not join the cluster; the text says why. `lasting`: it is not wanted there, as it is."""

    def __init__(self, text: str, lasting: bool = False) -> None:
        super().__init__(text)
        self.lasting = lasting


class CheckpointError(ChaosnetError):
    """A checkpoint cannot be written, read or found; the text names the file and what is wrong with it."""


class NodeExpelled(ChaosnetError):
    """The cluster went on without this node (it was silent for too long, or cut off)."""


class ReplicasDiffer(ChaosnetError):
    """Nodes' training states differ; the text names the first difference, and the nodes."""


class LayersLost(ChaosnetError):
    """All members that kept some layers of the model are gone: what they were after the last step is nowhere."""


def describe(error: BaseException) -> str:
    """One line for other machines' terminals: "ValueError: ..."."""
    try:
        text = str(error)
    except Exception:  # An error whose own text fails must not keep the node from saying goodbye.
        text = ""
    if isinstance(error, SystemExit):
        name = "exit code" if isinstance(error.code, int) else "exit"
    else:
        name = type(error).__name__
    whole = f"{name}: {text}" if text else name
    plain = "".join(each if each.isprintable() else " " for each in whole[: 2 * REASON_CHARACTERS])
    return plain if len(plain) <= REASON_CHARACTERS else plain[: REASON_CHARACTERS - 3] + "..."
