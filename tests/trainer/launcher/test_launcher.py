"""The launcher of a pod: real processes, one per rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from manifests import manifest_of
from prepared_processes import PreparedProcess

from pipemorph_trainer.launcher import __main__ as launcher_main
from pipemorph_trainer.preflight import EXIT_UNFIT

DEADLINE, ITERATIONS = 60.0, 3
JOB = manifest_of(
    {
        "parallelism": {"stages": 4, "replicas": 1, "ranksPerPod": 2},
        "schedule": {"microbatches": 4},
        "trainer": {"module": "a.b", "preload": ["fractions"], "iterations": ITERATIONS},
        "transport": {"deadlineSeconds": 30},
    }
)


def launcher(
    folder: Path, script: str, *, forked: bool = False, **env: str
) -> subprocess.Popen[str]:
    """The launcher of the second pod, whose ranks 2 and 3 run ``script``."""
    (folder / "job.json").write_text(json.dumps(JOB))
    (folder / "train.py").write_text(script)
    program = [str(folder / "train.py")] if forked else ["-c", script]
    command = [sys.executable, "-m", "pipemorph_trainer.launcher", "--grace=5", "--"]
    variables = {
        "PIPEMORPH_POD_INDEX": "1",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "4",
        "MASTER_PORT": "29500",
        "PIPEMORPH_JOB_FILE": str(folder / "job.json"),
        "PIPEMORPH_METRICS_PORT": "9464",
        "PYTHONUNBUFFERED": "1",
    }
    # Ranks that are not forked are programs of their own, and so is their launcher.
    start = PreparedProcess if forked else subprocess.Popen
    return start(
        [*command, sys.executable, "-u", *program],
        env={**os.environ, **variables, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("forked", [False, True])
def test_every_rank_gets_its_own_place_and_its_lines_a_prefix(forked: bool, tmp_path: Path) -> None:
    script = """
import os, sys
assert ("fractions" in sys.modules) is (sys.argv[0] != "-c")
for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PIPEMORPH_METRICS_PORT"):
    print(name, os.environ[name])
"""
    out, err = launcher(tmp_path, script, forked=forked).communicate(timeout=DEADLINE)
    assert err == "", out
    assert sorted(out.splitlines()) == sorted(
        f"[rank {2 + local}] {name} {value}"
        for local in range(2)
        for name, value in {
            "RANK": 2 + local,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": 2,
            "PIPEMORPH_METRICS_PORT": 9464 + local,
        }.items()
    )


@pytest.mark.parametrize("forked", [False, True])
def test_the_exit_code_is_that_of_the_rank_that_failed_by_itself(
    forked: bool, tmp_path: Path
) -> None:
    script = """
import os, sys, time
if os.environ["RANK"] == "3":
    print("no such token: 7")
    sys.exit(41)
time.sleep(300)
"""
    pod = launcher(tmp_path, script, forked=forked)
    out, err = pod.communicate(timeout=DEADLINE)
    assert pod.returncode == 41
    assert err.startswith("rank 3 (stage 3) exited with code 41\n"), err
    assert "  no such token: 7" in err.splitlines()[2]
    assert "[rank 3] no such token: 7" in out


def test_a_killed_rank_ends_the_pod_as_a_shell_would_tell(tmp_path: Path) -> None:
    script = """
import os, signal, time
if os.environ["RANK"] == "2":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(300)
"""
    pod = launcher(tmp_path, script)
    _, err = pod.communicate(timeout=DEADLINE)
    assert pod.returncode == 128 + signal.SIGKILL
    assert "rank 2 (stage 2) was killed by SIGKILL" in err


def test_sigterm_reaches_the_ranks(tmp_path: Path) -> None:
    script = """
import signal, sys, time
def save(*_):
    print("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready")
time.sleep(300)
"""
    pod = launcher(tmp_path, script)
    ready = [pod.stdout.readline() for _ in range(2)]
    assert sorted(ready) == ["[rank 2] ready\n", "[rank 3] ready\n"]
    began = time.monotonic()
    pod.send_signal(signal.SIGTERM)
    out, err = pod.communicate(timeout=DEADLINE)
    assert pod.returncode == 143
    assert sorted(out.splitlines()) == ["[rank 2] saved", "[rank 3] saved"]
    assert "SIGTERM" in err
    assert time.monotonic() - began < 5, "they ended at once, before the grace period"


LEAVES = """
import os
from pathlib import Path
from pipemorph.exits import encode_progress, progress_file_name
rank = int(os.environ["RANK"])
path = Path(os.environ["PIPEMORPH_PROGRESS_DIR"], progress_file_name(rank))
path.write_bytes(encode_progress({finished}, 0))
os._exit(0)
"""


@pytest.mark.parametrize("early", [True, False])
def test_ranks_that_exit_with_0_before_the_last_iteration_have_failed(
    tmp_path: Path, early: bool
) -> None:
    wanted = ITERATIONS - early
    program = LEAVES.format(finished=wanted)
    pod = launcher(tmp_path, program, forked=False, PIPEMORPH_HANG_SECONDS="60")
    _, err = pod.communicate(timeout=DEADLINE)
    assert pod.returncode == early
    said = f"rank 2 (stage 2) exited with code 0 after {wanted} of {ITERATIONS} iterations\n"
    assert (said in err) is early


def test_an_error_of_the_launcher_is_its_last_line_and_the_reason_of_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise KeyError("bookkeeping\nforged")

    (tmp_path / "log").touch()
    monkeypatch.setattr(launcher_main, "TERMINATION_LOG", tmp_path / "log")
    monkeypatch.setattr(launcher_main.Pod, "from_env", fails)
    with pytest.raises(SystemExit) as ends:
        launcher_main.main(["--", "true"])
    said = "the launcher of the pod failed: KeyError: 'bookkeeping\\nforged'"
    assert ends.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1] == said
    assert (tmp_path / "log").read_text() == f"{said}\n"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"PIPEMORPH_POD_INDEX": ""}, "PIPEMORPH_POD_INDEX is ''; expected a number"),
        ({"PIPEMORPH_POD_INDEX": "2"}, "pod 2 with 2 ranks is outside of a job of 4 ranks"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE is 8; the job has 4 stages"),
        ({"PIPEMORPH_JOB_FILE": "/none"}, "PIPEMORPH_JOB_FILE: /none"),
    ],
)
def test_a_pod_that_cannot_start_says_why(
    tmp_path: Path, env: dict[str, str], message: str
) -> None:
    pod = launcher(tmp_path, "print('started')", forked=True, **env)
    out, err = pod.communicate(timeout=DEADLINE)
    assert pod.returncode == EXIT_UNFIT
    assert message in err
    assert "Traceback" not in err
    assert out == ""
