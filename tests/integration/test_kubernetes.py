"""examples/kubernetes: against the API's schemas, and its containers' commands run as a kubelet would run them.

There is no cluster here. A pod is a namespace of the network, of processes and of mounts, so its node is process 1.
Names are in a hosts file, as those of a headless service are in DNS. A pod that comes back has another address.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from lan import CHAOSNET, PATIENCE_S, Machines, needs_namespaces

from chaosnet.node.keys import KeyPair, save

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
VERSIONS = ("1.29", "1.37")  # The oldest that knows all fields, and one that was new when this was written.

Manifest = dict[str, Any]


def manifests() -> dict[str, Manifest]:
    """By kind; the Secret as the customization makes it."""
    found = {each["kind"]: each for each in yaml.safe_load_all((FOLDER / "chaosnet.yaml").read_text())}
    (secret,) = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["secretGenerator"]
    data = dict.fromkeys(secret["files"], "a2V5")
    found["Secret"] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": secret["name"]},
        "data": data,
    }
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["PodDisruptionBudget", "Secret", "Service", "StatefulSet"])
def test_the_api_knows_every_field(kind: str, version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    manifest = manifests()[kind]
    validator.validate(manifest, version, strict=True)
    with pytest.raises(validator.ValidationError):
        validator.validate(manifest | {"specs": {}}, version, strict=True)


def test_the_manifests_fit_together() -> None:
    found = manifests()
    spec, service = found["StatefulSet"]["spec"], found["Service"]
    name, pod = found["StatefulSet"]["metadata"]["name"], spec["template"]["spec"]
    assert service["metadata"]["name"] == spec["serviceName"] and service["spec"]["clusterIP"] == "None"
    for labels in (
        service["spec"]["selector"],
        spec["selector"]["matchLabels"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert labels == spec["template"]["metadata"]["labels"]
    (container,) = pod["containers"]
    (port,) = [each["containerPort"] for each in container["ports"]]
    told = {each["name"]: each.get("value") for each in container["env"]}
    asked = [f"{name}-{number}.{spec['serviceName']}:{port}" for number in range(spec["replicas"])]
    assert told["CHAOSNET_JOIN"].split(",") == asked
    (secret,) = [each["secret"] for each in pod["volumes"] if "secret" in each]
    assert secret["secretName"] == found["Secret"]["metadata"]["name"]
    volumes = {
        each["name"] for each in (*pod["volumes"], *(v["metadata"] for v in spec["volumeClaimTemplates"]))
    }
    assert {
        each["name"] for c in (*pod["initContainers"], container) for each in c["volumeMounts"]
    } == volumes
    image = (ROOT / "Dockerfile").read_text()
    assert f"--uid {pod['securityContext']['runAsUser']} " in image and 'ENTRYPOINT ["chaosnet"]' in image
    assert (ROOT / container["args"][-1]).exists(), "the image has the examples"


class Pod:
    """One of the StatefulSet, on a machine of its own. `folder`: its volumes are below it."""

    def __init__(self, machines: Machines, number: int, key: Path) -> None:
        spec = manifests()["StatefulSet"]["spec"]["template"]["spec"]
        (self._container,), (self._init,) = spec["containers"], spec["initContainers"]
        self.name = f"chaosnet-{number}"
        self._machines, self.folder = machines, machines.folder / self.name
        for container in (self._init, self._container):
            for mount in container["volumeMounts"]:
                self._mapped(mount["mountPath"]).mkdir(parents=True, exist_ok=True)
        secret = self._mapped("/secret/key")
        secret.write_bytes(key.read_bytes())
        secret.chmod(0o440)  # As fsGroup leaves it.
        machines.add(self.name)

    def _mapped(self, path: str) -> Path:
        return self.folder / path.lstrip("/")

    def _words(self, words: list[str]) -> list[str]:
        """Paths of its volumes are those of our folder, and the image's examples are in this repository."""
        mounts = [each["mountPath"] for c in (self._init, self._container) for each in c["volumeMounts"]]
        found = []
        for word in words:
            inside = any(word == each or word.startswith(f"{each}/") for each in mounts)
            found.append(
                str(self._mapped(word)) if inside else re.sub("^examples/", f"{ROOT}/examples/", word)
            )
        return found

    def env(self, **other: str) -> dict[str, str]:
        """As a kubelet sets it."""
        found = {}
        for each in self._container["env"]:
            match each.get("valueFrom", {}):
                case {"fieldRef": {"fieldPath": "metadata.name"}}:
                    value = self.name
                case {"resourceFieldRef": {"resource": "limits.cpu"}}:
                    value = self._container["resources"]["limits"]["cpu"]
                case _:
                    (value,) = self._words([each["value"]])
            found[each["name"]] = value
        return {"PATH": os.environ["PATH"]} | found | other

    def init(self) -> None:
        subprocess.run(self._words(self._init["command"]), check=True)

    def start(self, **env: str) -> None:
        """Its container, whose process 1 is the node."""
        words = self._words(self._container["args"])
        inside = 'mount --bind "$0" /etc/hosts && exec "$@"'
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = [*namespaces, "sh", "-c", inside, str(self._machines.folder / "hosts"), *CHAOSNET, *words]
        with self._machines.log(self.name).open("ab") as out:
            self._machines.processes[self.name] = subprocess.Popen(
                self._machines.inside(self.name, *command), env=self.env(**env), stdout=out, stderr=out
            )

    def signal(self, number: signal.Signals) -> int:
        """To its process 1. Returns: the container's exit code."""
        process = self._machines.processes[self.name]
        (first,) = psutil.Process(process.pid).children()
        first.send_signal(number)
        return process.wait(PATIENCE_S)

    def is_ready(self) -> bool:
        words = self._container["readinessProbe"]["exec"]["command"]
        assert words[0] == "chaosnet"
        command = self._machines.inside(self.name, *CHAOSNET, *words[1:])
        return subprocess.run(command, env=self.env(), capture_output=True, check=False).returncode == 0

    def says(self, text: str, times: int = 1) -> None:
        log = self._machines.log(self.name)
        self._machines.until(lambda: log.read_text().count(text) >= times, f"{self.name} says {text!r}")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[[int, str], Pod]]:
    """Makes pods; one that is made again, at another address, has its volumes."""
    machines = Machines(tmp_path)
    save(KeyPair.new(), tmp_path / "key")
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    machines.switch("sw")

    def make(number: int, address: str) -> Pod:
        if (machines.folder / f"chaosnet-{number}").exists():
            machines.remove(f"chaosnet-{number}", "sw")
        pod = Pod(machines, number, tmp_path / "key")
        machines.wire(pod.name, "sw", f"{address}/24")
        hosts = (tmp_path / "hosts").read_text().splitlines()
        known = [line for line in hosts if not line.endswith(f" {pod.name}.chaosnet")]
        (tmp_path / "hosts").write_text("\n".join([*known, f"{address} {pod.name}.chaosnet", ""]))
        return pod

    try:
        yield make
    finally:
        machines.down()


@needs_namespaces
@pytest.mark.realtime
@pytest.mark.slow
def test_pods_found_join_come_back_under_their_names_and_leave_at_sigterm(
    service: Callable[[int, str], Pod],
) -> None:
    soon = {"CHAOSNET_JOIN_PATIENCE_S": "3"}  # Our names are known at once.
    first, second = service(0, "10.96.0.10"), service(1, "10.96.0.11")
    first.init()
    second.init()
    first.start(**soon)
    second.start(CHAOSNET_JOIN_PATIENCE_S="30")  # However slowly the first comes up.
    first.says("chaosnet-0 founds a cluster")
    first.says("chaosnet-1 joins: now 2 members")
    assert first.is_ready() and second.is_ready()
    assert second.signal(signal.SIGKILL) != 0
    first.says("chaosnet-1 is lost")
    second = service(1, "10.96.0.21")
    second.init()
    second.start(**soon)
    first.says("chaosnet-1 joins: now 2 members", times=2)
    assert first.signal(signal.SIGTERM) == 0
    second.says("chaosnet-1 is the scheduler now")
    first.start(**soon)
    second.says("chaosnet-0 joins: now 2 members")
    assert [pod.signal(signal.SIGTERM) for pod in (second, first)] == [0, 0]
    first.says("newest checkpoint: step")


@needs_namespaces
@pytest.mark.realtime
def test_a_secret_s_file_is_a_key_once_the_init_container_has_copied_it(
    service: Callable[[int, str], Pod],
) -> None:
    pod = service(0, "10.96.0.10")

    def looked_at(key: Path) -> subprocess.CompletedProcess[str]:
        command = [*CHAOSNET, "status", "127.0.0.1:9"]
        env = pod.env(CHAOSNET_KEY=str(key))
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    assert (
        "others can read this key (mode 440, expected 600" in looked_at(pod.folder / "secret" / "key").stderr
    )
    pod.init()
    assert "nobody answers" in looked_at(Path(pod.env()["CHAOSNET_KEY"])).stderr
