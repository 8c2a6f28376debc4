"""A rank's environment, and its errors: one line, exit 2."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import prepared_processes
import pytest
from manifests import manifest_of
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from pipemorph.errors import InputError
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.errors import PeerLostError

RANKS = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}


def job(stages: object = 2) -> str:
    spec = {
        "parallelism": {"stages": stages},
        "schedule": {"microbatches": 2},
        "trainer": {"module": "pipemorph_trainer.examples.emulated", "iterations": 1},
    }
    return json.dumps(manifest_of(spec))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "job.json").write_text(job())
    (tmp_path / "misspelt.json").write_text(job("two"))
    (tmp_path / "cut.json").write_text(job()[:-9])
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    (tmp_path / "secret").write_bytes(b"\x00secret")
    (tmp_path / "empty").touch()
    return tmp_path


def test_what_is_named_is_read(files: Path) -> None:
    context = TrainerContext.from_env(
        RANKS
        | {
            "PIPEMORPH_JOB_FILE": str(files / "job.json"),
            "PIPEMORPH_SECRET_FILE": str(files / "secret"),
            "PIPEMORPH_ARGS": '{"layers": 2}',
            "PIPEMORPH_KEPT_DIR": str(files),
            "PIPEMORPH_GENERATION": "3",
        }
    )
    assert context.job is not None and context.job.spec.parallelism.stages == 2
    assert (context.secret, context.args) == (b"\x00secret", {"layers": 2})
    assert (context.memory_dir, context.generation) == (files, 3)


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("PIPEMORPH_JOB_FILE", "gone.json", "gone.json: cannot be read: No such file"),
        ("PIPEMORPH_JOB_FILE", ".", "cannot be read: Is a directory"),
        ("PIPEMORPH_JOB_FILE", "misspelt.json", 'spec.parallelism.stages: is "two"; expected an'),
        ("PIPEMORPH_JOB_FILE", "cut.json", "cut.json: Invalid JSON: EOF while parsing"),
        ("PIPEMORPH_JOB_FILE", "binary.json", "binary.json: is not UTF-8 text"),
        ("PIPEMORPH_SECRET_FILE", "gone", "gone: cannot be read: No such file"),
        ("PIPEMORPH_SECRET_FILE", ".", "cannot be read: Is a directory"),
        ("PIPEMORPH_SECRET_FILE", "empty", "empty: is empty"),
        ("PIPEMORPH_ARGS", "layers=2", "'layers=2'; expected a JSON object"),
        ("PIPEMORPH_ARGS", "[2]", "'[2]'; expected a JSON object"),
        ("PIPEMORPH_ARGS", "[" * 100_000, "expected a JSON object"),
    ],
)
def test_what_cannot_be_read_is_named(files: Path, variable: str, value: str, error: str) -> None:
    found = value if variable.endswith("ARGS") else str(files / value)
    with pytest.raises(InputError) as refused:
        TrainerContext.from_env(RANKS | {variable: found})
    said = str(refused.value)
    assert said.startswith(variable) and error in said, said
    assert "\n" not in said


@pytest.mark.parametrize("module", ["emulated", "gpt"])
def test_a_rank_that_cannot_read_its_environment_exits_2(tmp_path: Path, module: str) -> None:
    """A cluster does not try that again."""
    gone = tmp_path / "secret"
    done = prepared_processes.run(
        [sys.executable, "-m", f"pipemorph_trainer.examples.{module}"],
        env=os.environ | RANKS | {"PIPEMORPH_SECRET_FILE": str(gone)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    why = f"PIPEMORPH_SECRET_FILE: {gone}: cannot be read: No such file or directory"
    assert (done.returncode, done.stderr) == (2, f"{module}: {why}\n")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (InputError("microbatches is missing"), "InputError: microbatches is missing"),
        (PeerLostError("rank 1 is gone"), "PeerLostError: rank 1 is gone"),
        (ValueError("of the script"), "ValueError: of the script"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_torchruns_summary_names_an_uncaught_error(
    error: Exception,
    named: str,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = files / "error.json"
    # A hook like that of a process group, which the script may have made before.
    monkeypatch.setattr(sys, "excepthook", partial(sys.__excepthook__))
    before = sys.excepthook
    monkeypatch.setenv("RANK", "3")
    TrainerContext.from_env(RANKS)
    assert sys.excepthook is before, "torchrun has not started this"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    TrainerContext.from_env(RANKS)
    try:
        raise error
    except type(error):
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    shown = capsys.readouterr().err.splitlines()
    if isinstance(error, InputError):
        # All ranks have it: rank 0 speaks, without the trainer's own frames.
        assert shown == []
        monkeypatch.setenv("RANK", "0")
        sys.excepthook(type(error), error, None)
        assert capsys.readouterr().err.splitlines() == [named]
    else:
        assert "Traceback" in shown[0] and str(error) in shown[-1]
    # torchrun reads it so for its summary.
    failure = ProcessFailure(local_rank=3, pid=1, exitcode=1, error_file=str(file))
    assert f"traceback : {named}" in ChildFailedError("train.py", {3: failure}).format_msg()
    written = file.read_text()
    assert json.loads(written)["message"]["extraInfo"]["rank"] == "3"
    sys.excepthook(OSError, OSError("of another rank"), None)
    assert file.read_text() == written, "the first one counts"
