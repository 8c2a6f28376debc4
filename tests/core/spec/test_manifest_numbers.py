"""Numbers as people write them, in YAML and in JSON, and keys that are there twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipemorph.errors import InputError
from pipemorph.manifest import parse_job

YAML = """
apiVersion: pipemorph.io/v1alpha1
kind: PipeMorphJob
metadata: {name: gpt}
spec:
  parallelism: {stages: 2}
  schedule: {microbatches: 8}
  trainer: {module: m, iterations: %s, args: {rate: %s}}
"""


def document(iterations: str, rate: str) -> str:
    """Returns the manifest as JSON."""
    return (
        '{"apiVersion": "pipemorph.io/v1alpha1", "kind": "PipeMorphJob",'
        ' "metadata": {"name": "gpt"}, "spec": {"parallelism": {"stages": 2},'
        ' "schedule": {"microbatches": 8},'
        f' "trainer": {{"module": "m", "iterations": {iterations}, "args": {{"rate": {rate}}}}}}}}}'
    )


@pytest.mark.parametrize("text", [YAML.__mod__, lambda pair: document(*pair)], ids=["YAML", "JSON"])
@pytest.mark.parametrize(
    ("rate", "value"),
    [("3e-4", 0.0003), ("1e3", 1000), ("-2E2", -200), ("1.5e-3", 0.0015), ("0.5", 0.5),
     ("1e20", 1e20), ('"1e3"', "1e3"), ("7", 7)],
)  # fmt: skip
def test_exponents_are_numbers(text: Any, rate: str, value: Any) -> None:
    found = parse_job(text(("1e3", rate)))
    assert found.spec.trainer.iterations == 1000
    assert found.spec.trainer.args["rate"] == value
    assert type(found.spec.trainer.args["rate"]) is type(value)


def test_yaml_alone_takes_what_json_cannot_write() -> None:
    for rate, value in ((".5e1", 5), ("+1e+2", 100), ("1.e2", 100), ("1e400x", "1e400x")):
        assert parse_job(YAML % ("10", rate)).spec.trainer.args["rate"] == value


@pytest.mark.parametrize("text", [YAML.__mod__, lambda pair: document(*pair)], ids=["YAML", "JSON"])
@pytest.mark.parametrize("iterations", ["15e-1", "1e999", "1.5"])
def test_other_numbers_are_no_integers(text: Any, iterations: str) -> None:
    with pytest.raises(InputError, match=r"spec\.trainer\.iterations"):
        parse_job(text((iterations, "1")))


def test_a_repeated_key_is_an_error_with_its_line() -> None:
    lines = (YAML % ("10", "1")).splitlines()
    lines.insert(7, "  schedule: {microbatches: 9}")
    with pytest.raises(InputError, match=r"duplicate key 'schedule' \(line 8, column 3\)"):
        parse_job("\n".join(lines))
    assert json.loads(document("1", "2"))["spec"]["trainer"]["iterations"] == 1
