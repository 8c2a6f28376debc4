"""The script of ``make kind`` over played programs: which it calls, in which order, and its errors.
``tests/cluster/test_node_first_job.py`` runs it on a real kubelet."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from cluster_jobs import SLOW, adapted, cluster_job, found, running

from pipemorph import __version__

SCRIPT = Path(__file__).resolve().parents[3] / "examples/kubernetes/first_job.py"
PROGRAM = """#!/usr/bin/python3
import json, os, pathlib, sys
folder, words = pathlib.Path({folder!r}), [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]
with (folder / "calls").open("a") as file:
    print(*words, file=file)
for begin, text in json.loads((folder / "answers").read_text()).items():
    if " ".join(words).startswith(begin):
        print(text)
if " ".join(words).startswith((folder / "fails").read_text()):
    sys.exit("it fails")
"""
ADAPTED = found("ScheduleAdapted", "True", "PlanInEffect", "plan v1: link 0 is slow", 100)
FAILED = found("Failed", "True", "NoNode", "no node has room", 100)


class Programs:
    """kind, docker, helm and kubectl, whose answers a test sets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("kind", "docker", "helm", "kubectl"):
            (folder / name).write_text(PROGRAM.format(folder=str(folder)))
            (folder / name).chmod(0o755)
        self.job = cluster_job("one-link", running(adapted(), SLOW, ADAPTED))
        self.answers: dict[str, str] = {"kind get clusters": "other", "kind get kubeconfig": "{}"}
        self.fails("nothing")

    def fails(self, beginning: str) -> None:
        (self.folder / "fails").write_text(beginning)

    def ready(self) -> None:
        created = {"metadata": {"name": "one-link", "namespace": "default"}}
        answers = self.answers | {
            "kubectl create": json.dumps(created),
            "kubectl get pipemorphjobs.pipemorph.io one-link": json.dumps(self.job),
            "kubectl get pipemorphjobs.pipemorph.io --namespace": json.dumps({"items": []}),
        }
        (self.folder / "answers").write_text(json.dumps(answers))

    def calls(self) -> list[str]:
        return [" ".join(each.split()[:3]) for each in self.lines()]

    def lines(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", "/absent")
    made = Programs(tmp_path)
    made.ready()
    return made


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    spec = spec_from_file_location("first_job", SCRIPT)
    assert spec is not None and spec.loader is not None
    script: Any = module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", ["first_job.py", *arguments])
    return int(script.main())


def test_a_kind_cluster_is_made_and_gets_the_images(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script(monkeypatch) == 0
    assert programs.calls() == [
        "kind get clusters",
        "kind create cluster",
        "kind get kubeconfig",
        "docker build --target",
        "docker build --target",
        "kind load docker-image",
        "helm upgrade --install",
        "kubectl get pipemorphjobs.pipemorph.io",
        "kubectl create --filename",
        "kubectl get pipemorphjobs.pipemorph.io",
    ]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("one-link has adapted, ")
    assert last.endswith(" s after the start: plan v1: link 0 is slow")
    images = " ".join(f"pipemorph/{each}:{__version__}" for each in ("operator", "trainer"))
    assert f"kind load docker-image {images} --name pipemorph" in programs.lines()


def test_images_for_another_cluster_are_pushed(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs.job["metadata"]["namespace"] = "default"
    programs.ready()
    options = ["--kubeconfig", str(tmp_path / "config"), "--registry", "registry.example/team"]
    assert run_script(monkeypatch, *options) == 0
    assert f"docker push registry.example/team/trainer:{__version__}" in programs.lines()
    assert not [call for call in programs.calls() if call.startswith("kind")]
    (helm,) = [line for line in programs.lines() if line.startswith("helm")]
    assert "image.repository=registry.example/team/operator" in helm


@pytest.mark.parametrize(
    "case",
    [
        ("kind absent", [], "kind is not on PATH; install it: https://kind.sigs.k8s.io, or give"),
        ("helm absent", ["--kubeconfig", "x", "--loaded"], "helm is not on PATH; install it"),
        ("", ["--kubeconfig", "x"], "--kubeconfig: needs --registry NAME, where the nodes"),
        ("docker build", [], "docker exited with 1; its error is above"),
    ],
)
def test_obstacles_are_one_line(
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: tuple[str, list[str], str],
) -> None:
    broken, arguments, expected = case
    program, _, how = broken.partition(" ")
    if how == "absent":
        (programs.folder / program).unlink()
    programs.fails(broken or "nothing")
    assert run_script(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err.startswith(f"first_job: {expected}")


def test_a_job_that_fails_is_an_error_with_its_reason(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs.job = cluster_job("one-link", running(adapted(), FAILED))
    programs.job["status"]["state"] = "Failed"
    programs.ready()
    assert run_script(monkeypatch) == 1
    error = capsys.readouterr().err
    assert "is Failed" in error and "expected ScheduleAdapted; Failed is True: no node" in error
