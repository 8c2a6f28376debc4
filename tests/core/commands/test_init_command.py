"""``pipemorph init`` and ``pipemorph schema``: what they write is valid, and what stays."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from pipemorph.cli import main
from pipemorph.commands.manifest import init
from pipemorph.manifest import check_training_program, load_job

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = ROOT / "docs/reference/pipemorphjob.schema.json"
MANIFESTS = sorted(
    path
    for path in (ROOT / "examples").rglob("*.yaml")
    if "yaml-language-server" in path.read_text().partition("\n")[0]
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[str]:
    """Answer the questions of a terminal; returns them."""
    questions: list[str] = []
    waiting = iter(answers)

    def read(question: str) -> str:
        questions.append(question)
        return next(waiting)

    monkeypatch.setattr("builtins.input", read)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    return questions


@pytest.mark.parametrize("model", init.MODELS)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 16), (16, 5)])
def test_manifest_and_script_fit_each_other(
    model: str, stages: int, microbatches: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = ("--stages", str(stages), "--microbatches", str(microbatches))
    assert main(["init", "7", *numbers, "--iterations", "3", "--model", model]) == 0
    monkeypatch.chdir(folder / "7")
    job = load_job("job.yaml")
    check_training_program(job)
    spec = job.spec
    assert (job.metadata.name, spec.trainer.iterations) == ("7", 3)
    assert (spec.parallelism.stages, spec.schedule.microbatches) == (stages, microbatches)
    tree = ast.parse(Path("train.py").read_text())
    sizes = [node for node in tree.body if isinstance(node, ast.Assign)]
    if model == "own":
        _, layers, batch = ast.literal_eval(sizes[0].value)
        assert layers >= stages and batch % microbatches == 0


def test_nothing_is_asked_without_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("a question was printed"))
    assert main(["init", "mine"]) == 0
    assert "cd mine\n  pipemorph run job.yaml --out out\n" in capsys.readouterr().out
    assert load_job("mine/job.yaml").spec.parallelism.stages == init.STAGES


def test_three_questions_on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = answer(monkeypatch, "0", "3", "", "tree", "gpt")
    assert main(["init", "mine"]) == 0
    assert [each.split()[0] for each in questions] == ["stages"] * 2 + ["microbatches"] + [
        "model"
    ] * 2
    job = load_job("mine/job.yaml").spec
    assert (job.parallelism.stages, job.schedule.microbatches) == (3, 24)
    assert "examples.gpt" in Path("mine/train.py").read_text()


def test_only_what_is_missing_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = answer(monkeypatch, "")
    assert main(["init", "--stages", "2", "--model", "own"]) == 0
    assert questions == ["microbatches [16]: "]


@pytest.mark.parametrize("name", ["job.yaml", "train.py"])
def test_nothing_is_overwritten(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).write_text("mine")
    assert main(["init"]) == 2
    assert capsys.readouterr().err == f"pipemorph init: {name} exists; name another folder\n"
    assert [path.name for path in folder.iterdir()] == [name]
    assert (folder / name).read_text() == "mine"


def test_a_name_that_no_job_may_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "mine", "--name", "My Job"]) == 2
    assert "metadata.name" in capsys.readouterr().err
    assert not Path("mine").exists()


def test_tutorial_has_the_script_that_it_writes() -> None:
    """Equality of the two: each is the first script that some user reads."""
    written = init._make_own_script(init.STAGES, init.MICROBATCHES_PER_STAGE * init.STAGES)
    tutorial = (ROOT / "examples/tutorial/train.py").read_text()
    assert written.partition("\n\n")[2] == tutorial.partition("\n\n")[2]


# --- the schema -------------------------------------------------------------------------------


def test_schema_of_the_docs_is_the_printed_one(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Else: pipemorph schema --out docs/reference/pipemorphjob.schema.json."""
    assert main(["schema"]) == 0
    assert capfdbinary.readouterr().out.decode() == SCHEMA.read_text()


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_example_has_its_schema_and_keeps_it(path: Path) -> None:
    named = path.read_text().partition("\n")[0].partition("$schema=")[2]
    assert (path.parent / named).resolve() == SCHEMA
    for document in yaml.safe_load_all(path.read_text()):
        jsonschema.validate(document, json.loads(SCHEMA.read_text()))


def test_every_example_of_a_job_names_the_schema() -> None:
    jobs = {
        path
        for path in (ROOT / "examples").rglob("*.yaml")
        if {each.get("kind") for each in yaml.safe_load_all(path.read_text()) if each}
        == {"PipeMorphJob"}
    }
    assert jobs == set(MANIFESTS) and len(jobs) > 10


def test_schema_finds_what_is_misspelt() -> None:
    job = yaml.safe_load((ROOT / "examples/gpt.yaml").read_text())
    job["spec"]["schedule"]["microbatchs"] = 4
    with pytest.raises(jsonschema.ValidationError, match="microbatchs"):
        jsonschema.validate(job, json.loads(SCHEMA.read_text()))
