"""The live page of a job, from a user's kubectl through a real API server to a real ingest."""

import http.client
import json
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from operator_support import FULL_NAME, SYSTEM, Installation, Jobs, manifest
from played_ranks import Ranks
from testbed import ApiError, NotYet, wait_for
from testbed.api import ApiClient
from viewers import Shell, make_account, viewer

from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.watch.access import VIEWER, audience, path, through_api_server
from pipemorph.watch.document import WatchView
from pipemorph.wire import OpsReport, OpsTrace

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

DEADLINE = 120.0
SERVICE = f"{FULL_NAME}-ingest"
SLOW = 0.06


def own_address() -> str:
    """Of this machine. The API server passes nothing on to loopback addresses."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as found:
        found.connect(("198.18.0.1", 9))  # Nothing is sent.
        return str(found.getsockname()[0])


@contextmanager
def passed_on(port: int) -> Iterator[tuple[str, int]]:
    """A port of this machine's own address whose connections go on to one of loopback."""
    address = own_address()

    def pump(source: socket.socket, to: socket.socket) -> None:
        with source, to:
            try:
                while content := source.recv(1 << 16):
                    to.sendall(content)
            except OSError:
                pass

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                mine, _ = listener.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", port))
            for pair in ((mine, there), (there.dup(), mine.dup())):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    with closing(socket.create_server((address, 0))) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield address, listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def service(installation: Installation) -> Iterator[None]:
    """The chart's Service leads to the ingest, which runs beside the cluster: a pod says so."""
    cluster, name = installation.cluster, f"{SERVICE}-beside"
    where = {"name": name, "namespace": SYSTEM}
    container = {"name": "ingest", "image": "none.invalid/ingest"}
    with passed_on(installation.port) as (address, port):
        spec = {"schedulerName": "nobody", "containers": [container]}
        cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": where, "spec": spec})
        cluster.fake_pod_running(SYSTEM, name, ip=address)
        ready = {"ready": True}
        target = {"kind": "Pod", "name": name, "namespace": SYSTEM}
        cluster.apply(
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {**where, "labels": {"kubernetes.io/service-name": SERVICE}},
                "addressType": "IPv4",
                "endpoints": [{"addresses": [address], "conditions": ready, "targetRef": target}],
                "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
            }
        )
        yield
        cluster.client.delete("endpointslices", name, SYSTEM)
        cluster.client.delete("pods", name, SYSTEM)


class Watching:
    """``pipemorph watch`` as a user runs it."""

    def __init__(self, jobs: Jobs, name: str, kube: Path, folder: Path) -> None:
        command = [sys.executable, "-m", "pipemorph.cli", "watch", f"{jobs.namespace}/{name}"]
        command += ["--ingest", f"{SYSTEM}/{SERVICE}"]
        self.process = subprocess.Popen(
            command,
            env=Shell(kube, folder).environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def url(self) -> str:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], DEADLINE)
        line = self.process.stdout.readline() if readable else ""
        assert line.startswith("watch: "), line + self.end()
        return line.split()[1]

    def get(self, url: str) -> tuple[int, bytes]:
        address, _, rest = url.removeprefix("http://").partition("/")
        connection = http.client.HTTPConnection(address, timeout=DEADLINE)
        with closing(connection):
            connection.request("GET", f"/{rest}")
            answer = connection.getresponse()
            return answer.status, answer.read()

    def view(self, url: str) -> WatchView:
        status, body = self.get(f"{url}view")
        assert status == 200, status
        return WatchView.model_validate_json(body)

    def end(self) -> str:
        """End it as Ctrl-C does. What it wrote to standard error."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.communicate(timeout=DEADLINE)[1]


def test_who_may_view_a_namespace_watches_its_jobs(
    jobs: Jobs, service: None, tmp_path: Path
) -> None:
    jobs.apply(manifest("shown"))
    ranks = Ranks.of(jobs, "shown", jobs.run("shown", 4)[0])
    ranks.run(6)
    kube = viewer(jobs.cluster, jobs.namespace)
    without = Watching(jobs, "shown", kube, tmp_path)
    said = without.end() if without.process.wait(DEADLINE) else ""
    assert without.process.returncode == 2
    assert f"kubectl create serviceaccount {VIEWER} -n {jobs.namespace}" in said
    make_account(jobs.cluster, jobs.namespace)
    watching = Watching(jobs, "shown", kube, tmp_path)
    url = watching.url()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", url)
    status, page = watching.get(url)
    assert status == 200 and b"<!doctype html>" in page.lower() and b"shown" in page
    assert watching.get(f"{url[:-2]}/")[0] == 401
    found = watching.view(url)
    assert (found.job, found.namespace, found.state) == ("shown", jobs.namespace, "training")
    ranks.delays[1] = SLOW
    ranks.until("LinksHealthy=False")

    def slow() -> WatchView:
        ranks.run(1)
        found = watching.view(url)
        if found.links[1].kind not in ("slow", "delegated"):
            raise NotYet(str(found.links))
        return found

    told = wait_for("the page to tell of the slow link", slow, DEADLINE)
    assert told.number > found.number and len(told.steps.index) > 0
    assert any("slow" in line.lower() for line in told.story)
    assert told.measured is None and told.no_alternative
    assert send_ops(jobs, "shown", ranks.token, iteration=told.done - 1) == 200
    told = wait_for("the picture of an iteration", lambda: pictured(watching.view(url)), DEADLINE)
    assert told.measured is not None and len(told.measured.rows) == 4
    # Nobody but the job's ranks, and for nobody but who watches.
    stranger = jobs.cluster.service_account_token(
        jobs.namespace, VIEWER, audience=audience(jobs.namespace, "shown")
    )
    assert send_ops(jobs, "shown", stranger, iteration=3) == 401
    said = watching.end()
    assert (watching.process.returncode, said) == (0, "")


def pictured(view: WatchView) -> WatchView | None:
    return view if view.measured is not None else None


def send_ops(jobs: Jobs, name: str, token: str, iteration: int) -> int:
    """What the job's agent sends while somebody watches."""
    op = TimedOp(OpKind.F, 0, 100.0, 100.5)
    stages = [OpsTrace.of((i, i, 0), iteration, 0, 100.0, [op]) for i in range(4)]
    report = OpsReport(
        job=name, namespace=jobs.namespace, attempt=0, column=0, iteration=iteration,
        stages=[each for each in stages if each is not None],
    )  # fmt: skip
    where = f"/v1/jobs/{jobs.namespace}/{name}/ops"
    return jobs.installation.request("POST", where, token=token, body=report.body())[0]


def test_a_standby_serves_no_page(jobs: Jobs) -> None:
    jobs.apply(manifest("there"))
    ranks = Ranks.of(jobs, "there", jobs.run("there", 4)[0])
    ranks.run(2)
    make_account(jobs.cluster, jobs.namespace)
    watch = path(jobs.namespace, "there") + "view"
    standby, port = jobs.installation.ingest_replica("standby-of-watch")
    standby.start()
    try:
        token = jobs.cluster.service_account_token(
            jobs.namespace, VIEWER, audience=audience(jobs.namespace, "there")
        )
        assert jobs.installation.request("GET", watch, token=token, port=port)[0] == 503
        assert jobs.installation.request("GET", watch, token=token)[0] == 200
    finally:
        standby.process.stop()


def test_who_may_not_get_a_job_is_told_nothing_of_it(jobs: Jobs) -> None:
    jobs.apply(manifest("hidden", stages=1))
    (pod,) = jobs.run("hidden", 1)
    ranks = Ranks.of(jobs, "hidden", pod)
    make_account(jobs.cluster, jobs.namespace)
    namespace, watch = jobs.namespace, path(jobs.namespace, "hidden") + "view"
    token_of = jobs.cluster.service_account_token

    def ask(token: str | None, where: str = watch) -> tuple[int, str]:
        status, said = jobs.installation.request("GET", where, token=token)
        return status, json.dumps(said)

    right = audience(namespace, "hidden")
    tokens = {
        "none": None,
        "nonsense": "a.b.c",
        "of a rank": ranks.token,
        "for the API server": token_of(namespace, VIEWER),
        "for another job": token_of(namespace, VIEWER, audience=audience(namespace, "other")),
        "altered": token_of(namespace, VIEWER, audience=right)[:-6] + "AAAAAA",
    }
    for name, token in tokens.items():
        status, said = ask(token)
        assert status == 401 and "training" not in said, (name, status, said)
    # Of an account without a right, of a job that is there and one that is not.
    assert ask(token_of(namespace, "default", audience=right))[0] == 403
    none = path(namespace, "none") + "view"
    assert ask(token_of(namespace, "default", audience=audience(namespace, "none")), none)[0] == 403
    elsewhere = audience(SYSTEM, "hidden")
    away = path(SYSTEM, "hidden") + "view"
    assert ask(token_of(namespace, VIEWER, audience=elsewhere), away)[0] == 403
    good = token_of(namespace, VIEWER, audience=right)
    status, said = ask(good)
    assert status == 200 and WatchView.model_validate_json(said).job == "hidden"
    assert ask(token_of(namespace, VIEWER, audience=audience(namespace, "none")), none)[0] == 404
    # And with it, nothing else.
    directive = f"/v1/jobs/{namespace}/hidden/directive?attempt=0&after=0&wait=0"
    assert ask(good, directive)[0] == 401
    jobs.cluster.kubectl("delete", "rolebinding", VIEWER, "-n", namespace)
    began = time.monotonic()
    wait_for("the right to be gone", lambda: ask(good)[0] == 403 or None, 60.0)
    assert time.monotonic() - began < 45


def test_what_a_viewer_of_a_namespace_may_do_for_it(jobs: Jobs) -> None:
    make_account(jobs.cluster, jobs.namespace)
    kube = viewer(jobs.cluster, jobs.namespace)
    client = ApiClient(kube)
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    accounts = f"/api/v1/namespaces/{jobs.namespace}/serviceaccounts"
    made = client.request("POST", f"{accounts}/{VIEWER}/token", asked)
    assert made["status"]["token"]
    with pytest.raises(ApiError) as refused:
        client.request("POST", f"{accounts}/default/token", asked)
    assert refused.value.code == 403
    # The account itself may look at jobs, and not make tokens of itself.
    own = ApiClient(jobs.cluster.kubeconfig_of_token(made["status"]["token"]))
    with pytest.raises(ApiError) as refused:
        own.request("GET", f"/api/v1/namespaces/{jobs.namespace}/secrets")
    assert refused.value.code == 403
    # Through the API server everybody reaches the ingest's one port, to read, and no other.
    for service, method, code in (
        (through_api_server(SYSTEM, SERVICE), "POST", 403),
        (through_api_server(SYSTEM, "another"), "GET", 403),
        (through_api_server(SYSTEM, SERVICE).replace(":https/", ":metrics/"), "GET", 403),
    ):
        with pytest.raises(ApiError) as refused:
            client.request(method, f"{service}/metrics")
        assert refused.value.code == code, service
