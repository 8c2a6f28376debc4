"""The product as its users have it: the chart's pods, jobs by kubectl, ranks in containers.

One installation for the module, in the order of an administrator's days: install, jobs, upgrade,
uninstall. The machine may be busy with other tests, and then links really are slow at times; what
is asserted is what the injected delay alone explains.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from node_support import (
    CHART,
    INGEST,
    INSTALL,
    OPERATOR,
    RELEASE,
    ROOT,
    START,
    SYSTEM,
    Jobs,
    Witness,
    addresses,
    at_iteration,
    condition,
    final_status_written,
    follows,
    manifest,
    training_of,
    training_status,
)
from testbed import wait_for
from testbed.api import Object
from testbed.node import RESOURCE
from testbed.node_cluster import NodeCluster
from viewers import Shell, viewer

pytest_plugins = ("node_fixtures",)
pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]


def test_the_chart_runs_and_passes_its_own_test(release: NodeCluster) -> None:
    said = release.helm("test", RELEASE, "--namespace", SYSTEM)
    assert "Succeeded" in said
    pods = release.client.list("pods", SYSTEM)
    assert len(pods) == 4, "two of the operator, two of the ingest; helm test's pod is gone"
    for pod in pods:
        (status,) = pod["status"]["containerStatuses"]
        assert (status["ready"], status["restartCount"]) == (True, 0)
        who = release.kubectl(
            "exec", f"--namespace={SYSTEM}", pod["metadata"]["name"], "--", "id", "-u"
        )
        assert who == "65532\n"


def test_the_operators_image_plans_with_the_compiled_search_and_holds_no_torch(
    release: NodeCluster,
) -> None:
    script = """
import importlib.util
from pipemorph.planning import _planner
print(_planner.__file__, importlib.util.find_spec("torch") is None)
"""
    within = ["exec", f"--namespace={SYSTEM}", f"deployment/{INGEST}", "--"]
    search, no_torch = release.kubectl(*within, "python", "-c", script).split()
    assert search.startswith("/opt/pipemorph/") and search.endswith(".so")
    assert no_torch == "True"


def test_the_first_example_adapts_and_completes(release: NodeCluster, node_jobs: Jobs) -> None:
    """The very file that the README applies."""
    example = ROOT / "examples/kubernetes/one-link.yaml"
    release.kubectl("apply", f"--namespace={node_jobs.namespace}", "-f", str(example))
    with Witness(node_jobs, "one-link") as witness:
        done = node_jobs.wait("one-link", final_status_written, 240.0)
    assert follows(witness.conditions("LinksHealthy"), "False", "True")
    assert follows(witness.conditions("ScheduleAdapted"), "True"), training_status(done)
    assert done["status"]["training"]["slowLinkCount"] == 0
    assert done["status"]["training"]["state"] == "finished"
    text = release.kubectl("get", f"--namespace={node_jobs.namespace}", "pipemorphjobs")
    assert text.splitlines()[1].split()[:3] == ["one-link", "Complete", "2/2"]
    node_jobs.delete("one-link")


def test_ranks_train_on_while_the_operator_is_replaced(
    release: NodeCluster, node_jobs: Jobs, tmp_path: Path
) -> None:
    """A real link is limited, and shown so; both processes die, and are upgraded, meanwhile."""
    before = [len(addresses(node)) for node in release.nodes]
    node_jobs.apply(manifest("real", iterations=100_000))
    with Witness(node_jobs, "real") as witness:
        node_jobs.wait("real", at_iteration(5), START)
        _check_ranks(release, node_jobs, "real")
        node_jobs.wait("real", "PreflightPassed=True", 90.0)
        ranks = node_jobs.pods("real")
        node = release.nodes[0]
        veth = node.veth_of(node_jobs.namespace, ranks[3]["metadata"]["name"])
        limit = ["tbf", "rate", "10mbit", "burst", "16kb", "limit", "16mb"]
        node.run("tc", "qdisc", "add", "dev", veth, "root", *limit)
        adapted = witness.wait("a plan for the limited link", _adapted_to(2), 90.0)
        assert follows(witness.conditions("LinksHealthy"), "False")
        assert adapted["status"]["control"]["planVersion"] >= 1
        node_jobs.wait("real", _has_saved, 90.0)
        _check_plugin(release, node_jobs, "real", tmp_path)

        seen = node_jobs.get("real")["status"]["training"]["iteration"]
        release.client.request("DELETE", release.client.path("pods", SYSTEM))
        node_jobs.wait("real", at_iteration(seen + 8), 90.0)
        seen = node_jobs.get("real")["status"]["training"]["iteration"]
        more = ["--set", "operator.logLevel=DEBUG", "--set", "ingest.logLevel=DEBUG"]
        release.helm("upgrade", RELEASE, str(CHART), *INSTALL, *more)
        for name in (OPERATOR, INGEST):
            rollout = ("rollout", "status", f"--namespace={SYSTEM}", f"deployment/{name}")
            release.kubectl(*rollout, deadline=180.0)
        node_jobs.wait("real", at_iteration(seen + 8), 90.0)

        node.run("tc", "qdisc", "delete", "dev", veth, "root")
        # 64 KiB take 52 ms at 10 Mbit/s.
        node_jobs.wait("real", _forgotten(adapted, link=2, delay_ms=52.0), 180.0)
    witness.never_back("control", "planVersion")
    witness.never_back("training", "appliedPlanVersion")
    witness.never_back("training", "iteration")
    assert {status["attempt"] for status in witness.seen if "attempt" in status} == {0}
    now = node_jobs.pods("real")
    assert [p["metadata"]["uid"] for p in now] == [p["metadata"]["uid"] for p in ranks]
    assert [p["status"]["containerStatuses"][0]["restartCount"] for p in now] == [0] * 4
    node_jobs.delete("real")
    # Both processes have new pods.
    assert [len(addresses(node)) for node in release.nodes] == before


def test_a_gpt_trains_to_completion(release: NodeCluster, node_jobs: Jobs) -> None:
    job = yaml.safe_load((ROOT / "examples/kubernetes/gpt.yaml").read_text())
    job["spec"]["trainer"]["iterations"] = 20
    job["spec"]["schedule"]["microbatches"] = 4
    node_jobs.apply(job)
    done = node_jobs.wait("gpt", final_status_written, 180.0)
    training = done["status"]["training"]
    assert training["iteration"] >= 18
    # 5.5 nats per byte is what knowing nothing costs.
    assert training["loss"] < 4.5, training_status(done)
    node_jobs.delete("gpt")


def test_a_deleted_pod_and_a_suspended_job_lose_no_iteration(node_jobs: Jobs) -> None:
    """Ranks save, in both pods, whether one pod is deleted or all are."""
    folder = f"/mnt/{node_jobs.namespace}"
    mounts = [{"name": "node", "mountPath": "/mnt"}]
    template = {
        "spec": {
            "containers": [{"name": "trainer", "volumeMounts": mounts}],
            # Writable by any user, and stays for the next attempt.
            "volumes": [{"name": "node", "hostPath": {"path": "/tmp", "type": "Directory"}}],
        }
    }
    checkpoint = {"directory": folder, "every": 100_000, "keep": 10}
    node_jobs.apply(
        manifest("saves", stages=2, iterations=100_000, template=template, checkpoint=checkpoint)
    )

    def saved(attempt: int) -> int:
        """The newest checkpoint that this attempt finds."""
        first = node_jobs.pods("saves", attempt)[0]["metadata"]["name"]
        within = ["exec", f"--namespace={node_jobs.namespace}", first, "--", "ls", folder]
        names = node_jobs.nodes.kubectl(*within).split()
        return max(int(name.removeprefix("iteration-")) for name in names)

    job = node_jobs.wait("saves", at_iteration(3), START)
    done = job["status"]["training"]["iteration"]
    victim = node_jobs.pods("saves")[1]["metadata"]["name"]
    node_jobs.nodes.client.delete("pods", victim, node_jobs.namespace)
    job = node_jobs.wait("saves", _attempt_at_iteration(1, 1), START)
    (record,) = job["status"]["attempts"]
    assert (record["reason"], record["counted"]) == ("SavedAndEnded", False), record
    assert job["status"]["restarts"] == 0
    assert job["status"]["training"]["iteration"] >= saved(1) > done

    done = job["status"]["training"]["iteration"]
    node_jobs.patch("saves", {"suspend": True})
    node_jobs.wait("saves", "Suspended", 60.0)
    node_jobs.patch("saves", {"suspend": False})
    job = node_jobs.wait("saves", _attempt_at_iteration(2, 1), START)
    assert job["status"]["training"]["iteration"] >= saved(2) > done
    node_jobs.delete("saves")


def test_uninstalling_removes_all_but_the_definition(release: NodeCluster) -> None:
    release.helm("uninstall", RELEASE, "--namespace", SYSTEM)
    # The authority that jobs trust stays for the next installation.
    secret = f"secrets/{RELEASE}-pipemorph-operator-ingest-tls"
    kinds = ("deployments", "pods", "services", "secrets", "serviceaccounts", "configmaps")

    def rest() -> set[str]:
        return {
            f"{kind}/{found['metadata']['name']}"
            for kind in kinds
            for found in release.client.list(kind, SYSTEM)
        } - {"serviceaccounts/default", "configmaps/kube-root-ca.crt", secret}

    wait_for("all of the chart to go", lambda: not rest(), 120.0, details=lambda: f"found {rest()}")
    for kind in ("clusterroles", "clusterrolebindings"):
        names = [found["metadata"]["name"] for found in release.client.list(kind)]
        assert not [name for name in names if name.startswith(RELEASE)]
    release.client.get("crds", "pipemorphjobs.pipemorph.io")


def _check_plugin(nodes: NodeCluster, node_jobs: Jobs, name: str, folder: Path) -> None:
    """Check kubectl's plugin for a viewer of the namespace of a job whose link 2 is slow, and for
    which there is a plan: which link, since when, what was done, and what it saved."""
    namespace = node_jobs.namespace
    shell, job = Shell(viewer(nodes, namespace), folder), f"{namespace}/{name}"

    (row,) = shell.run(f"kubectl pipemorph top -n {namespace}").splitlines()[1:]
    assert re.match(rf"{name} +Running +4/4 .* link 2 \+\d+ ms", row), row

    output = shell.run(f"kubectl pipemorph top {job}")
    assert re.search(rf"^{namespace} +{name} +Running +4/4 ", output, re.MULTILINE), output
    assert re.search(r"^outcome  ", output, re.MULTILINE), output

    output = shell.run(f"kubectl pipemorph explain {job}")
    assert len(output.splitlines()) <= 10, output
    for expected in (
        rf"^outcome  {job} is Running; 4 stages, 4/4 pods ready; iteration ",
        r"^seen     .*link 2 \(\+.*since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC",
        r"^done     \d+ plan changes?; the last, plan \d+ from iteration \d+",
        r"^worth    ",
        r"^to do    ",
    ):
        assert re.search(expected, output, re.MULTILINE), f"no {expected} in\n{output}"

    output = shell.run(f"kubectl pipemorph timeline {job} --seconds 3 --out trace.json")
    assert re.fullmatch(r"timeline: trace.json: \d+ iterations\n", output), output
    trace = json.loads((folder / "trace.json").read_text())
    ops = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    # Perfetto's format: https://perfetto.dev/docs/concepts/ui-legacy-json-formats
    assert all(event["dur"] > 0 and event["ts"] >= 0 and event["name"] for event in ops)
    assert {(event["pid"], event["tid"]) for event in ops} == {(0, stage) for stage in range(4)}
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == [f"stage {stage}" for stage in range(4)]
    iterations = trace["otherData"]["iterations"]
    # A forward, and a backward in two parts or one, of each of 12 microbatches on each stage.
    assert 2 * 12 * 4 <= len(ops) / len(iterations) <= 3 * 12 * 4, len(ops)


def _check_ranks(nodes: NodeCluster, node_jobs: Jobs, name: str) -> None:
    """Check that each rank has its device, and none is root."""
    pods = node_jobs.pods(name)
    assert len(pods) == 4
    given = set()
    for pod in pods:
        command = ["exec", f"--namespace={node_jobs.namespace}", pod["metadata"]["name"], "--"]
        said = nodes.kubectl(*command, "sh", "-c", "id -u; ls /dev/infiniband; env")
        lines = said.splitlines()
        assert lines[:3] == ["65532", "rdma_cm", "uverbs0"]
        given |= {line for line in lines if line.startswith("TESTBED_DEVICES=")}
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        assert limits[RESOURCE] == "1"
    assert len(given) == 4, f"ranks share devices: {given}"


def _attempt_at_iteration(attempt: int, number: int) -> Callable[[Object], bool]:
    def there(job: Object) -> bool:
        training = training_of(job)
        return training.get("attempt") == attempt and (training.get("iteration") or 0) >= number

    return there


def _adapted_to(link: int, *, since: int = 0) -> Callable[[Object], bool]:
    """Check for a plan in effect for the state of a link, at iteration `since` or later."""

    def adapted(job: Object) -> bool:
        change = training_of(job).get("lastAdaptation") or {}
        return (
            condition(job, "ScheduleAdapted").get("status") == "True"
            and link in change.get("links", [])
            and training_of(job)["iteration"] >= since
            and change.get("appliedAtIteration") is not None
        )

    return adapted


def _has_saved(job: Object) -> bool:
    return (training_of(job).get("savedSeconds") or 0.0) > 1.0


def _forgotten(adapted: Object, *, link: int, delay_ms: float) -> Callable[[Object], bool]:
    """The link is no longer known to be as slow as it was, and a newer plan is in effect.

    On an idle machine that is the first plan, and all links are well. On a busy one, ops take
    longer than they were planned with and any link may be late by what a stall takes, and then
    another plan is the best.
    """
    before = training_of(adapted)["appliedPlanVersion"]

    def forgotten(job: Object) -> bool:
        training = training_of(job)
        return training["appliedPlanVersion"] > before and not any(
            slow["link"] == link and slow["delayMs"] >= delay_ms / 2
            for slow in training.get("slowLinks", [])
        )

    return forgotten
