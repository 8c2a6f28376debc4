"""The job spec as others rely on it: camelCase outside, snake_case inside, nothing coerced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from pipemorph.control import initial_plan
from pipemorph.planning.ir import Dispatch, Policy
from pipemorph.spec.base import FieldError
from pipemorph.spec.job_spec import JobSpec, PipeMorphJob
from pipemorph.spec.sections.template import RESERVED_ENV, RESERVED_ENV_PREFIXES, check_template
from pipemorph.spec.sections.transport import Transport

ROOT = Path(__file__).parents[3]


def minimal(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": "j"},
        "spec": {
            "parallelism": {"stages": 2},
            "schedule": {"microbatches": 4},
            "trainer": {"module": "m", "iterations": 1},
        }
        | spec,
    }


def test_defaults_are_those_of_the_documentation() -> None:
    spec = PipeMorphJob.model_validate(minimal()).spec
    assert spec.schedule.policy_kind is Policy.PIPEMORPH
    assert spec.schedule.dispatch_kind is Dispatch.STATIC
    assert spec.adaptation.enabled and not spec.adaptation.allow_offload
    assert spec.schedule.activation_memory is None
    assert (spec.adaptation.min_gain, spec.adaptation.min_delay_ms) == (0.02, 2.0)
    assert spec.adaptation.stale_after_seconds == 30
    assert spec.transport.route == "auto"


@pytest.mark.parametrize(
    ("replicas", "fault", "said"),
    [
        (2, {"reduction": 2, "delayMs": 5}, r"faults\[0\].reduction: is 2; the job has 2 stages"),
        (1, {"reduction": 1, "delayMs": 5}, r"reduction: is 1; the job has one replica, which"),
        (
            2,
            {"reduction": 1, "delayForwards": 2},
            r"delayForwards: is set; only a link can",
        ),
        (2, {"reduction": 1, "sever": "data"}, r"sever: is data, but only a link can be cut; use"),
    ],
)
def test_faults_of_a_reduction(replicas: int, fault: dict[str, object], said: str) -> None:
    body = minimal(faults=[fault])["spec"]
    body["parallelism"]["replicas"] = replicas
    with pytest.raises(ValidationError, match=said):
        JobSpec.model_validate(body)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "PIPEMORPH_ATTEMPT", "TORCHELASTIC_X"])
def test_variables_of_the_host_are_reserved_in_every_container(name: str) -> None:
    bad = {"name": "setup", "env": [{"name": name, "value": "1"}]}
    template = {"spec": {"containers": [{"name": "trainer"}], "initContainers": [bad]}}
    with pytest.raises(FieldError, match=f"is {name}, which is reserved in container setup"):
        check_template(template)
    bad["env"] = [{"name": f"MY_{name}", "value": "1"}]
    check_template(template)


def field_names(model: type[BaseModel]) -> Iterator[str]:
    """Names of all fields in a manifest, nested ones too."""
    for key, field in model.model_fields.items():
        yield field.alias or key
        todo: list[object] = [field.annotation]
        while todo:
            annotation = todo.pop()
            todo += get_args(annotation)
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                yield from field_names(annotation)


def test_every_field_is_documented() -> None:
    pages = (ROOT / "docs" / "reference").glob("job-spec*.md")
    words = set(re.findall(r"\w+", "".join(page.read_text("utf-8") for page in pages)))
    assert not set(field_names(PipeMorphJob)) - words
    for name in [*RESERVED_ENV, *RESERVED_ENV_PREFIXES]:
        assert name in words


@pytest.mark.parametrize(
    ("transport", "said"),
    [
        ({"require": "rdma", "engine": "tcp"}, "engine is tcp; use engine rdma"),
        ({"require": "rdma", "route": "direct"}, "never uses the engine"),
        ({"require": "rdma", "integrity": "mac"}, "uses no RDMA device; use integrity crc"),
        ({"engine": "rdma", "integrity": "aead"}, "integrity: is aead, but engine is rdma"),
        ({"rdma": {"devices": ["mlx5 0"]}}, "pattern"),
        ({"rdma": {"serviceLevel": 16}}, "less than or equal to 15"),
    ],
)
def test_rdma_settings_that_cannot_be_met_are_refused(transport, said):
    with pytest.raises(ValidationError, match=said):
        Transport.model_validate(transport)


def test_offload_needs_to_know_its_memory() -> None:
    with pytest.raises(ValidationError, match="hostMemory: is missing, but allowOffload is true"):
        JobSpec.model_validate(minimal(adaptation={"allowOffload": True})["spec"])


def test_emulated_microbatches_must_fit_and_limit_the_first_plan() -> None:
    times = [{"forward": 1, "backwardInput": 1, "backwardWeight": 1}]
    emulation = {"stageTimes": times, "messageBytes": 1, "activationBytes": 100}
    schedule = {"microbatches": 8, "inFlightLimit": [3, 5]}
    spec = minimal(emulation=emulation, schedule=schedule | {"activationMemory": 450})["spec"]
    assert initial_plan(JobSpec.model_validate(spec)).in_flight_limits == (3, 4)
    spec = minimal(emulation=emulation, schedule=schedule | {"activationMemory": 99})["spec"]
    with pytest.raises(ValidationError, match=r"activationMemory: is 99, less than emulation"):
        JobSpec.model_validate(spec)
