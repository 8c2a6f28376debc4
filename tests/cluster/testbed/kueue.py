"""A real Kueue for the control plane: its custom resources, its webhooks and its manager.

Its manifests come with its module. Webhooks are called at an address of this machine instead of a
Service, and only those of Jobs and of Kueue's own kinds are registered.
"""

import base64
import http.client
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml

from testbed import tools
from testbed.api import ApiError, Object
from testbed.cluster import Cluster
from testbed.controlplane import free_ports
from testbed.errors import TestbedError
from testbed.manifests import installed, kinds_in
from testbed.processes import Process
from testbed.waiting import NotYet, wait_for

READY_DEADLINE = 60.0
GROUP = "kueue.x-k8s.io"
# Kueue reads the certificate of its metrics from here, also if it serves none. In a mount namespace
# of its own nothing of this machine is touched.
_RUN = """
mount -t tmpfs none /etc && mkdir -p /etc/kueue/metrics/certs
cp "$1"/tls.crt "$1"/tls.key /etc/kueue/metrics/certs
shift; exec "$@"
"""


@contextmanager
def kueue(cluster: Cluster) -> Iterator[None]:
    """Kueue for batch Jobs, until the context ends. TestbedError if the cluster has one."""
    plane = cluster.control_plane
    program = tools.find("kueue")
    manifests = tools.source(tools.main_requirement("kueue"), "kueue")[0] / "config/components"
    folder = cluster.directory / "kueue"
    (folder / "certs").mkdir(parents=True, exist_ok=True)
    host = plane.settings.host
    webhook, health = free_ports(2, host)
    pair = plane.authority.issue("kueue", "kueue", hosts=[host])
    shutil.copy(pair.certificate, folder / "certs/tls.crt")
    shutil.copy(pair.key, folder / "certs/tls.key")
    kinds = kinds_in(manifests / "crd/bases")
    hooks = _webhooks(
        manifests / "webhook/manifests.yaml",
        f"https://{host}:{webhook}",
        plane.authority.pair.certificate,
    )
    process = Process(
        "kueue",
        [
            *_own_mounts(),
            folder / "certs",
            program,
            f"--config={_configuration(folder, host, webhook, health)}",
            f"--kubeconfig={cluster.admin}",
            "--feature-gates=VisibilityOnDemand=false",
        ],
        plane.logs / "kueue.log",
        environment={"POD_NAMESPACE": "kueue-system"},
    )
    with ExitStack() as cleaning:
        cleaning.enter_context(installed(cluster, kinds))
        cleaning.callback(process.stop)
        process.start()
        # Last, since a webhook without a server refuses all Jobs, and so removed first.
        process.wait_until("it is ready", lambda: _ready(host, health), READY_DEADLINE)
        cluster.apply(hooks)
        for hook in hooks:
            cleaning.callback(cluster.client.delete, hook["kind"], hook["metadata"]["name"])
        _wait_for_webhooks(cluster)
        yield


def _own_mounts() -> list[str]:
    unshare = shutil.which("unshare")
    if unshare is None:
        raise TestbedError("found no unshare command, of the package util-linux: install it")
    return [unshare, "--mount", "--map-root-user", "sh", "-ec", _RUN, "kueue"]


def _configuration(folder: Path, host: str, webhook: int, health: int) -> Path:
    path = folder / "config.yaml"
    certificates = str(folder / "certs")
    content = {
        "apiVersion": f"config.{GROUP}/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": f"{host}:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": host, "port": webhook, "certDir": certificates},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {"frameworks": ["batch/job"]},
        "clientConnection": {"qps": 300, "burst": 500},
    }
    path.write_text(yaml.safe_dump(content))
    return path


def _webhooks(path: Path, url: str, authority: Path) -> list[Object]:
    bundle = base64.b64encode(authority.read_bytes()).decode()
    found = []
    for configuration in yaml.safe_load_all(path.read_text()):
        hooks = []
        for hook in configuration["webhooks"]:
            rules = [(set(r["apiGroups"]), set(r["resources"])) for r in hook["rules"]]
            if any(GROUP in g or ("batch" in g and "jobs" in kinds) for g, kinds in rules):
                place = hook["clientConfig"]["service"]["path"]
                hook["clientConfig"] = {"url": url + place, "caBundle": bundle}
                hooks.append(hook)
        name = f"kueue-{configuration['kind'].removesuffix('WebhookConfiguration').lower()}"
        configuration |= {"webhooks": hooks, "metadata": {"name": name}}
        found.append(configuration)
    return found


def _ready(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError as error:
        raise NotYet(f"/readyz: {error}") from None
    finally:
        connection.close()


def _wait_for_webhooks(cluster: Cluster) -> None:
    """A webhook is known some time before the API server calls it."""
    container = {"name": "main", "image": "none.invalid/a"}
    pod = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    labels = {f"{GROUP}/queue-name": "probe"}
    probe = {"metadata": {"name": "probe", "labels": labels}, "spec": {"template": pod}}

    def suspended() -> bool:
        path = cluster.client.path("jobs", "default")
        try:
            made = cluster.client.request("POST", path, probe, query={"dryRun": "All"})
        except ApiError as error:
            raise NotYet(str(error)) from None
        return bool(made["spec"].get("suspend"))

    wait_for("Kueue's webhook to be called for Jobs", suspended, READY_DEADLINE)
