"""etcd, kube-apiserver and kube-controller-manager as processes on this machine."""

import json
import socket
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from testbed import tools
from testbed.api import ApiClient, ApiError, Object
from testbed.errors import TestbedError
from testbed.kubeconfig import write_kubeconfig
from testbed.pki import Authority, make_key, make_public_key
from testbed.processes import Process
from testbed.waiting import NotYet, wait_for

ISSUER = "https://kubernetes.default.svc.cluster.local"
SERVICE_CIDR = "10.96.0.0/16"
SERVICE_IP_OF_API = "10.96.0.1"
# Two seconds each on an idle machine; a machine that also builds may take much longer.
START_DEADLINE = 90.0


_held: list[socket.socket] = []


def free_ports(count: int, host: str) -> list[int]:
    """Ports reserved while this process lives, however often the program that listens there is
    started: servers request a shared port, and only one listens."""
    ports = []
    for _ in range(count):
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        _held.append(holder)
        ports.append(int(holder.getsockname()[1]))
    return ports


@dataclass(frozen=True)
class Settings:
    """Settings that differ between the levels."""

    # The address of the API server. Pods reach it at this address, so the node level gives one
    # that is not the loopback.
    host: str = "127.0.0.1"
    # Without kubelets no lease is renewed: a node that a test makes up would be given up on.
    watch_nodes: bool = False
    controller_manager_args: Sequence[str] = field(default_factory=tuple)


class ControlPlane:
    """The processes of one control plane, all below one folder and gone after `stop`."""

    def __init__(self, directory: Path, settings: Settings | None = None) -> None:
        self.directory = directory
        self.settings = settings or Settings()
        host = self.settings.host
        etcd_client, etcd_peer, api, manager = free_ports(4, host)
        self._etcd_url = f"http://{host}:{etcd_client}"
        self.server = f"https://{host}:{api}"
        self.logs = directory / "logs"
        self.authority = Authority(directory / "pki")
        self.admin = self.kubeconfig("admin", "testbed-admin", ["system:masters"])
        self.client = ApiClient(self.admin)
        self._make_keys()
        self.etcd = Process(
            "etcd",
            [
                tools.find("etcd"),
                "--name=testbed",
                f"--data-dir={directory / 'etcd'}",
                f"--listen-client-urls=http://{host}:{etcd_client}",
                f"--advertise-client-urls=http://{host}:{etcd_client}",
                f"--listen-peer-urls=http://{host}:{etcd_peer}",
                f"--initial-advertise-peer-urls=http://{host}:{etcd_peer}",
                f"--initial-cluster=testbed=http://{host}:{etcd_peer}",
                # The data lives as long as the tests: nothing to save from a power cut.
                "--unsafe-no-fsync",
                "--log-level=warn",
            ],
            self.logs / "etcd.log",
        )
        self.apiserver = Process(
            "kube-apiserver",
            [tools.find("kube-apiserver"), *self._apiserver_args(api, etcd_client)],
            self.logs / "kube-apiserver.log",
        )
        self.controller_manager = Process(
            "kube-controller-manager",
            [tools.find("kube-controller-manager"), *self._controller_manager_args(manager)],
            self.logs / "kube-controller-manager.log",
        )

    def _make_keys(self) -> None:
        host = self.settings.host
        pki = self.authority.directory
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        names += ["kubernetes.default.svc.cluster.local", "localhost"]
        self.serving = self.authority.issue(
            "apiserver", "kube-apiserver", hosts=[host, "127.0.0.1", SERVICE_IP_OF_API, *names]
        )
        self.kubelet_client = self.authority.issue(
            "apiserver-kubelet-client", "kube-apiserver-kubelet-client", groups=["system:masters"]
        )
        self.token_key = make_key(pki / "service-accounts.key")
        self.token_public_key = make_public_key(self.token_key, pki / "service-accounts.pub")

    def _apiserver_args(self, port: int, etcd: int) -> list[str]:
        settings = self.settings
        loopback = settings.host.startswith("127.")
        return [
            f"--etcd-servers=http://{settings.host}:{etcd}",
            f"--bind-address={settings.host}",
            f"--secure-port={port}",
            f"--advertise-address={settings.host}",
            # An Endpoints object cannot hold a loopback address, and nothing would use it.
            f"--endpoint-reconciler-type={'none' if loopback else 'lease'}",
            f"--tls-cert-file={self.serving.certificate}",
            f"--tls-private-key-file={self.serving.key}",
            f"--client-ca-file={self.authority.pair.certificate}",
            # Without these, each client that looks up how extensions sign in logs an error.
            f"--requestheader-client-ca-file={self.authority.pair.certificate}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--kubelet-client-certificate={self.kubelet_client.certificate}",
            f"--kubelet-client-key={self.kubelet_client.key}",
            f"--kubelet-certificate-authority={self.authority.pair.certificate}",
            "--kubelet-preferred-address-types=InternalIP",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--anonymous-auth=true",  # as on most clusters: "no token" must be refused by RBAC
            f"--service-account-issuer={ISSUER}",
            f"--service-account-key-file={self.token_public_key}",
            f"--service-account-signing-key-file={self.token_key}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            "--allow-privileged=true",
            "--profiling=false",
        ]

    def _controller_manager_args(self, port: int) -> list[str]:
        settings = self.settings
        config = self.kubeconfig("controller-manager", "system:kube-controller-manager")
        controllers = "*" if settings.watch_nodes else "*,-node-lifecycle-controller"
        return [
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            f"--bind-address={settings.host}",
            f"--secure-port={port}",
            f"--controllers={controllers}",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={self.token_key}",
            f"--root-ca-file={self.authority.pair.certificate}",
            f"--cluster-signing-cert-file={self.authority.pair.certificate}",
            f"--cluster-signing-key-file={self.authority.pair.key}",
            "--leader-elect=false",  # one of it, and a restart need not wait for a lease
            "--profiling=false",
            *settings.controller_manager_args,
        ]

    def kubeconfig(self, file_name: str, user: str, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig of `user`, who signs in with a certificate of this cluster."""
        pair = self.authority.issue(file_name, user, groups=groups)
        return write_kubeconfig(
            self.directory / "kubeconfig" / f"{file_name}.yaml",
            server=self.server,
            authority=self.authority.pair.certificate.read_bytes(),
            user=user,
            certificate=pair.certificate.read_bytes(),
            key=pair.key.read_bytes(),
        )

    @property
    def processes(self) -> list[Process]:
        return [self.etcd, self.apiserver, self.controller_manager]

    def start(self) -> None:
        try:
            self.etcd.start()
            self.start_apiserver()
            self.controller_manager.start()
            self.controller_manager.wait_until(
                "its first service account", self._default_account, START_DEADLINE
            )
        except BaseException:
            self.stop()
            raise

    def start_apiserver(self) -> None:
        self.apiserver.start()
        self.apiserver.wait_until("its readiness at /readyz", self._ready, START_DEADLINE)

    def stop_apiserver(self) -> None:
        self.apiserver.stop()

    def stop(self) -> None:
        """End every process: clients before servers."""
        for process in reversed(self.processes):
            # The data is thrown away, so nothing is gained by a slow farewell.
            process.stop(grace=2.0)

    def _ready(self) -> bool:
        if not self.etcd.running:
            raise TestbedError(f"etcd ended; {self.etcd.log_end()}")
        try:
            code, body = self.client.raw("GET", "/readyz", query={"verbose": "1"}, deadline=5.0)
        except OSError as error:
            raise NotYet(f"no answer from {self.server}: {error}") from None
        if code != 200:
            failed = [line for line in body.decode(errors="replace").splitlines() if "[-]" in line]
            raise NotYet(f"/readyz answers {code}: {'; '.join(failed)}")
        return True

    def _default_account(self) -> bool:
        # The controllers run once the controller manager has made this one.
        try:
            self.client.request("GET", "/api/v1/namespaces/default/serviceaccounts/default")
        except (ApiError, OSError) as error:
            raise NotYet(str(error)) from None
        return True

    def forget(self) -> None:
        """Drop all history: of etcd, and, by a restart, the API server's memory of it. Watches and
        pages of lists that go on from before are then answered with 410."""
        revision = self._ask_etcd("/v3/maintenance/status", {})["header"]["revision"]
        self._ask_etcd("/v3/kv/compaction", {"revision": revision, "physical": True})
        self.stop_apiserver()
        self.start_apiserver()
        self.wait_for_controllers()

    def _ask_etcd(self, path: str, body: Object) -> Object:
        request = urllib.request.Request(
            self._etcd_url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            said: Object = json.load(answer)
            return said

    def wait_for_controllers(self) -> None:
        """The controllers end when they cannot reach the API server for long; see that they run."""
        if not self.controller_manager.running:
            self.controller_manager.stop(grace=0)
            self.controller_manager.start()
        wait_for(
            "the default service account",
            self._default_account,
            START_DEADLINE,
            details=self.controller_manager.log_end,
        )
