"""Placement and resources of ranks: ``spec.placement`` on the user's template."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from operator_objects import (
    CONFIG,
    NODE_TERMS,
    RDMA,
    SPREAD,
    UID,
    Object,
    attempt,
    body,
    given_with,
    template,
    trainer,
)

from pipemorph.errors import InputError
from pipemorph_operator.kube.job_object import read_job
from pipemorph_operator.resources import Attempt, ResourceBuildError, build_objects


def test_rdma_networks_and_memory() -> None:
    placement = {
        "rdma": {"resourceName": "rdma/hca_shared_devices_a", "count": 2},
        "networks": ["rail-0", "other/rail-1@net1"],
        "sharedMemory": "8Gi",
    }
    made = template(attempt(placement=placement))
    container = made["spec"]["containers"][0]
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["rdma/hca_shared_devices_a"] == "2"
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert made["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == (
        "rail-0, other/rail-1@net1"
    )
    shm = next(v for v in made["spec"]["volumes"] if v["name"] == "pipemorph-shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert container["command"][3:6] == ["--rdma", "--memlock", f"--shm={8 << 30}"]


@pytest.mark.parametrize(
    ("pod", "container", "added"),
    [
        ({}, {}, True),
        ({"runAsUser": 0}, {}, True),
        ({"runAsUser": 1000}, {}, False),
        ({"runAsNonRoot": True}, {}, False),
        ({}, {"runAsUser": 1000}, False),
        ({"runAsUser": 1000}, {"runAsUser": 0}, True),
    ],
)
def test_a_capability_is_added_for_user_0_alone(
    pod: Object, container: Object, added: bool
) -> None:
    """Kubernetes gives it to no other, and a policy may refuse it to all."""
    given = given_with("trainer.securityContext", container)
    given["spec"]["securityContext"] = pod
    context = trainer(attempt(template=given, placement=RDMA))["securityContext"]
    assert (context.get("capabilities") == {"add": ["IPC_LOCK"]}) is added


def test_a_container_of_the_operators_own_gives_up_what_it_does_not_need() -> None:
    strict = {
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "allowPrivilegeEscalation": False,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert trainer(attempt())["securityContext"] == strict
    locked = trainer(attempt(placement=RDMA))["securityContext"]
    assert locked["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert "runAsNonRoot" not in locked, "only user 0 is given the capability"
    theirs = {"spec": {"containers": [{"name": "trainer", "image": "i"}]}}
    assert "securityContext" not in trainer(attempt(template=theirs))


@pytest.mark.parametrize("path", ["/dev/shm", "/dev/shm/"])
def test_a_shared_memory_of_the_templates_own_stays(path: str) -> None:
    """Shared memory is in most templates for GPUs, and two mounts of one path are refused."""
    own = {"name": "shm", "mountPath": path}
    given = given_with("trainer.volumeMounts", [own])
    given["spec"]["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    made = template(attempt(template=given, placement={"sharedMemory": "8Gi"}))["spec"]
    (container,) = made["containers"]
    assert [m for m in container["volumeMounts"] if m["mountPath"].startswith("/dev/")] == [own]
    assert "pipemorph-shm" not in [volume["name"] for volume in made["volumes"]]
    assert f"--shm={8 << 30}" in container["command"], "its size is still looked at"


def test_a_shared_memory_of_no_bytes() -> None:
    (container,) = template(attempt(placement={"sharedMemory": "0Gi"}))["spec"]["containers"]
    assert "--shm=0" in container["command"]


def test_a_spread_of_the_templates_own_stays() -> None:
    own = {"maxSkew": 3, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    given = given_with("spec.topologySpreadConstraints", [own])
    made = template(attempt(template=given, placement=SPREAD))["spec"]
    assert made["topologySpreadConstraints"] == [own]
    other = {"topology": {"key": "rack", "mode": "spread"}}
    both = template(attempt(template=given, placement=other))["spec"]
    assert [c["topologyKey"] for c in both["topologySpreadConstraints"]] == ["zone", "rack"]


def test_one_pod_per_node_and_topology() -> None:
    job = {"matchLabels": {"pipemorph.io/job-uid": UID}}
    apart = template(attempt(placement={"onePodPerNode": True}))["spec"]["affinity"]
    term = apart["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert term == {"topologyKey": "kubernetes.io/hostname", "labelSelector": job}
    pack = {"topology": {"key": "zone", "required": True}}
    together = template(attempt(placement=pack))["spec"]["affinity"]["podAffinity"]
    assert together["requiredDuringSchedulingIgnoredDuringExecution"][0]["topologyKey"] == "zone"
    prefer = template(attempt(placement={"topology": {"key": "zone"}}))["spec"]["affinity"]
    assert "preferredDuringSchedulingIgnoredDuringExecution" in prefer["podAffinity"]
    spread = template(attempt(placement={"topology": {"key": "zone", "mode": "spread"}}))
    assert spread["spec"]["topologySpreadConstraints"][0]["whenUnsatisfiable"] == "ScheduleAnyway"


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("mode", ["pack", "spread"])
def test_ranks_go_by_those_of_their_own_attempt(mode: str, required: bool) -> None:
    """A pod of an earlier attempt that cannot end, on a dead rack, would hold them there."""
    placement = {"topology": {"key": "rack", "mode": mode, "required": required}}
    made = template(attempt(3, placement=placement))["spec"]
    made = made["affinity"]["podAffinity"] if mode == "pack" else made
    text = json.dumps(made.get("topologySpreadConstraints", made))
    assert '"pipemorph.io/attempt": "3"' in text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "rail-0, other/rail-1@net1"),
        ("mine", "mine, rail-0, other/rail-1@net1"),
        (
            '[{"name": "mine", "ips": ["10.0.0.1/24"]}]',
            [
                {"name": "mine", "ips": ["10.0.0.1/24"]},
                {"name": "rail-0"},
                {"name": "rail-1", "namespace": "other", "interface": "net1"},
            ],
        ),
    ],
)
def test_networks_are_added_in_the_form_that_the_template_has(given: str, expected: Any) -> None:
    marks = {"k8s.v1.cni.cncf.io/networks": given}
    placement = {"networks": ["rail-0", "other/rail-1@net1"]}
    made = template(
        attempt(template=given_with("metadata.annotations", marks), placement=placement)
    )
    found = made["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"]
    assert (found if isinstance(expected, str) else json.loads(found)) == expected


def test_networks_that_are_no_json_are_named() -> None:
    marks = {"k8s.v1.cni.cncf.io/networks": '[{"name": "mine"'}
    given = given_with("metadata.annotations", marks)
    with pytest.raises(ResourceBuildError) as caught:
        template(attempt(template=given, placement={"networks": ["rail-0"]}))
    assert caught.value.reason == "InvalidSpec"
    where = 'spec.template.metadata.annotations["k8s.v1.cni.cncf.io/networks"]: is invalid JSON'
    assert caught.value.message.startswith(where)


def test_excluded_nodes_are_in_no_alternative() -> None:
    terms = [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]} for _ in range(2)]
    given = {
        "spec": {
            "containers": [{"name": "trainer", "image": "i"}],
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
                }
            },
        }
    }
    made = attempt(excluded=("n2",), template=given, placement={"excludeNodes": ["n1"]})
    found = template(made)["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert len(found) == 2
    for term in found:
        assert term["matchExpressions"][0]["key"] == "gpu"
        # The API server takes one node per requirement.
        assert term["matchFields"] == [
            {"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("n1", "n2")
        ]


def test_unwanted_nodes_are_used_where_there_are_no_others() -> None:
    job = body(placement={"excludeNodes": ["n1"]})
    made = Attempt(read_job(job), UID, 2, (), ("n2", "n1"))
    found = template(made)["spec"]["affinity"]["nodeAffinity"]
    (term,) = found["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["preference"]["matchFields"] == [
        {"key": "metadata.name", "operator": "NotIn", "values": ["n2"]}
    ]
    (hard,) = found[NODE_TERMS]["nodeSelectorTerms"]
    assert [field["values"] for field in hard["matchFields"]] == [["n1"]]


KUEUE: Object = {"kueue": {"queue": "q"}}
RACK: Object = {"key": "rack", "required": True, "per": "pipeline"}
FOUR: Object = {"stages": 4, "replicas": 3, "order": ["dp_replicate", "pp"]}


def test_kueue_keeps_each_pipeline_together() -> None:
    made = attempt(stages=4, parallelism=FOUR, placement={"gang": KUEUE, "topology": RACK})
    found = template(made)
    marks = found["metadata"]["annotations"]
    assert marks["kueue.x-k8s.io/podset-slice-required-topology"] == "rack"
    assert marks["kueue.x-k8s.io/podset-slice-size"] == "4"
    assert "kueue.x-k8s.io/podset-required-topology" not in marks
    assert "affinity" not in found["spec"], "it would keep the whole job together"
    mesh = made.job.spec.parallelism.mesh
    for column in range(3):
        assert {mesh.find_rank(stage, column) // 4 for stage in range(4)} == {column}


def test_a_slice_has_whole_pods_and_all_ranks_of_a_replica() -> None:
    cut = {
        "stages": 4,
        "replicas": 2,
        "tensor": 2,
        "ranksPerPod": 4,
        "order": ["dp_replicate", "pp", "tp"],
    }
    made = attempt(stages=4, parallelism=cut, placement={"gang": KUEUE, "topology": RACK})
    marks = template(made)["metadata"]["annotations"]
    assert marks["kueue.x-k8s.io/podset-slice-size"] == "2"


def group(**placement: Any) -> Object:
    made = attempt(stages=4, parallelism=FOUR, placement=placement)
    assert "affinity" not in template(made)["spec"]
    found: Object = next(o for o in build_objects(made, CONFIG) if o["kind"] == "PodGroup")
    return found["spec"]


def test_volcano_keeps_jobs_or_pipelines_within_hypernodes() -> None:
    volcano = {"volcano": {"tier": 2}}
    spec = group(gang=volcano, topology={"key": "rack"})
    assert spec["networkTopology"] == {"mode": "soft", "highestTierAllowed": 2}
    spec = group(gang=volcano, topology=RACK)
    assert "networkTopology" not in spec, "the pipelines may be far from each other"
    policies = spec["subGroupPolicy"]
    assert [p["name"] for p in policies] == ["pipeline-0", "pipeline-1", "pipeline-2"]
    assert policies[1]["networkTopology"] == {"mode": "hard", "highestTierAllowed": 2}
    assert policies[1]["subGroupSize"] == 4
    (selected,) = policies[1]["labelSelector"]["matchExpressions"]
    assert selected["values"] == ["4", "5", "6", "7"]


@pytest.mark.parametrize(
    ("parallelism", "placement", "said"),
    [
        ({"stages": 2, "replicas": 2}, {"gang": KUEUE, "topology": RACK},
         "placement.topology.per: is pipeline, but the ranks of a pipeline are not consecutive"),
        ({"stages": 2, "replicas": 4, "ranksPerPod": 4, "order": ["dp_replicate", "pp"]},
         {"gang": KUEUE, "topology": RACK}, "are not a multiple of parallelism.ranksPerPod"),
        ({"stages": 2}, {"topology": RACK}, "needs gang.kueue, or gang.volcano with tier"),
        ({"stages": 2}, {"gang": {"volcano": {}}, "topology": RACK}, "gang.volcano with tier"),
        ({"stages": 2}, {"gang": KUEUE, "topology": RACK | {"required": False}},
         "placement.topology.required: is false; Kueue keeps"),
        ({"stages": 2}, {"gang": KUEUE, "topology": RACK | {"mode": "spread"}},
         "mode spread needs per job"),
    ],
)  # fmt: skip
def test_pipelines_that_no_scheduler_keeps_together(
    parallelism: Object, placement: Object, said: str
) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        attempt(parallelism=parallelism, placement=placement)
