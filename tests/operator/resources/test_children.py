"""Desired objects: pure, complete, and equal to the input of the trainer's context."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_objects import (
    CONFIG,
    NODE_TERMS,
    PACK,
    RDMA,
    SPREAD,
    UID,
    attempt,
    body,
    given_with,
    template,
    trainer,
)

from pipemorph.errors import InputError
from pipemorph.spec.job_spec import JobSpec, PipeMorphJob
from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.kube.job_object import build_current_job_name, read_job
from pipemorph_operator.kube.object_facts import JobFacts
from pipemorph_operator.resources import (
    Attempt,
    ResourceBuildError,
    build_objects,
    count_idle_gpus,
    object_names,
    shares_default_shm,
)
from pipemorph_operator.resources.attempt_objects import (
    build_batch_job,
    build_config_map,
    build_engine_secret,
    build_job_file,
    build_page_secret,
    build_service,
)
from pipemorph_operator.resources.pod_builder import parse_memory_bytes
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.launcher.pod import Pod

Object = dict[str, Any]


def given_by(container: Object | None = None, **spec: Any) -> Object:
    """A template of the user's."""
    trainer = {"name": "trainer", "image": "i"} | (container or {})
    return {"spec": {"containers": [trainer]} | spec}


def volumes_of(made: Attempt) -> dict[str, Object]:
    return {each["name"]: each for each in template(made)["spec"]["volumes"]}


def env_of(made: Attempt) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in trainer(made)["env"]}


def in_pod(made: Attempt, index: int, folder: Path) -> dict[str, str]:
    """The variables of its container, and the files that they name, in a pod."""
    (folder / "job.json").write_text(build_config_map(made, CONFIG)["data"]["job.json"])
    (folder / "engine").write_text(build_engine_secret(made, "s3cret")["stringData"]["engine"])
    files = {"JOB": "job.json", "SECRET": "engine"}
    paths = {f"PIPEMORPH_{kind}_FILE": f"{folder}/{name}" for kind, name in files.items()}
    return {name: value or str(index) for name, value in env_of(made).items()} | paths


@given(
    name=st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True),
    number=st.integers(0, 99999),
    ranks=st.integers(1, 100_000),
)
def test_names_fit_whatever_the_job_is_called(name: str, number: int, ranks: int) -> None:
    made = object_names.build_attempt_name(name, UID, number, ranks)
    assert len(f"{made}-{ranks - 1}") <= 63
    service = object_names.build_service_name(name, UID)
    assert len(service) <= 63
    for each in (made, service):
        assert each[0].isalpha()
        assert each[-1].isalnum()


def test_names_differ_by_attempt_job_and_uid() -> None:
    made = {
        object_names.build_attempt_name(name, uid, number, 4)
        for name in ("a", "b" * 63, "b" * 62)
        for uid in ("u1", "u2")
        for number in (0, 1)
    }
    # Two long names are cut alike: their UIDs keep them apart, not shown here.
    assert len(made) >= 8


@pytest.mark.parametrize(
    "parallelism",
    [
        {"stages": 2, "replicas": 8, "ranksPerPod": 8},
        {"stages": 4, "stagesPerRank": 4, "replicas": 4},
        {"stages": 8, "stagesPerRank": 2, "replicas": 16, "tensor": 2, "ranksPerPod": 16},
    ],
)
def test_the_current_job_of_a_long_name_is_found(parallelism: Object) -> None:
    """A name is cut for the digits of its pods' numbers."""
    found = body("j" * 63, parallelism["stages"], parallelism=parallelism)
    for number in (0, 12):
        found["status"] = {"attempt": number}
        assert build_current_job_name(found) == Attempt(read_job(found), UID, number).name


def test_all_objects_are_owned_by_the_job_and_labelled() -> None:
    made = attempt()
    for obj in [*build_objects(made, CONFIG), build_engine_secret(made, "k")]:
        owner = obj["metadata"]["ownerReferences"][0]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("PipeMorphJob", UID, True)
        assert obj["metadata"]["labels"]["pipemorph.io/job-uid"] == UID
        assert obj["metadata"]["namespace"] == "team"


def test_only_ranks_of_the_job_reach_its_ranks_and_scrapers_their_metrics() -> None:
    peers = ({"namespaceSelector": {"matchLabels": {"team": "watch"}}},)
    config = replace(CONFIG, network_policies=True, metrics_from=peers)
    made = attempt(parallelism=EIGHT)
    policy, *others = build_objects(made, config)
    assert others == build_objects(made, CONFIG)
    own = {"matchLabels": {"pipemorph.io/job-uid": UID}}
    assert policy["metadata"]["name"] == made.service_name, "one for all attempts"
    metrics = {"ports": [{"port": 9464, "endPort": 9471}]}
    spec = {"podSelector": own, "policyTypes": ["Ingress"]}
    ranks = {"from": [{"podSelector": own}]}
    assert policy["spec"] == spec | {"ingress": [ranks, metrics | {"from": list(peers)}]}
    anybody = build_objects(made, replace(config, metrics_from=()))[0]
    assert anybody["spec"]["ingress"] == [ranks, metrics]
    spec_of = attempt(trainer={"module": "a.b", "iterations": 3, "metricsPort": 0})
    assert build_objects(spec_of, config)[0]["spec"]["ingress"] == [ranks]


def test_one_indexed_job_one_failure_ends_it() -> None:
    job = build_batch_job(attempt(parallelism={"stages": 2, "replicas": 3, "tensor": 2}), CONFIG)[
        "spec"
    ]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (12, 12, "Indexed")
    assert job["backoffLimit"] == 0
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert "onPodConditions" in job["podFailurePolicy"]["rules"][0], "policy.restart reads index 0"


EIGHT = {"stages": 2, "replicas": 8, "ranksPerPod": 8}


def test_a_pod_of_several_ranks_starts_them_with_the_launcher(tmp_path: Path) -> None:
    made = attempt(parallelism=EIGHT)
    job = build_batch_job(made, CONFIG)["spec"]
    assert (job["completions"], job["parallelism"]) == (2, 2)
    container = trainer(made)
    assert container["command"] == [
        "python", "-m", "pipemorph_trainer.preflight", "--",
        "python", "-m", "pipemorph_trainer.launcher", "--grace=28", "--",
        "python", "-m", made.job.spec.trainer.module,
    ]  # fmt: skip
    ports = [(p["name"], p["containerPort"]) for p in container["ports"]]
    assert ports[:2] == [("pm-metrics", 9464), ("pm-metrics-1", 9465)]
    assert len(ports) == 8
    env = in_pod(made, 1, tmp_path)
    pod = Pod.from_env(env)
    assert (pod.index, pod.ranks) == (1, (8, 9, 10, 11, 12, 13, 14, 15))
    own = pod.make_rank_environment(3, env)
    assert (own["RANK"], own["LOCAL_RANK"], own["WORLD_SIZE"]) == ("11", "3", "16")
    assert own["PIPEMORPH_METRICS_PORT"] == "9467"
    assert TrainerContext.from_env(own).rank == 11


def test_pods_whose_ranks_start_again_run_the_launcher_and_have_room_for_state(
    tmp_path: Path,
) -> None:
    limits = given_by({"resources": {"limits": {"memory": "3Gi"}}})
    made = attempt(failurePolicy={"maxRestarts": 1}, template=limits)
    container = trainer(made)
    assert container["command"][3:9] == [
        "--", "python", "-m", "pipemorph_trainer.launcher", "--generations", "--grace=28",
    ]  # fmt: skip
    volume = volumes_of(made)["pipemorph-kept"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": str(3 << 29)}
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "pipemorph-kept"]
    env = in_pod(made, 0, tmp_path)
    assert env["PIPEMORPH_KEPT_DIR"] == mount["mountPath"]
    pod = Pod.from_env(env)
    assert (pod.ranks, str(pod.memory_dir)) == ((0,), mount["mountPath"])


def test_pods_that_may_go_on_without_others_know_the_addresses_of_all() -> None:
    """Pods that go on without others know all addresses: any may be the first that runs."""
    fewer = {"parallelism": {"stages": 2, "replicas": 2, "minReplicas": 1}}
    made = attempt(**fewer, failurePolicy={"maxRestarts": 2, "replacementSeconds": 30})
    env = env_of(made)
    pattern = env["PIPEMORPH_POD_ADDRESS"]
    assert pattern.replace("{}", "0") == env["MASTER_ADDR"] and pattern.count("{}") == 1
    name = build_batch_job(made, CONFIG)["metadata"]["name"]
    assert pattern.startswith(f"{name}-{{}}.")
    spec = json.loads(build_job_file(made.job))["spec"]
    assert spec["parallelism"]["minReplicas"] == 1
    JobSpec.model_validate(spec)
    assert spec["failurePolicy"] == {"maxRestarts": 1}, "an edit of it changes no file"
    mine = given_by({"command": ["mine"]})
    with pytest.raises(
        ResourceBuildError, match="minReplicas is set, but ranks do not start again"
    ):
        trainer(attempt(**fewer, failurePolicy={"maxRestarts": 2}, template=mine))


def test_the_launcher_of_a_job_with_hang_seconds_gets_them(tmp_path: Path) -> None:
    """Variables carry them: the job's file has no failure policy, which may change."""
    made = attempt(failurePolicy={"hangSeconds": 7, "startSeconds": 300})
    container = trainer(made)
    assert "pipemorph_trainer.launcher" in container["command"]
    assert "--generations" not in container["command"]
    env = in_pod(made, 0, tmp_path)
    assert "failurePolicy" not in (tmp_path / "job.json").read_text()
    policy = Pod.from_env(env).policy
    assert (policy.hang_seconds, policy.start_seconds) == (7, 300)
    with pytest.raises(InputError, match=r"PIPEMORPH_HANG_SECONDS is 'soon'; expected seconds"):
        Pod.from_env(env | {"PIPEMORPH_HANG_SECONDS": "soon"})


@pytest.mark.parametrize("own", [False, True])
def test_ranks_that_do_not_start_again_have_no_volume_for_state(own: bool) -> None:
    """The job has no restarts, or a command of the template's, which takes the launcher's place."""
    mine = given_by({"command": ["mine"]})
    more: Object = {"failurePolicy": {"maxRestarts": 2}, "template": mine} if own else {}
    made = attempt(**more)
    container = trainer(made)
    assert ("pipemorph_trainer.launcher" in container["command"]) is not own
    assert "--generations" not in container["command"]
    assert "PIPEMORPH_KEPT_DIR" not in env_of(made)
    assert "pipemorph-kept" not in volumes_of(made)


@pytest.mark.parametrize("command", [["sh", "-c", "x -- y --generations -- z"], ["y"]])
def test_a_command_of_the_templates_may_start_ranks_again(command: list[str]) -> None:
    mine = given_by({"command": command})
    made = attempt(failurePolicy={"maxRestarts": 2}, template=mine)
    assert trainer(made)["command"] == command
    assert ("PIPEMORPH_KEPT_DIR" in env_of(made)) is (len(command) > 1)


def test_a_template_may_have_its_own_volume_for_state() -> None:
    own = {"name": "pipemorph-kept", "emptyDir": {"medium": "Memory", "sizeLimit": "7Gi"}}
    made = attempt(failurePolicy={"maxRestarts": 1}, template=given_by(volumes=[own]))
    found = template(made)["spec"]["volumes"]
    assert [v for v in found if v["name"] == "pipemorph-kept"] == [own]


@pytest.mark.parametrize(
    ("text", "found"),
    [("4096", 4096), ("1.5Gi", 3 << 29), ("2G", 2 * 10**9), ("64Ki", 1 << 16), ("3k", 3000)]
    + [("1e9", 10**9), ("1E", 10**18)]
    + [(text, None) for text in ("", "5m", "lots", "-1Gi", "1KB")],
)
def test_memory_as_people_write_it(text: str, found: int | None) -> None:
    assert parse_memory_bytes(text) == found


def test_a_command_runs_in_place_of_the_module() -> None:
    command = ["torch-script", "--lr", "3e-4"]
    made = attempt(trainer={"command": command, "iterations": 4})
    assert trainer(made)["command"] == [
        "python", "-m", "pipemorph_trainer.preflight", "--",
        "python", "-m", "pipemorph_trainer.launcher", "--grace=28", "--", *command,
    ]  # fmt: skip


def test_a_short_grace_period_is_the_launchers_as_well() -> None:
    soon = given_by(terminationGracePeriodSeconds=5)
    made = trainer(attempt(parallelism=EIGHT, template=soon))
    assert "--grace=3" in made["command"]
    assert {"name": "PIPEMORPH_GRACE_SECONDS", "value": "2"} in made["env"]


@pytest.mark.parametrize(("gpus", "ranks", "idle"), [("8", 1, 7), ("8", 8, 0), ("1", 1, 0)])
def test_gpus_without_a_rank_are_counted(gpus: str, ranks: int, idle: int) -> None:
    limits = {"cpu": "16", "nvidia.com/gpu": gpus}
    given = given_by({"resources": {"limits": limits}})
    made = attempt(parallelism=EIGHT | {"ranksPerPod": ranks}, template=given)
    assert count_idle_gpus(made) == idle


@pytest.mark.parametrize(
    ("ranks", "placement", "pod", "mounts", "small"),
    [
        (8, None, {}, [], True),
        (8, None, {}, None, True),
        (8, {"onePodPerNode": True}, {}, [{"name": "v", "mountPath": "/data"}], True),
        (1, None, {}, [], False),
        (8, {"sharedMemory": "8Gi"}, {}, [], False),
        (8, None, {"hostIPC": True}, [], False),
        (8, None, {}, [{"name": "v", "mountPath": "/dev/shm/"}], False),
    ],
)
def test_a_small_shared_memory_of_several_ranks_is_seen(
    ranks: int, placement: Any, pod: dict[str, Any], mounts: Any, small: bool
) -> None:
    given = given_by({"volumeMounts": mounts}, volumes=[{"name": "v", "emptyDir": {}}], **pod)
    more = {"placement": placement} if placement else {}
    made = attempt(parallelism=EIGHT | {"ranksPerPod": ranks}, template=given, **more)
    assert shares_default_shm(made) is small


def test_the_service_gives_names_before_pods_are_ready() -> None:
    made = build_service(attempt(3))
    assert made["spec"]["clusterIP"] == "None"
    assert made["spec"]["publishNotReadyAddresses"] is True
    assert made == build_service(attempt(4)), "the service changes with the attempt"


def expanded(value: str, env: dict[str, str]) -> str:
    """Kubernetes' rule: ``$$`` is a dollar, ``$(NAME)`` the variable if there is one."""

    def one(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else env.get(found[1], found[0])

    return re.sub(r"\$\$|\$\((\w+)\)", one, value)


def test_the_environment_is_what_the_trainers_context_reads(tmp_path: Path) -> None:
    made = attempt(
        7, trainer={"module": "a.b", "iterations": 3, "args": {"x": "$(RANK) $$(RANK) $"}}
    )
    env = in_pod(made, 1, tmp_path)
    mounts = {m["mountPath"]: m["name"] for m in trainer(made)["volumeMounts"]}
    assert mounts["/etc/pipemorph/job"] == "pipemorph-job"
    # Paths as the kubelet expands and mounts them.
    env = {name: expanded(value, env) for name, value in env.items()}
    context = TrainerContext.from_env(env)
    assert (context.rank, context.world_size, context.attempt) == (1, 2, 7)
    assert context.master_addr == made.master_address
    assert context.namespace == "team"
    assert context.secret == b"s3cret"
    assert context.ingest_url == CONFIG.ingest_url
    assert context.args == {"x": "$(RANK) $$(RANK) $"}
    assert str(context.token_file) == "/etc/pipemorph/token/token"
    assert context.job.spec.schedule == made.job.spec.schedule
    assert env["PIPEMORPH_CA_FILE"] == "/etc/pipemorph/job/ca.crt"
    assert build_config_map(made, CONFIG)["data"]["ca.crt"] == "PEM"


@pytest.mark.parametrize(("pem", "files"), [("PEM", ["ca.crt"]), ("", [])])
def test_ranks_are_given_the_path_of_a_ca_only_if_there_is_one(pem: str, files: list[str]) -> None:
    config = replace(CONFIG, ca_pem=pem)
    env = template(attempt(), config)["spec"]["containers"][0]["env"]
    paths = [each["value"] for each in env if each["name"] == "PIPEMORPH_CA_FILE"]
    assert paths == [f"/etc/pipemorph/job/{name}" for name in files]
    assert set(build_config_map(attempt(), config)["data"]) == {"job.json", *files}


def test_metrics_have_a_named_port_unless_the_user_wants_none() -> None:
    made = trainer(attempt())
    assert {"name": "pm-metrics", "containerPort": 9464} in made["ports"]
    assert {"name": "PIPEMORPH_METRICS_PORT", "value": "9464"} in made["env"]
    none = trainer(attempt(trainer={"module": "a.b", "iterations": 3, "metricsPort": 0}))
    assert "ports" not in none
    assert not [v for v in none["env"] if v["name"] == "PIPEMORPH_METRICS_PORT"]
    theirs = [{"name": "pm-metrics", "containerPort": 1}]
    assert trainer(attempt(template=given_by({"ports": theirs})))["ports"] == theirs
    on_the_node = given_by(hostNetwork=True)
    assert "ports" not in trainer(attempt(template=on_the_node)), "one rank per node could start"
    nonsense = given_by({"ports": "all"})
    assert trainer(attempt(template=nonsense))["ports"] == "all", "the API server's to refuse"


def test_the_rank_is_the_completion_index() -> None:
    rank = next(v for v in trainer(attempt())["env"] if v["name"] == "RANK")
    assert rank["valueFrom"]["fieldRef"]["fieldPath"] == (
        "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    )


def test_the_token_is_for_this_job_alone() -> None:
    made = attempt()
    token = volumes_of(made)["pipemorph-token"]["projected"]["sources"][0]["serviceAccountToken"]
    assert token["audience"] == f"pipemorph.io/jobs/team/gpt/{UID}"
    assert template(made)["spec"]["automountServiceAccountToken"] is False


def test_secrets_and_files_are_of_one_attempt_and_read_only() -> None:
    first, second = build_engine_secret(attempt(0), "a"), build_engine_secret(attempt(1), "b")
    assert first["metadata"]["name"] != second["metadata"]["name"]
    assert first["immutable"] is True
    assert build_config_map(attempt(), CONFIG)["immutable"] is True
    assert all(m["readOnly"] for m in trainer(attempt())["volumeMounts"])


def test_launchers_have_the_token_of_the_live_page_and_others_have_not() -> None:
    starts = attempt(failurePolicy={"maxRestarts": 0})
    page = build_page_secret(starts, "t")
    assert page["metadata"]["name"] != build_engine_secret(starts, "k")["metadata"]["name"]
    assert (page["type"], page["stringData"]) == ("pipemorph.io/page", {"token": "t"})
    assert volumes_of(starts)["pipemorph-page"]["secret"]["secretName"] == page["metadata"]["name"]
    env, mounts = env_of(starts), trainer(starts)["volumeMounts"]
    (mount,) = [each for each in mounts if each["name"] == "pipemorph-page"]
    assert env["PIPEMORPH_PAGE_TOKEN_FILE"] == f"{mount['mountPath']}/token"
    assert (env["PIPEMORPH_PAGE_PORT"], mount["readOnly"]) == ("9450", True)
    without = attempt(template=given_by({"command": ["mine"]}))
    assert "pipemorph-page" not in volumes_of(without)
    assert "PIPEMORPH_PAGE_PORT" not in env_of(without)


def test_the_job_file_is_a_job_without_what_ranks_do_not_need() -> None:
    text = build_job_file(attempt(template=given_by(), placement={"onePodPerNode": True}).job)
    job = PipeMorphJob.model_validate_json(text)
    assert (job.spec.template, job.spec.placement) == (None, None)
    assert "adaptation" not in json.loads(text)["spec"], "defaults an older trainer may not know"


def test_ranks_can_read_the_file_of_a_job_whose_layers_move() -> None:
    moves: Object = {"adaptation": {"relayout": True}, "failurePolicy": {"maxRestarts": 5}}
    text = build_job_file(attempt(parallelism={"stages": 2, "layers": 6}, **moves).job)
    job = PipeMorphJob.model_validate_json(text)
    assert job.spec.adaptation.relayout
    assert json.loads(text)["spec"]["failurePolicy"] == {"maxRestarts": 1}


def test_the_users_template_stays_and_ours_is_added() -> None:
    given = {
        "metadata": {"labels": {"team": "x"}, "annotations": {"a": "b"}},
        "spec": {
            "schedulerName": "mine",
            "volumes": [{"name": "data", "emptyDir": {}}],
            "initContainers": [{"name": "init", "image": "i"}],
            "containers": [
                {"name": "side", "image": "s"},
                {
                    "name": "trainer",
                    "image": "i",
                    "env": [{"name": "OMP_NUM_THREADS", "value": "9"}],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                    "resources": {"limits": {"nvidia.com/gpu": "1"}},
                },
            ],
        },
    }
    before = json.dumps(given)
    made = template(attempt(template=given))
    assert json.dumps(given) == before, "the user's template was changed in place"
    assert made["metadata"]["labels"]["team"] == "x"
    assert made["spec"]["schedulerName"] == "mine"
    assert [c["name"] for c in made["spec"]["containers"]] == ["side", "trainer"]
    container = made["spec"]["containers"][1]
    assert [v["value"] for v in container["env"] if v["name"] == "OMP_NUM_THREADS"] == ["9"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert container["command"][-3:] == ["python", "-m", "a.b"]
    assert "command" not in made["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("more", "shared"),
    [
        ({}, True),
        ({"shareProcessNamespace": False}, False),
        ({"initContainers": [{"name": "init", "image": "i"}]}, None),
        ({"containers": [{"name": "trainer", "image": "i"}, {"name": "side", "image": "s"}]}, None),
        ({"hostPID": True}, None),
    ],
)
def test_a_rank_is_not_process_1_unless_others_could_see_it(
    more: Object, shared: bool | None
) -> None:
    made = template(attempt(template=given_by(**more)))
    assert made["spec"].get("shareProcessNamespace") is shared


@pytest.mark.parametrize(
    ("gang", "group", "scheduler"),
    [
        ({"volcano": {"queue": "q"}}, "scheduling.volcano.sh/v1beta1", "volcano"),
        ({"coscheduling": {}}, "scheduling.x-k8s.io/v1alpha1", "scheduler-plugins-scheduler"),
    ],
)
def test_pod_groups(gang: Object, group: str, scheduler: str) -> None:
    made = attempt(placement={"gang": gang})
    found = next(o for o in build_objects(made, CONFIG) if o["kind"] == "PodGroup")
    assert (found["apiVersion"], found["spec"]["minMember"]) == (group, 2)
    assert template(made)["spec"]["schedulerName"] == scheduler
    marks = template(made)["metadata"]
    assert made.name in {**marks["labels"], **marks["annotations"]}.values()


def test_kueue_takes_the_whole_job_with_its_topology() -> None:
    placement = {"gang": {"kueue": {"queue": "q"}}, "topology": {"key": "rack", "required": True}}
    job = build_batch_job(attempt(placement=placement), CONFIG)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert "suspend" not in job["spec"], "kueue's field"
    marks = job["spec"]["template"]["metadata"]["annotations"]
    assert marks["kueue.x-k8s.io/podset-required-topology"] == "rack"


def test_labels_of_kueue_on_the_job_are_passed_through() -> None:
    job = body()
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "mine", "other": "x"}
    labels = build_batch_job(Attempt(read_job(job), UID, 0), CONFIG)["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "mine"
    assert "other" not in labels


def test_layouts_change_in_pods_whose_launchers_start_ranks_again() -> None:
    """Pods all know the addresses of all, as any of them may get rank 0."""
    cut = {"stages": 2, "replicas": 2}
    spec: Object = {"adaptation": {"relayout": True}, "failurePolicy": {"maxRestarts": 1}}
    assert "PIPEMORPH_POD_ADDRESS" in env_of(attempt(parallelism=cut, **spec))
    own = given_by({"command": ["train"]})
    with pytest.raises(
        ResourceBuildError, match=r"spec.adaptation.relayout is set, but ranks"
    ) as caught:
        build_objects(attempt(parallelism=cut, template=own, **spec), CONFIG)
    assert caught.value.reason == "InvalidSpec"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"spec": {"containers": [{"name": "trainer"}]}}, "NoTrainerImage"),
        (given_by(restartPolicy="Always"), "InvalidSpec"),
    ],
)
def test_what_cannot_be_built_says_why(given: Object, reason: str) -> None:
    with pytest.raises(ResourceBuildError) as caught:
        build_objects(attempt(template=given), OperatorConfig(ingest_url="x"))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("where", "placement"),
    [
        ("trainer.resources", RDMA),
        ("trainer.resources.limits", RDMA),
        ("trainer.resources.requests", RDMA),
        ("trainer.securityContext", RDMA),
        ("trainer.securityContext.capabilities", RDMA),
        ("trainer.securityContext.capabilities.add", RDMA),
        ("trainer.volumeMounts", {"sharedMemory": "1Gi"}),
        ("trainer.command", {}),
        ("trainer.args", {}),
        ("trainer.env", {}),
        ("trainer.ports", {}),
        ("metadata", {"networks": ["rail-0"]}),
        ("metadata.labels", {}),
        ("metadata.annotations", {"networks": ["rail-0"]}),
        ("spec.volumes", {"sharedMemory": "1Gi"}),
        ("spec.restartPolicy", {}),
        ("spec.initContainers", {}),
        ("spec.affinity", {"onePodPerNode": True}),
        ("spec.affinity.podAntiAffinity", {"onePodPerNode": True}),
        (f"spec.affinity.podAntiAffinity.{NODE_TERMS}", {"onePodPerNode": True}),
        ("spec.affinity.podAffinity", PACK),
        ("spec.affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution", PACK),
        ("spec.affinity.nodeAffinity", {"excludeNodes": ["n"]}),
        (f"spec.affinity.nodeAffinity.{NODE_TERMS}", {"excludeNodes": ["n"]}),
        (f"spec.affinity.nodeAffinity.{NODE_TERMS}.nodeSelectorTerms", {"excludeNodes": ["n"]}),
        ("spec.topologySpreadConstraints", SPREAD),
        ("spec.schedulerName", {"gang": {"volcano": {}}}),
    ],
)
def test_null_in_a_template_is_absent(where: str, placement: Object) -> None:
    made = template(attempt(template=given_with(where, None), placement=placement))
    assert made == template(attempt(template=given_by(), placement=placement))


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        ("trainer.resources", [], "spec.containers[0].resources: is []; expected a mapping"),
        ("trainer.resources.limits", "1", 'spec.containers[0].resources.limits: is "1"; expected'),
        ("trainer.securityContext", 5, "spec.containers[0].securityContext: is 5; expected a map"),
        (
            "trainer.securityContext.capabilities.add",
            "SYS_PTRACE",
            'capabilities.add: is "SYS_PTRACE"; expected a list',
        ),
        ("trainer.volumeMounts", {"a": 1}, "spec.containers[0].volumeMounts: is {"),
        ("metadata.labels", ["a"], 'metadata.labels: is ["a"]; expected a mapping'),
        ("metadata.labels", {"a": 1}, "metadata.labels.a: is 1; expected text"),
        ("metadata.annotations", {"a": True}, "metadata.annotations.a: is true; expected text"),
        ("spec.volumes", 5, "spec.volumes: is 5; expected a list"),
        ("spec.affinity", [], "spec.affinity: is []; expected a mapping"),
        ("spec.affinity.podAffinity", "x", 'spec.affinity.podAffinity: is "x"; expected a map'),
        (f"spec.affinity.podAntiAffinity.{NODE_TERMS}", {}, f"{NODE_TERMS}: is {{}}; expected a"),
        (
            f"spec.affinity.nodeAffinity.{NODE_TERMS}.nodeSelectorTerms",
            [{}, None],
            "nodeSelectorTerms[1]: is null; expected a mapping",
        ),
        (
            f"spec.affinity.nodeAffinity.{NODE_TERMS}.nodeSelectorTerms",
            [{"matchFields": 1}],
            "nodeSelectorTerms[0].matchFields: is 1; expected a list",
        ),
        ("spec.topologySpreadConstraints", {}, "spec.topologySpreadConstraints: is {}; expected"),
    ],
)
def test_a_wrong_type_in_a_template_is_named(where: str, value: Any, said: str) -> None:
    everything = RDMA | SPREAD | {"onePodPerNode": True, "networks": ["a"], "excludeNodes": ["n"]}
    given = given_with(where, value)
    with pytest.raises(ResourceBuildError) as caught:
        build_objects(attempt(template=given, placement=everything), CONFIG)
    assert caught.value.reason == "InvalidSpec"
    assert caught.value.message.startswith("spec.template.")
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ({"hostNetwork": True}, "ClusterFirstWithHostNet"),
        ({"hostNetwork": True, "dnsPolicy": "ClusterFirst"}, "ClusterFirstWithHostNet"),
        ({"hostNetwork": True, "dnsPolicy": "Default"}, "Default"),
        ({"hostNetwork": False}, None),
        ({}, None),
    ],
)
def test_pods_on_the_host_network_find_names_of_the_cluster(spec: Any, policy: str | None) -> None:
    assert template(attempt(template=given_by(**spec)))["spec"].get("dnsPolicy") == policy


@pytest.mark.parametrize(("size", "variable"), [(10, True), (100_000, True), (200_000, False)])
def test_arguments_that_no_variable_holds_are_in_the_file_alone(size: int, variable: bool) -> None:
    """Linux gives a program no string of more than 128 KiB."""
    module = {"module": "a.b", "iterations": 3, "args": {"text": "x" * size}}
    made = attempt(trainer=module)
    assert ("PIPEMORPH_ARGS" in env_of(made)) is variable
    assert len(json.loads(build_job_file(made.job))["spec"]["trainer"]["args"]["text"]) == size


def test_arguments_that_no_config_map_holds_are_refused_by_name() -> None:
    module = {"module": "a.b", "iterations": 3, "args": {"text": "x" * 600_000}}
    with pytest.raises(
        ResourceBuildError, match=r"spec.trainer.args is 600,012 bytes.*at most 524,288"
    ):
        template(attempt(trainer=module))


def test_volcano_knows_what_all_pods_request() -> None:
    one = {
        "requests": {"cpu": "500m", "nvidia.com/gpu": 2},
        "limits": {"memory": "1.5Gi", "cpu": 4},
    }
    two = {"requests": {"cpu": "1", "memory": "16e9"}, "limits": {"nonsense": "many"}}
    containers = [
        {"name": "trainer", "image": "i", "resources": one},
        {"name": "log", "image": "i", "resources": two},
    ]
    volcano = {"gang": {"volcano": {}}}
    made = attempt(stages=3, placement=volcano, template={"spec": {"containers": containers}})
    group = next(each for each in build_objects(made, CONFIG) if each["kind"] == "PodGroup")
    memory = str(3 * (1536 * 2**20 + 16 * 10**9))
    assert group["spec"]["minResources"] == {
        "cpu": "4500m",
        "nvidia.com/gpu": "6",
        "memory": memory,
    }
    group = next(
        e for e in build_objects(attempt(placement=volcano), CONFIG) if e["kind"] == "PodGroup"
    )
    assert "minResources" not in group["spec"]


def test_a_job_names_the_authorities_that_its_ranks_trust() -> None:
    pem = "-----BEGIN CERTIFICATE-----\nAA\nBB\n-----END CERTIFICATE-----\n"
    config = replace(CONFIG, ca_pem=pem + pem.replace("AA", "CC"))
    made = build_batch_job(attempt(), config)
    made["metadata"]["uid"] = "u"
    assert (
        len(config.ca_fingerprints) == 2
        and JobFacts.from_object(made).ca_fingerprints == config.ca_fingerprints
    )
    assert (
        replace(config, ca_pem=pem.replace("\nBB", "BB")).ca_fingerprints < config.ca_fingerprints
    )
    assert "annotations" not in build_batch_job(attempt(), CONFIG)["metadata"]
