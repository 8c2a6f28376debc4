"""First contact of users: the chart, `kubectl explain`, good manifests taken, bad ones refused."""

import asyncio
import base64
import copy
import json
import shutil
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import yaml
from certificates import is_issued_by
from operator_support import (
    CHART,
    FULL_NAME,
    RELEASE,
    ROOT,
    SYSTEM,
    UNSEEN,
    Jobs,
    Program,
    manifest,
)
from rendered_chart import rendered
from testbed import ApiError, TestbedError, wait_for

from pipemorph import __version__
from pipemorph.planning.problem import MAX_CELLS
from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.kube.client import METADATA_ONLY, KubeClient
from pipemorph_operator.kube.client import build_path as api_path
from pipemorph_operator.kube.job_object import read_job
from pipemorph_operator.names import LABEL_LEADER
from pipemorph_operator.resources import Attempt, build_objects

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

JOB_SET = ROOT / "examples/kubernetes/jobset.yaml"
"""Example of a kind that :mod:`test_kubeflow_kinds` installs."""
EXAMPLES = sorted(set((ROOT / "examples/kubernetes").glob("*.yaml")) - {JOB_SET})


def changed(path: str, value: Any) -> dict[str, Any]:
    """A good manifest with one field made bad."""
    job = copy.deepcopy(manifest("bad"))
    node: Any = job["spec"]
    *way, last = path.split(".")
    for part in way:
        node = node.setdefault(part, {})
    node[last] = value
    return job


TRAINER = {"name": "trainer", "image": "i"}
CONTAINERS = "spec.template.spec.containers"
BAD = [
    ("parallelism.stages", 0, "spec.parallelism.stages"),
    ("parallelism.layers", 7, "spec.parallelism.layers"),
    ("parallelism", {"stages": 512, "replicas": 4096}, "spec.parallelism.replicas"),
    ("parallelism", {"stages": 4, "tensor": 2, "order": ["pp"]}, "spec.parallelism.order"),
    ("parallelism", {"stages": 4, "order": ["pp", "dp"]}, "spec.parallelism.order"),
    ("parallelism", {"stages": 4, "order": ["pp", "pp"]}, "spec.parallelism.order"),
    ("schedule.policy", "fast", "spec.schedule.policy"),
    ("schedule.globalBatchSize", 13, "spec.schedule.globalBatchSize"),
    ("schedule.warmup", [4, 3, 2], "spec.schedule.warmup"),
    ("schedule.warmup", [99, 3, 2, 1], "spec.schedule.warmup"),
    ("schedule.inFlightLimit", 0, "spec.schedule.inFlightLimit"),
    ("trainer.module", "no module", "spec.trainer.module"),
    ("trainer.command", ["python", "x.py"], "set one of module and command"),
    ("adaptation.minGian", 0.5, "spec.adaptation.minGian"),
    ("adaptation.relayout", True, "adaptation.relayout needs failurePolicy.maxRestarts"),
    ("adaptation.relayout", True, "adaptation.relayout needs parallelism.layers"),
    ("faults", [{"link": 3, "delayMs": 1}], "spec.faults"),
    ("faults", [{"link": 0}], "spec.faults[0]"),
    ("faults", [{"link": 0, "delayMs": 1, "fromIteration": 4, "toIteration": 4}], "spec.faults[0]"),
    ("faults", [{"between": [0, 1], "link": 0, "delayMs": 1}], "spec.faults[0]"),
    ("faults", [{"between": [1, 1], "delayMs": 1}], "spec.faults[0].between"),
    ("faults", [{"reduction": 0, "sever": "data"}], "spec.faults[0]"),
    ("faults", [{"reduction": 0, "delayForwards": 2}], "spec.faults[0]"),
    ("placement.rdma", {"resourceName": "nodomain"}, "spec.placement.rdma.resourceName"),
    ("placement.gang", {}, "spec.placement.gang"),
    ("placement.gang", {"kueue": {"queue": "a"}, "volcano": {}}, "spec.placement.gang"),
    ("placement.topology", {"key": "rack", "per": "pipeline"}, "spec.placement.topology"),
    ("placement.sharedMemory", "lots", "spec.placement.sharedMemory"),
    ("template", {"spec": {"containers": [TRAINER | {"name": "x"}]}}, CONTAINERS),
    ("template", {"spec": {"containers": []}}, CONTAINERS),
    (
        "template",
        {"spec": {"containers": [TRAINER | {"env": [{"name": "PIPEMORPH_X", "value": "1"}]}]}},
        CONTAINERS,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "field"), BAD, ids=[f"{p}={str(v)[:30]}" for p, v, _ in BAD]
)
def test_a_bad_manifest_is_refused_and_the_field_named(
    jobs: Jobs, path: str, value: Any, field: str
) -> None:
    with pytest.raises(TestbedError) as refused:
        jobs.apply(changed(path, value))
    assert field in str(refused.value)


def test_a_fault_of_each_kind_is_taken(jobs: Jobs) -> None:
    faults = [
        {"link": 0, "sever": "data"},
        {"link": 0, "delayForwards": 2},
        {"reduction": 0, "bandwidthMbps": 1},
        {"between": [0, 1], "delayMs": 1},
        {"device": 0, "slowdown": 2, "pauseMs": 5},
        {"link": 0, "jitterMs": 5},
    ]
    jobs.apply(manifest("faulty", faults=faults, suspend=True))


def test_a_job_that_is_too_large_to_plan_is_refused(jobs: Jobs) -> None:
    large = manifest("bad", stages=512)
    large["spec"]["schedule"] = {"microbatches": MAX_CELLS // 512 + 1}
    with pytest.raises(TestbedError, match=f"microbatches must be at most {MAX_CELLS}"):
        jobs.apply(large)


def test_jobs_are_listed_without_what_makes_them_large(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's own client requests pages of metadata, and no more."""
    jobs.apply(manifest("one", stages=1, suspend=True))
    jobs.apply(manifest("two", stages=1, suspend=True))
    monkeypatch.setenv("KUBECONFIG", str(jobs.cluster.admin))
    url = api_path("PipeMorphJob", jobs.namespace)

    async def ask() -> tuple[list[Any], list[Any]]:
        async with await KubeClient.from_environment() as api:
            pages = [p async for p in api.list_pages(url, limit=1, accept=METADATA_ONLY)]
            return [m async for m in api.list_metadata(url)], pages

    listed, pages = asyncio.run(ask())
    assert [found["name"] for found in listed] == ["one", "two"]
    assert [set(item) & {"spec", "status"} for page in pages for item in page["items"]] == [
        set()
    ] * 2


def test_a_name_that_is_no_label_is_refused(jobs: Jobs) -> None:
    with pytest.raises(TestbedError, match=r"metadata\.name must be at most 63"):
        jobs.apply(manifest("a" * 64))
    jobs.apply(manifest("a" * 63, stages=1))
    jobs.pods("a" * 63, 1)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("parallelism.replicas", 2),
        ("schedule.microbatches", 13),
        ("schedule.inFlightLimit", 9),
        ("trainer.args", {"x": 2}),
        ("trainer.iterations", 101),
        ("transport", {"route": "direct"}),
        ("checkpoint", {"directory": "/x", "every": 1}),
        ("faults", [{"link": 0, "delayMs": 1}]),
        ("managedBy", "other.io/x"),
    ],
)
def test_edits_that_running_ranks_cannot_follow_are_refused(
    jobs: Jobs, path: str, value: Any
) -> None:
    jobs.apply(manifest("bad"))
    with pytest.raises(TestbedError, match=f"{path.partition('.')[0]} is immutable"):
        jobs.apply(changed(path, value))


def test_edits_after_which_layers_could_not_move_are_refused(jobs: Jobs) -> None:
    """The ingest would serve such a job no more once another one takes over."""
    good = manifest("bad", stages=2)
    good["spec"]["parallelism"]["layers"] = 4
    good["spec"] |= {"adaptation": {"relayout": True}, "failurePolicy": {"maxRestarts": 1}}
    jobs.apply(good)
    for field, what in (("failurePolicy", "maxRestarts"), ("recovery", "snapshotIterations")):
        bad = copy.deepcopy(good)
        bad["spec"][field] = {what: 0}
        with pytest.raises(TestbedError, match=rf"adaptation.relayout needs {field}\.{what}"):
            jobs.apply(bad)


def test_edits_that_can_be_followed_are_taken(jobs: Jobs) -> None:
    jobs.apply(manifest("bad"))
    for path, value in (
        ("suspend", True),
        ("adaptation.minGain", 0.2),
        ("failurePolicy.maxRestarts", 4),
        ("activeDeadlineSeconds", 900),
        ("ttlSecondsAfterFinished", 900),
        ("placement.onePodPerNode", True),
    ):
        jobs.apply(changed(path, value))


def test_an_attempt_that_avoids_nodes_is_taken(jobs: Jobs) -> None:
    """A node selector requirement on a node's name may have one value only."""
    body = manifest("avoids")
    body["metadata"] |= {"namespace": jobs.namespace, "uid": "0b7c9d2e-0000-0000-0000-444455556666"}
    attempt = Attempt(read_job(body), body["metadata"]["uid"], 0, ("a", "b"), ("c", "d"))
    made = build_objects(attempt, OperatorConfig(ingest_url="https://none.invalid"))
    affinity = made[-1]["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    assert all(len(str(terms)) > 2 for terms in affinity.values())
    assert len(affinity) == 2, "both kinds are to be judged"
    for obj in made:
        jobs.cluster.apply(obj, "--dry-run=server")


@pytest.mark.parametrize(
    "path", ["", ".spec", ".spec.placement.gang", ".spec.faults", ".status", ".status.training"]
)
def test_kubectl_explains(jobs: Jobs, path: str) -> None:
    said = jobs.cluster.kubectl("explain", f"pmjs{path}")
    assert "DESCRIPTION:" in said
    lines = said.splitlines()
    fields = [i for i, line in enumerate(lines) if line.startswith("  ") and "\t<" in line]
    assert fields
    bare = [
        lines[i].split()[0]
        for i in fields
        if not lines[i + 1].strip() and lines[i].split()[0] not in ("metadata",)
    ]
    assert not bare, f"fields without a word: {bare}"


def test_the_chart_is_upgraded_with_its_crd_and_keeps_its_authority(jobs: Jobs) -> None:
    cluster = jobs.cluster
    before = cluster.client.get("secrets", f"{FULL_NAME}-ingest-tls", SYSTEM)["data"]
    crd = cluster.client.get("crds", "pipemorphjobs.pipemorph.io")
    columns = crd["spec"]["versions"][0]["additionalPrinterColumns"]
    crd["spec"]["versions"][0]["additionalPrinterColumns"] = columns[:1]
    edit = {"spec": {"versions": crd["spec"]["versions"]}}
    cluster.client.patch("crds", "pipemorphjobs.pipemorph.io", edit)
    # An edit by hand is a conflict under server-side apply; the chart's value holds.
    cluster.helm("upgrade", RELEASE, str(CHART), "--namespace", SYSTEM, "--force-conflicts")
    after = cluster.client.get("secrets", f"{FULL_NAME}-ingest-tls", SYSTEM)["data"]
    assert after == before, "running ranks would no longer trust the ingest"
    crd = cluster.client.get("crds", "pipemorphjobs.pipemorph.io")
    assert len(crd["spec"]["versions"][0]["additionalPrinterColumns"]) == len(columns)


def test_ranks_trust_an_authority_at_every_moment_of_its_rotation(jobs: Jobs) -> None:
    def upgrade(rotation: str) -> dict[str, str]:
        value = f"--set=ingest.tls.rotation={rotation}"
        jobs.cluster.helm("upgrade", RELEASE, str(CHART), "--namespace", SYSTEM, value)
        secret = jobs.cluster.client.get("secrets", f"{FULL_NAME}-ingest-tls", SYSTEM)
        return {key: base64.b64decode(text).decode() for key, text in secret["data"].items()}

    def others() -> list[dict[str, Any]] | None:
        try:
            found = jobs.cluster.client.list("pipemorphjobs")
        except ApiError as error:
            if error.code != HTTPStatus.TOO_MANY_REQUESTS:
                raise
            return None  # The definition was changed just now: its storage is not there yet.
        return [job for job in found if "deletionTimestamp" not in job["metadata"]]

    # Objects of other tests go with their namespaces.
    wait_for("no other job to be there", lambda: others() == [], 120.0)
    before = upgrade("")
    with pytest.raises(TestbedError, match="no new authority to switch to"):
        upgrade("switch")
    jobs.apply(manifest("early", stages=1))
    jobs.run("early", 1)
    begun = upgrade("begin")
    assert begun["tls.crt"] == before["tls.crt"]
    assert is_issued_by(before["tls.crt"], begun["ca.crt"])
    assert upgrade("begin") == begun, "a second authority was made"
    with pytest.raises(TestbedError, match=f"ranks of {jobs.namespace}/early trust only the old"):
        upgrade("switch")
    jobs.patch("early", {"suspend": True})
    jobs.wait("early", "Suspended")
    switched = upgrade("switch")
    assert switched["tls.crt"] == begun["next-tls.crt"]
    assert not is_issued_by(switched["tls.crt"], before["ca.crt"])
    for trusted in (begun["ca.crt"], switched["ca.crt"]):
        for certificate in (before["tls.crt"], switched["tls.crt"]):
            assert is_issued_by(certificate, trusted), "ranks would lose the ingest"
    assert upgrade("switch") == switched
    with pytest.raises(TestbedError, match="a rotation is not finished"):
        upgrade("begin")
    after = upgrade("")
    assert after["tls.crt"] == switched["tls.crt"]
    assert is_issued_by(after["tls.crt"], after["ca.crt"])
    assert not is_issued_by(before["tls.crt"], after["ca.crt"])
    assert set(after) == set(before)
    assert upgrade("") == after


def test_both_processes_are_replaced_within_seconds_of_their_nodes_loss() -> None:
    extra = {"key": "gpu", "operator": "Exists"}
    made = rendered(tolerations=[extra], lostNodeSeconds=7)
    for document in (d for d in made if d["kind"] == "Deployment"):
        *lost, own = document["spec"]["template"]["spec"]["tolerations"]
        found = {(t["key"], t["effect"], t["tolerationSeconds"]) for t in lost}
        keys = ("not-ready", "unreachable")
        assert found == {(f"node.kubernetes.io/{key}", "NoExecute", 7) for key in keys}
        assert own == extra
    by_kind = {(d["kind"], d["metadata"]["name"]): d for d in made}
    for name in ("x-pipemorph-operator", "x-pipemorph-operator-ingest"):
        deployed = by_kind["Deployment", name]["spec"]
        assert deployed["replicas"] == 2
        assert deployed["strategy"]["type"] == "RollingUpdate"
        pod = deployed["template"]["spec"]
        assert f"--lease=sys/{name}" in pod["containers"][0]["args"]
        labels = deployed["selector"]["matchLabels"]
        spread = pod["topologySpreadConstraints"]
        assert [s["labelSelector"]["matchLabels"] for s in spread] == [labels] * 2
        budget = by_kind["PodDisruptionBudget", name]["spec"]
        assert (budget["maxUnavailable"], budget["selector"]["matchLabels"]) == (1, labels)
    # The ingest labels its pod that leads, and the Service selects this label, too.
    (container,) = pod["containers"]
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    assert {f"--pods={selector}", "--identity=$(POD_NAME)"} < {*container["args"]}
    assert "POD_NAME" in {each["name"] for each in container["env"]}
    service = by_kind["Service", "x-pipemorph-operator-ingest"]["spec"]["selector"]
    assert service == labels | {LABEL_LEADER: "true"}
    alone = rendered(**{"operator.replicas": 1, "ingest.replicas": 1})
    assert "PodDisruptionBudget" not in {d["kind"] for d in alone}


def test_the_chart_grants_no_more_than_it_must() -> None:
    for document in rendered():
        for rule in document.get("rules") or ():
            assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
            if "secrets" in rule["resources"]:
                assert set(rule["verbs"]) == {"create", "delete"}, "the operator reads secrets"
            if "networkpolicies" in rule["resources"]:
                assert rule["verbs"] == ["create"]
        if document["kind"] == "Deployment":
            pod = document["spec"]["template"]["spec"]
            assert pod["securityContext"]["runAsNonRoot"] is True
            for container in pod["containers"]:
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                assert {"livenessProbe", "readinessProbe", "resources"} <= set(container)


def test_without_network_policies_of_jobs_there_is_no_right_to_make_any() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"team": "watch"}}}]
    for enabled in (True, False):
        made = rendered(
            **{"networkPolicy.jobs.enabled": enabled, "networkPolicy.metricsFrom": peers}
        )
        text = json.dumps(made)
        assert ('"networkpolicies"' in text) is enabled
        assert ('"--network-policies"' in text) is enabled
        arguments = [
            argument
            for d in made
            if d["kind"] == "Deployment"
            for argument in d["spec"]["template"]["spec"]["containers"][0]["args"]
        ]
        passed = [json.loads(a.partition("=")[2]) for a in arguments if "metrics-from" in a]
        assert passed == ([peers] if enabled else [])


def test_no_account_has_rights_to_nodes() -> None:
    made = rendered()
    rules = [rule for document in made for rule in document.get("rules") or ()]
    assert not [rule for rule in rules if {"nodes", "nodes/status"} & {*rule["resources"]}]
    (ingest,) = (
        d["rules"]
        for d in made
        if d["kind"] == "ClusterRole" and d["metadata"]["name"].endswith("sys-ingest")
    )
    assert [r["verbs"] for r in ingest if r["resources"] == ["pods"]] == [["get"]]


@pytest.mark.parametrize(
    "value", ["fabric.enabled=false", "fabric.taint.enabled=true", "fabric.rackLabel=rack"]
)
def test_removed_values_are_refused_with_their_replacement(value: str) -> None:
    with pytest.raises(TestbedError, match="fabric: was removed; nodes that several jobs accuse"):
        rendered(f"--set={value}")


def test_a_namespaced_installation_has_no_rights_elsewhere() -> None:
    made = rendered(watchNamespaces=["a", "b"])
    bound = [
        document["roleRef"]["name"] for document in made if document["kind"] == "ClusterRoleBinding"
    ]
    assert bound == [f"{FULL_NAME.replace(RELEASE, 'x')}-sys-tokenreview"]
    roles = [d for d in made if d["kind"] == "Role"]
    assert {d["metadata"]["namespace"] for d in roles} == {"a", "b", "sys", "default"}
    own = [rule for d in roles if d["metadata"]["namespace"] == "sys" for rule in d["rules"]]
    kinds = {kind for rule in own for kind in rule["resources"]}
    assert kinds == {"leases", "events", "pods"}
    arguments = [
        argument
        for document in made
        if document["kind"] == "Deployment"
        for argument in document["spec"]["template"]["spec"]["containers"][0]["args"]
    ]
    assert arguments.count("--namespace=a") == 2


def test_events_may_be_written_where_there_are_jobs_and_of_nodes() -> None:
    """Events of jobs, and of both Leases where the release is, may be written; no one else may
    write elsewhere, and the operator alone reads those of its jobs."""

    def granted(**values: Any) -> set[tuple[str, str, str]]:
        return {
            (
                d["metadata"].get("namespace", "everywhere"),
                d["metadata"]["name"],
                " ".join(r["verbs"]),
            )
            for d in rendered(**values)
            for r in d.get("rules") or ()
            if "events" in r["resources"]
        }

    name = f"{FULL_NAME.replace(RELEASE, 'x')}"
    leases = {("sys", f"{name}{part}-lease", "create patch") for part in ("", "-ingest")}
    assert granted(watchNamespaces=["a"]) == {
        *leases,
        ("default", f"{name}-sys-node-events", "create patch"),
        ("a", f"{name}-sys", "create list patch"),
        ("a", f"{name}-sys-ingest", "create patch"),
    }
    assert granted() == {
        *leases,
        ("everywhere", f"{name}-sys", "create list patch"),
        ("everywhere", f"{name}-sys-ingest", "create patch"),
    }


def test_a_namespaced_operator_runs_with_those_rights_alone(jobs: Jobs, tmp_path: Path) -> None:
    cluster = jobs.cluster
    jobs.installation.operator.kill()
    values = ["crds.enabled=false", f"watchNamespaces={{{jobs.namespace}}}"]
    release = f"ns-{jobs.namespace}"
    account = f"{release}-pipemorph-operator"
    lease = f"--lease={jobs.namespace}/{account}"
    cluster.helm(
        "install", release, str(CHART), "-n", jobs.namespace, *(f"--set={v}" for v in values)
    )
    token = cluster.service_account_token(jobs.namespace, account)
    program = Program(
        "namespaced",
        "pipemorph_operator",
        [
            "--ingest-url=https://ingest:8443",
            f"--namespace={jobs.namespace}",
            "--namespace=gone",  # The namespace's Roles have gone with it.
            lease,
        ],
        tmp_path,
        cluster.kubeconfig_of_token(token, release),
    )
    program.start()
    try:
        jobs.apply(manifest("inside", stages=2))
        with cluster.namespace() as elsewhere:
            outside = Jobs(jobs.installation, elsewhere)
            outside.apply(manifest("outside", stages=1))
            pods = jobs.run("inside", 2)
            jobs.cluster.client.delete("pods", pods[0]["metadata"]["name"], jobs.namespace)
            jobs.wait("inside", "Failed")
            assert outside.get("outside")["status"] == UNSEEN
        assert "Jobs of namespace gone: 403 Forbidden" in program.says()
        assert program.metric("pipemorph_watch_refused", job_namespace="gone") == 3
    finally:
        program.process.stop()
        cluster.helm("uninstall", release, "-n", jobs.namespace)


DIGEST = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ({}, f"pipemorph/operator:{__version__}"),
        ({"tag": "1.2"}, "pipemorph/operator:1.2"),
        ({"digest": DIGEST}, f"pipemorph/operator@{DIGEST}"),
        ({"digest": DIGEST, "tag": "1.2"}, f"pipemorph/operator:1.2@{DIGEST}"),
        ({"repository": f"host:5000/op@{DIGEST}"}, f"host:5000/op@{DIGEST}"),
    ],
)
def test_the_image_may_be_named_by_its_digest(image: dict[str, str], expected: str) -> None:
    made = rendered(**{f"image.{key}": value for key, value in image.items()})
    pods = [d["spec"]["template"]["spec"] for d in made if d["kind"] == "Deployment"]
    pods += [d["spec"] for d in made if d["kind"] == "Pod"]
    assert [c["image"] for pod in pods for c in pod["containers"]] == [expected] * 3


def test_an_image_with_a_digest_takes_no_tag() -> None:
    with pytest.raises(TestbedError, match=r"which has a digest; expected empty image\.tag"):
        rendered(**{"image.repository": f"op@{DIGEST}", "image.tag": "1.2"})


def test_two_installations_of_one_name_share_nothing_in_the_cluster() -> None:
    found: list[set[tuple[str, str]]] = []
    for namespace in ("one", "two"):
        made = rendered("--set=crds.enabled=false", namespace=namespace)
        found.append(
            {(d["kind"], d["metadata"]["name"]) for d in made if "namespace" not in d["metadata"]}
        )
    assert len(found[0]) == 16, "roles of both programs, for TokenReviews and for people; policies"
    assert not found[0] & found[1]


def test_the_pod_of_helm_test_runs_under_quotas_and_with_meshes(jobs: Jobs) -> None:
    values = {"podLabels.team": "a", "podAnnotations.note": "b", "test.labels.mesh": "off"}
    made = rendered(**values)
    (pod,) = [each for each in made if each["kind"] == "Pod"]
    metadata, (container,) = pod["metadata"], pod["spec"]["containers"]
    assert metadata["labels"].items() >= {"team": "a", "mesh": "off"}.items()
    assert metadata["annotations"]["note"] == "b"
    assert metadata["annotations"]["sidecar.istio.io/inject"] == "false"
    assert metadata["annotations"]["helm.sh/hook"] == "test"
    resources = container["resources"]
    quota = {f"{side}.{name}": "9Gi" for side in resources for name in resources[side]}
    assert len(quota) == 4
    jobs.cluster.client.create(
        "resourcequotas", {"metadata": {"name": "all"}, "spec": {"hard": quota}}, jobs.namespace
    )
    pod["metadata"] = {"name": "test", "namespace": jobs.namespace}
    jobs.cluster.apply(pod, f"--namespace={jobs.namespace}")


def test_the_chart_is_a_dependency_with_a_condition(jobs: Jobs, tmp_path: Path) -> None:
    parent = {"apiVersion": "v2", "name": "platform", "version": "1.0.0"}
    own = {
        "name": "pipemorph-operator",
        "version": __version__,
        "condition": "pipemorph-operator.enabled",
    }
    (tmp_path / "Chart.yaml").write_text(json.dumps(parent | {"dependencies": [own]}))
    shutil.copytree(CHART, tmp_path / "charts/pipemorph-operator")
    for enabled in ("true", "false"):
        sets = [f"--set=pipemorph-operator.enabled={enabled}", "--set=global.region=x"]
        text = jobs.cluster.helm("template", "x", str(tmp_path), *sets)
        assert ("kind: Deployment" in text) is (enabled == "true")


def test_what_running_jobs_need_outlives_the_chart() -> None:
    def retained(**values: Any) -> set[str]:
        keep = "helm.sh/resource-policy"
        return {
            each["kind"]
            for each in rendered(**values)
            if (each["metadata"].get("annotations") or {}).get(keep) == "keep"
        }

    assert retained() == {"CustomResourceDefinition", "Secret"}
    assert retained(**{"crds.keep": False}) == set()
    budgets = [e for e in rendered() if e["kind"] == "PodDisruptionBudget"]
    assert [e["spec"]["unhealthyPodEvictionPolicy"] for e in budgets] == ["AlwaysAllow"] * 2


def test_the_authority_is_the_same_after_an_uninstallation(jobs: Jobs) -> None:
    """Ranks of jobs that ran meanwhile trust the ingest that comes."""
    release, where = f"again-{jobs.namespace}", ("-n", jobs.namespace)
    values = ["--set=crds.enabled=false", f"--set=watchNamespaces={{{jobs.namespace}}}"]
    found = []
    for _ in range(2):
        jobs.cluster.helm("install", release, str(CHART), *where, *values)
        secret = f"{release}-pipemorph-operator-ingest-tls"
        found.append(jobs.cluster.client.get("secrets", secret, jobs.namespace)["data"])
        jobs.cluster.helm("uninstall", release, *where)
    assert found[0] == found[1]
    # A release under another name has another authority.
    jobs.cluster.helm("install", f"other-{jobs.namespace}", str(CHART), *where, *values)
    secret = f"other-{jobs.namespace}-pipemorph-operator-ingest-tls"
    other = jobs.cluster.client.get("secrets", secret, jobs.namespace)["data"]
    jobs.cluster.helm("uninstall", f"other-{jobs.namespace}", *where)
    assert other["ca.crt"] != found[0]["ca.crt"]


@pytest.mark.parametrize("image", ["", "trainer:1"])
def test_an_installation_without_a_trainer_image_says_what_is_missing(
    jobs: Jobs, image: str
) -> None:
    where = ("--namespace", "sys", "--dry-run=client", f"--set=trainer.image={image}")
    said = jobs.cluster.helm("install", "x", str(CHART), *where)
    assert ("--set trainer.image=" in said) is (not image)


@pytest.mark.parametrize(
    ("value", "retained"),
    [
        ("crds.keep=true", {"crd", "secret"}),
        ("crds.keep=false", set()),
        ("crds.enabled=false", {"secret"}),
        ("ingest.tls.existingSecret=mine", {"crd"}),
    ],
)
def test_notes_name_only_objects_of_the_chart_for_deletion(
    jobs: Jobs, value: str, retained: set[str]
) -> None:
    where = ("--namespace", "sys", "--dry-run=client", f"--set={value}")
    said = jobs.cluster.helm("install", "x", str(CHART), *where)
    assert {kind for kind in ("crd", "secret") if f"kubectl delete {kind} " in said} == retained


def added(said: Any, live: Any) -> list[str]:
    """Additions that a diff shows of a manifest: Argo CD compares maps by keys, and whole lists."""
    if isinstance(said, dict) and isinstance(live, dict):
        return [f"{k}.{each}" for k in said for each in added(said[k], live.get(k))]
    return [] if said == live else [f" is {live}, and not {said}"]


def test_two_server_side_managers_apply_one_manifest(jobs: Jobs) -> None:
    """Argo CD and a person apply one manifest: the API server must not add to what both say."""
    for path in EXAMPLES:
        (manifest,) = yaml.safe_load_all(path.read_text())
        where = ("-n", jobs.namespace, "-f", str(path))
        for manager in ("argocd", "someone"):
            how = ("apply", "--server-side", f"--field-manager={manager}", "-o", "json")
            live = json.loads(jobs.cluster.kubectl(*how, *where))
        again = json.loads(jobs.cluster.kubectl(*how, "--dry-run=server", *where))
        assert again["spec"] == live["spec"], path.name
        if manifest["kind"] == "PipeMorphJob":
            assert added(manifest["spec"], live["spec"]) == [], path.name
        jobs.cluster.kubectl("delete", "--wait=false", *where)


def test_values_that_do_not_exist_are_refused() -> None:
    for key, value in (("imagee", 1), ("operator.workers", 0), ("crds.enabled", "yes")):
        with pytest.raises(TestbedError, match="schema"):
            rendered(**{key: value})


def test_monitors_find_the_ports_and_pods_there_are(jobs: Jobs) -> None:
    """Kinds of the Prometheus operator, which does not run here to judge them."""
    on = {"metrics.serviceMonitor.enabled": True, "metrics.podMonitor.enabled": True}
    made = rendered(**on, watchNamespaces=["a", "b"])
    by_kind = {document["kind"]: document for document in made}
    pods = by_kind["PodMonitor"]["spec"]
    assert pods["namespaceSelector"] == {"matchNames": ["a", "b"]}
    (label,) = pods["selector"]["matchExpressions"]
    parallelism = {"stages": 1, "replicas": 8, "ranksPerPod": 8}
    jobs.apply(manifest("seen", stages=1, parallelism=parallelism))
    pod = jobs.pods("seen", 1)[0]
    assert label["key"] in pod["metadata"]["labels"]
    ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    assert {endpoint["port"] for endpoint in pods["podMetricsEndpoints"]} == ports
    services = by_kind["ServiceMonitor"]["spec"]
    found = [
        document
        for document in made
        if document["kind"] == "Service"
        and services["selector"]["matchLabels"].items() <= document["metadata"]["labels"].items()
    ]
    assert len(found) == 2, "operator and ingest"
    assert {p["name"] for document in found for p in document["spec"]["ports"]} == {"metrics"}
    everywhere = rendered(**on)
    any_namespace = next(d for d in everywhere if d["kind"] == "PodMonitor")["spec"]
    assert any_namespace["namespaceSelector"] == {"any": True}
    assert not [d for d in rendered() if d["kind"].endswith("Monitor")]


def test_everything_the_chart_can_make_is_taken_by_the_api_server(jobs: Jobs) -> None:
    made = rendered(
        **{
            "networkPolicy.enabled": True,
            "metrics.dashboard.enabled": True,
            "rbac.volcano": True,
            "rbac.coscheduling": True,
            "crds.enabled": False,
        },
    )
    for document in made:
        if document["metadata"].get("namespace") == "sys":
            document["metadata"]["namespace"] = jobs.namespace
    text = yaml.safe_dump_all(made)
    jobs.cluster.kubectl("apply", "--dry-run=server", "-f", "-", input=text)
    dashboard = next(d for d in made if d["metadata"]["name"].endswith("dashboard"))
    for text in dashboard["data"].values():
        assert json.loads(text)["panels"]
