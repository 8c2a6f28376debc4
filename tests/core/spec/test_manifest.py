"""A manifest is a job, or one line that names what is wrong and where."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from gate import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipemorph.control.first_plan import initial_plan
from pipemorph.errors import InputError
from pipemorph.manifest import check_training_program, load_job, parse_job
from pipemorph.spec.job_spec import PipeMorphJob

GOOD: dict[str, Any] = {
    "apiVersion": "pipemorph.io/v1alpha1",
    "kind": "PipeMorphJob",
    "metadata": {"name": "gpt", "labels": {"team": "a"}},
    "spec": {
        "parallelism": {"stages": 4, "replicas": 2, "layers": 8},
        "schedule": {
            "microbatches": 12,
            "globalBatchSize": 48,
            "warmup": [7, 5, 3, 1],
            "inFlightLimit": [8, 8, 8, 8],
            "stageTimes": [
                {"forward": 10, "backwardInput": 10.5, "backwardWeight": 5.5} for _ in range(4)
            ],
        },
        "trainer": {"module": "json.tool", "iterations": 40, "args": {"width": 128}},
        "adaptation": {"minGain": 0.1, "minDelayMs": 3},
        "transport": {"route": "auto"},
        "emulation": {
            "stageTimes": [{"forward": 1, "backwardInput": 1, "backwardWeight": 1}],
            "messageBytes": 1024,
        },
        "faults": [{"link": 2, "fromIteration": 10, "toIteration": 25, "delayMs": 30}],
        "template": {
            "metadata": {"labels": {"a": "b"}},
            "spec": {
                "containers": [
                    {"name": "side", "image": "x"},
                    {"name": "trainer", "image": "y", "env": [{"name": "OMP", "value": "1"}]},
                ]
            },
        },
    },
}

WIRE = {"between": [0, 1], "delayMs": 30}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The good manifest with one field set; ``...`` removes it."""
    document: dict[str, Any] = copy.deepcopy(GOOD)
    parts = [int(p) if p.isdigit() else p for p in path.split("/")]
    at: Any = document
    for part in parts[:-1]:
        at = at[part]
    if value is ...:
        del at[parts[-1]]
    else:
        at[parts[-1]] = value
    return document


def refusal(document: Any) -> str:
    with pytest.raises(InputError) as caught:
        parse_job(json.dumps(document))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_good_manifest_loads_from_yaml_and_json(tmp_path: Path) -> None:
    for name, text in (("j.yaml", yaml.safe_dump(GOOD)), ("j.json", json.dumps(GOOD))):
        (tmp_path / name).write_text(text)
        job = load_job(tmp_path / name)
        assert job.metadata.namespace == "default"
        assert job.spec.parallelism.world_size == 8
        assert job.spec.schedule.stage_times[0].backward_input == 10.5


def test_every_example_loads() -> None:
    examples = sorted(Path(__file__).parents[3].joinpath("examples").glob("*.yaml"))
    assert examples
    for example in examples:
        load_job(example)


def test_ranks_that_share_a_stage_do_not_change_places() -> None:
    document = changed("spec/adaptation/relayout", True)
    document["spec"]["failurePolicy"] = {"maxRestarts": 1}
    parse_job(json.dumps(document))
    document["spec"]["parallelism"] = {"stages": 4, "replicas": 2, "tensor": 2}
    assert "relayout: is true, but several ranks share a stage of a replica" in refusal(document)
    # Their layers may move.
    document["spec"]["parallelism"]["layers"] = 8
    parse_job(json.dumps(document))


@pytest.mark.parametrize(("replicas", "refused"), [(128, False), (129, True)])
def test_ranks_of_large_jobs_do_not_change_places(replicas: int, refused: bool) -> None:
    document = changed("spec/adaptation/relayout", True)
    document["spec"]["failurePolicy"] = {"maxRestarts": 1}
    document["spec"]["parallelism"] = {"stages": 4, "replicas": replicas}
    document["spec"]["schedule"].pop("globalBatchSize")
    if not refused:
        parse_job(json.dumps(document))
        return
    assert "relayout: is true, but of more than 512 ranks (516) none change" in refusal(document)
    document["spec"]["parallelism"]["layers"] = 8
    parse_job(json.dumps(document))


def test_fields_of_ranks_with_several_stages() -> None:
    document: Any = copy.deepcopy(GOOD)
    spec = document["spec"]
    spec["parallelism"] = {"stages": 4, "stagesPerRank": 2}
    spec["faults"] = []
    spec["schedule"] = {
        "microbatches": 8, "objective": "period", "recompute": "auto", "dispatch": "auto",
    }  # fmt: skip
    spec["adaptation"] = {"allowOffload": True, "hostMemory": 1 << 30}
    parse_job(json.dumps(document))
    spec["schedule"] |= {"dispatch": "guided", "warmup": [6, 5, 3, 1]}
    plan = initial_plan(parse_job(json.dumps(document)).spec)
    assert plan.dispatch == "guided" and plan.warmup == (6, 5, 3, 1)
    assert not plan.schedule.one_stage_each
    spec["schedule"]["policy"] = "1f1b-interleaved"
    assert "spec.schedule.warmup: is [6, 5, 3, 1]; policy 1f1b-interleaved sets" in refusal(
        document
    )


def test_without_replicas_only_layers_can_move() -> None:
    document = changed("spec/adaptation/relayout", True)
    document["spec"]["failurePolicy"] = {"maxRestarts": 1}
    document["spec"]["parallelism"] = {"stages": 4, "layers": 8}
    document["spec"].pop("faults")
    parse_job(json.dumps(document))
    del document["spec"]["parallelism"]["layers"]
    assert "no gradients are reduced, and parallelism.layers is not given" in refusal(document)


ENV = "spec/template/spec/containers/1/env/0/name"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("spec/parallelism/stages", "four", 'is "four"; expected an integer'),
        ("spec/parallelism/stages", True, "is true; expected an integer"),
        ("spec/parallelism/stages", 4.0, "is 4.0; expected an integer"),
        # YAML 1.2 reads 3e-4 as this number.
        ("spec/trainer/module", 3e-4, "is 0.0003; expected text, in quotes"),
        ("spec/parallelism/stages", ..., "is missing"),
        (
            "spec/parallelism/ranksPerPod",
            3,
            "is 3, which does not divide the job's 8 ranks; use a divisor",
        ),
        (
            "spec/parallelism/layers",
            9,
            "is 9, which 4 stages do not divide; use a multiple of 4 layers or another number of "
            "stages",
        ),
        ("spec/schedule/microBatches", 12, "is not a known field; did you mean microbatches?"),
        ("spec/schedule/in_flight_limits", 12, "is not a known field; did you mean inFlightLimit?"),
        ("spec/faults/0/delay", 12, "is not a known field; did you mean delayMs?"),
        ("spezifikation", {}, "is not a known field; known fields: apiVersion,"),
        (
            "spec/schedule/globalBatchSize",
            50,
            "is 50, which 2 replicas × 12 microbatches do not divide; use a multiple of 24",
        ),
        ("spec/schedule/warmup", [3, 1], "has 2 entries; 4 stages need 4"),
        (
            "spec/schedule/stageTimes",
            [{"forward": 1, "backwardInput": 1, "backwardWeight": 1}] * 3,
            "has 3 entries; expected 1 for all stages, or 4",
        ),
        ("spec/schedule/inFlightLimit", "8", 'is "8"; expected an integer or a list'),
        ("spec/schedule/policy", "exact", 'is "exact", which was removed; use pipemorph;'),
        (
            "spec/schedule/policy",
            "fast",
            'is "fast"; expected one of pipemorph, zero-bubble, 1f1b,',
        ),
        ("spec/emulation/stageTimes", [], "is []; expected a non-empty"),
        ("spec/faults/0/link", 3, "is 3; the job has 3 links, numbered from"),
        ("spec/faults/0/replica", 2, "is 2; the job has 2 replicas,"),
        ("spec/adaptation/relayout", True, "is true, but failurePolicy."),
        ("spec/faults/0/toIteration", 10, "is 10, which is not after"),
        ("spec/faults/0/delayMs", 1e300, "is 1e+300; expected at most 3600000"),
        ("spec/faults/0/bandwidthMbps", 1e-300, "is 1e-300; expected at least 0.001"),
        ("spec/trainer/module", "no module", 'is "no module"; expected a'),
        ("spec/trainer/args", [1], "is [1]; expected a mapping"),
        ("spec/trainer", None, "is null; expected a mapping"),
        ("metadata/name", "a" * 64, f'is "{"a" * 64}"; expected at most 63'),
        ("metadata/name", "My_Job", 'is "My_Job"; expected lower-case letters'),
        ("apiVersion", "v1", 'is "v1"; expected one of pipemorph.io/v1alpha1'),
        ("kind", "Job", 'is "Job"; expected one of PipeMorphJob'),
        (ENV, "MASTER_ADDR", "is MASTER_ADDR, which is reserved in container trainer"),
        ("spec/template/spec/containers", {}, "is a mapping;"),
        ("spec/template/spec", ..., "is missing; expected a pod spec"),
        ("spec/template", [], "is []; expected a mapping"),
        ("spec/template/spec/containers/1/env", {}, "is a"),
        ("spec/adaptation/minGain", 1, "is 1; expected less than 1"),
        ("spec/adaptation/enabled", "yes", 'is "yes"; expected true or'),
    ],
)
def test_the_line_names_the_field(path: str, value: Any, message: str) -> None:
    field = re.sub(r"/(\d+)", r"[\1]", path).replace("/", ".")
    assert refusal(changed(path, value)).startswith(f"{field}: {message}")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("spec/schedule/policy", "gpipe", "spec.schedule: "),
        (
            "spec/parallelism",
            {"stages": 500, "replicas": 201},
            "spec.parallelism.replicas: is 201; 500 stages × 201 replicas are 100500 ranks; "
            "expected at most 100000",
        ),
        ("spec/schedule/warmup", [1, 2, 3, 4], "spec.schedule.warmup[1]: is 2, more than 1"),
        ("spec/schedule/warmup", [13, 5, 3, 1], "spec.schedule.warmup[0]: is 13; there are 12"),
        (
            "spec/schedule/inFlightLimit",
            [8, True, 8, 8],
            "spec.schedule.inFlightLimit[1]: is true; expected an integer",
        ),
        ("spec/schedule/inFlightLimit", [4, 4, 4, 4], "spec.schedule: warmup[0] is 7"),
        ("spec/faults/0/reduction", 1, "spec.faults[0]: has several of link, reduction, betw"),
        ("spec/faults/0/link", ..., "spec.faults[0]: has none of link, reduction, betw"),
        ("spec/faults/0", WIRE | {"between": [1, 9]}, "spec.faults[0].between: is [1, 9]; the job"),
        ("spec/faults/0", WIRE | {"between": [1, 1]}, "spec.faults[0].between: is pod 1 twice; e"),
        (
            "spec/faults/0",
            {"device": 99, "slowdown": 1.5},
            "spec.faults[0].device: is 99; the job has",
        ),
        ("spec/faults/0", {"device": 0, "delayMs": 3}, "spec.faults[0].device: is set; device"),
        ("spec/faults/0", {"link": 0, "slowdown": 2}, "spec.faults[0].slowdown: is set; device"),
        ("spec/faults/0", {"link": 0, "pauseMs": 2}, "spec.faults[0].pauseMs: is set; device"),
        ("spec/faults/0", {"device": 0, "jitterMs": 3}, "spec.faults[0].device: is set; device"),
        ("spec/faults/0", {"reduction": 0, "jitterMs": 3}, "spec.faults[0].jitterMs: is set; a"),
        ("spec/faults/0", WIRE | {"sever": "data"}, "spec.faults[0].sever: is data, but only a"),
        ("spec/faults/0/fromSeconds", 1, "spec.faults[0]: is bounded by iterations and by seconds"),
        ("spec/faults/0/delayMs", ..., "spec.faults[0]: has no effect; give one of delayMs"),
        (
            "spec/trainer/module",
            ...,
            "spec.trainer: has neither of module and command; give one of them",
        ),
        (
            "spec/trainer/command",
            ["python"],
            "spec.trainer: has both of module and command; give one of them",
        ),
        (ENV, ..., "spec.template.spec.containers[1].env[0]: has no name"),
        (
            "spec/template/spec/containers/1/name",
            "main",
            "spec.template.spec.containers: has no container named trainer, which runs the stage; "
            "found: side, main",
        ),
    ],
)
def test_the_line_names_the_field_around_it(path: str, value: Any, message: str) -> None:
    assert refusal(changed(path, value)).startswith(message)


def test_a_misspelt_field_is_named_before_the_missing_one() -> None:
    document = changed("spec/schedule/microbatches", ...)
    document["spec"]["schedule"]["microbatch"] = 12
    assert "did you mean microbatches?" in refusal(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("a: [", "is not YAML or JSON"),
        ("- 1", "is [1]; expected the fields"),
        ("hello", 'is "hello"; expected the fields'),
        ("a: 1\n---\nb: 2\n", "has 2 documents; expected one"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ("1: 2", "top: the key 1 is not text"),
        ("a: 2024-01-01", "a: is 2024-01-01, which JSON cannot represent; quote it"),
        ("a: 2024-99-99", "is not YAML or JSON"),
        ("a: !!python/object:os.system {}", "is not YAML or JSON"),
        ("a: .inf", "a: is inf; expected a finite number"),
        ("a: &a [*a]", "levels"),
        ("a: " + "[" * 5000, "is not YAML or JSON"),
        ("a: 1" + "0" * 30, "a: is a number beyond 64 bits"),
        ('{"a": "\\ud800"}', "a: is not valid Unicode text"),
        ("a: !!int x", "is not YAML or JSON"),
        ("? [a, b]\n: c", "is not YAML or JSON"),
    ],
)
def test_text_that_is_no_manifest(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_job(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_short_file_that_expands_without_end_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(InputError, match="more than 100000 values"):
        parse_job("\n".join(lines))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    cases = {"missing.yaml": None, "binary.yaml": b"\xff\xfe\x00", "big.yaml": b"#" * (1 << 21)}
    for name, content in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError) as caught:
            load_job(tmp_path / name)
        assert str(caught.value).startswith(str(tmp_path / name))
    for bad in (tmp_path, "a\0b"):
        with pytest.raises(InputError, match="cannot be read"):
            load_job(bad)


def test_the_module_must_be_found_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "untouched"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "train.py").write_text("raise RuntimeError('imported')")
    runnable = package / "runnable"
    runnable.mkdir()
    (runnable / "__main__.py").write_text("raise RuntimeError('imported')")
    (runnable / "train.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in (
        "json.tool",
        "untouched.runnable",
        "untouched.runnable.train",
        "untouched.train",
    ):
        check_training_program(parse_job(json.dumps(changed("spec/trainer/module", module))))
    assert "untouched" not in sys.modules
    for module, message in (
        ("nowhere", "no module nowhere in the Python path"),
        ("nowhere.at.all", "no module nowhere in the Python path"),
        ("untouched.nope", "no module nope in package untouched"),
        ("untouched.train.x", "untouched.train is a module, not a package"),
        ("untouched", "a package without a __main__ module"),
    ):
        job = parse_job(json.dumps(changed("spec/trainer/module", module)))
        with pytest.raises(InputError) as caught:
            check_training_program(job)
        assert str(caught.value).startswith(f'spec.trainer.module: is "{module}"')
        assert message in str(caught.value)


def test_a_command_must_be_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def job(*command: str) -> PipeMorphJob:
        trainer = {"command": list(command), "iterations": 1}
        return parse_job(json.dumps(changed("spec/trainer", trainer)))

    given = job("python", "train.py", "--lr", "3e-4")
    check_training_program(given)
    assert given.spec.trainer.build_argv("/venv/python") == [
        "/venv/python",
        "train.py",
        "--lr",
        "3e-4",
    ]
    check_training_program(job("env", "A=1", "python", "train.py"))
    with pytest.raises(InputError, match=r'begins with "trian\.sh", which is no program'):
        check_training_program(job("trian.sh"))


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += spots(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            found += spots(inner, (*path, i))
    return found


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**25), 10**25),
    st.integers(-2, 64),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-1, 9), max_size=5),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.sampled_from(spots(GOOD)), st.sampled_from(["set", "drop", "add"]), JUNK),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_no_mutation_of_a_manifest_is_a_traceback(
    mutations: list[tuple[tuple[Any, ...], str, Any]], as_yaml: bool
) -> None:
    document: Any = copy.deepcopy(GOOD)
    for path, how, junk in mutations:
        at: Any = document
        try:
            for part in path[:-1]:
                at = at[part]
            if how == "drop":
                del at[path[-1]]
            elif how == "add" and isinstance(at[path[-1]], dict):
                at[path[-1]]["extra"] = junk
            else:
                at[path[-1]] = junk
        except (KeyError, IndexError, TypeError):
            continue
    text = yaml.safe_dump(document) if as_yaml else json.dumps(document)
    try:
        job = parse_job(text)
    except InputError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
    else:
        assert parse_job(job.model_dump_json(by_alias=True)) == job


@settings(max_examples=examples(200), deadline=None)
@given(st.text(max_size=60) | st.text(alphabet="a:-[]{}&*!|>'\"#\n ,?%@`1", max_size=60))
def test_no_text_is_a_traceback(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_job(text)
    assert "\n" not in str(caught.value)
