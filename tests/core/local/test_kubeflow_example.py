"""The manifests for Kubeflow Trainer and JobSet, as far as they are ours: what is served, and who
finds it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipemorph.commands import serve as command
from pipemorph.manifest import parse_job

EXAMPLES = Path(__file__).parents[3] / "examples"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def read_kubeflow() -> tuple[dict[str, Any], list[dict[str, Any]], int, str]:
    """ConfigMap, replicated jobs, number of ranks, and module of the example."""
    (runtime,) = documents("kubeflow/runtime.yaml")
    config, train_job = documents("kubeflow/trainjob.yaml")
    trainer = train_job["spec"]["trainer"]
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    ranks = trainer["numNodes"] * trainer["numProcPerNode"]
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return config, jobs, ranks, trainer["command"][-1]


def read_jobset() -> tuple[dict[str, Any], list[dict[str, Any]], int, str]:
    """ConfigMap, replicated jobs, number of ranks, and module of the example."""
    config, made = documents("kubernetes/jobset.yaml")
    jobs = made["spec"]["replicatedJobs"]
    node = jobs[1]["template"]["spec"]
    assert node["parallelism"] == node["completions"], "each has an index"
    (line,) = node["template"]["spec"]["containers"][0]["args"]
    found = re.search(r"--nnodes=(\d+) --nproc-per-node=(\d+)", line)
    assert found is not None and int(found[1]) == node["parallelism"]
    name = made["metadata"]["name"]
    assert f"--master-addr={name}-node-0-0.{name} " in line
    (url,) = [
        each["value"]
        for each in node["template"]["spec"]["containers"][0]["env"]
        if each["name"] == "PIPEMORPH_INGEST_URL"
    ]
    assert url.startswith(f"https://{name}-control-0-0.{name}:")
    return config, jobs, int(found[1]) * int(found[2]), line.split()[-1]


@pytest.mark.parametrize("read", [read_kubeflow, read_jobset])
def test_served_names_are_those_that_ranks_request(read: Any) -> None:
    config, replicated, ranks, module = read()
    pods = {job["name"]: job["template"]["spec"]["template"]["spec"] for job in replicated}
    (serve,), (node,) = (pods[name]["containers"] for name in ("control", "node"))

    ours = serve["args"][0].partition("exec pipemorph ")[2].split()
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    given = parser.parse_args(ours)
    volumes = {volume["name"]: volume for volume in pods["control"]["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in serve["volumeMounts"]}
    assert mounted["/job"]["configMap"]["name"] == config["metadata"]["name"]
    assert f"/job/{next(iter(config['data']))}" == given.job
    for file in (given.token_file, given.secret_file, given.tls_cert, given.tls_key):
        assert "emptyDir" in mounted[str(Path(file).parent)], "only the pod's user may read it"

    env = {each["name"]: each.get("value") for each in node["env"]}
    assert re.sub(r".*:", "", env["PIPEMORPH_INGEST_URL"]) == given.listen.rpartition(":")[2]
    (volume,) = pods["node"]["volumes"]
    keys = {item["path"] for item in volume["secret"]["items"]}
    for name in ("TOKEN", "SECRET", "CA"):
        folder, _, file = env[f"PIPEMORPH_{name}_FILE"].rpartition("/")
        assert (folder, file in keys) == ("/identity", True)
    assert "tls.key" not in keys

    job = parse_job(config["data"]["job.yaml"])
    assert job.spec.parallelism.world_size == ranks
    assert module == job.spec.trainer.module
