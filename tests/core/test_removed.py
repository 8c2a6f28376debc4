"""Removed names are refused, with what to use instead."""

from __future__ import annotations

import pytest

from pipemorph import cli, manifest, removed
from pipemorph.errors import InputError
from pipemorph.planning import problem
from pipemorph_operator.crd.generate import build_job_definition

MANIFEST = """
apiVersion: pipemorph.io/v1alpha1
kind: PipeMorphJob
metadata: {name: job}
spec:
  parallelism: {stages: 2}
  schedule: {microbatches: 2, policy: %s}
  trainer: {module: train, iterations: 1}
  faults:
  - {link: 0, fromIteration: 1, delayMs: 20%s}
"""


def refusal(policy: str = "pipemorph", more: str = "") -> str:
    with pytest.raises(InputError) as refused:
        manifest.parse_job(MANIFEST % (policy, more))
    return str(refused.value)


def test_a_removed_field_is_refused_with_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FIELDS", {"spec.faults.shape": "use spec.faults.delayMs"})
    assert refusal(more=", shape: x") == (
        "spec.faults[0].shape: was removed; use spec.faults.delayMs"
    )


def test_a_removed_value_is_refused_with_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "POLICIES", {"best": "use pipemorph"})
    assert refusal("best") == ('spec.schedule.policy: is "best", which was removed; use pipemorph')
    assert "was removed" not in refusal("beast")


def test_a_removed_policy_of_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "POLICIES", {"best": "use pipemorph"})
    with pytest.raises(InputError, match=r"^policy: 'best' was removed; use pipemorph$"):
        problem.parse_problem(
            "policy: best\nmicrobatches: 1\nlinks: []\n"
            "stages: [{forward: 1, backward_input: 1, backward_weight: 1}]\n"
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["links", "a/b"], "links: was removed; use top"),
        (["fabric", "check"], "fabric check: was removed; use bench"),
        (["run", "JOB", "--page=3"], "run --page: was removed; use --watch"),
    ],
)
def test_removed_commands_and_arguments(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "REMOVED_COMMANDS", {"links": "use top", "fabric check": "use bench"})
    monkeypatch.setattr(cli, "ARGUMENTS", {"run --page": "use --watch"})
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == f"pipemorph {message}\n"


def test_arguments_after_two_dashes_are_those_of_the_users_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "ARGUMENTS", {"serve --page": "use --watch"})
    assert cli.main(["serve", "--", "python", "--page"]) == 2
    assert "JOB is missing" in capsys.readouterr().err


def test_the_crd_keeps_a_removed_field_for_the_operator_to_refuse() -> None:
    from pipemorph_operator.crd import generate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "FIELDS", {"spec.faults.shape": "use delayMs"})
        schema = build_job_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    shape = schema["properties"]["spec"]["properties"]["faults"]["items"]["properties"]["shape"]
    assert shape == {
        "description": "Removed; use delayMs.",
        "x-kubernetes-preserve-unknown-fields": True,
    }


def test_no_removed_name_is_in_use() -> None:
    assert not {command for command in removed.COMMANDS if command in cli.COMMANDS}
