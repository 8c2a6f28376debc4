"""End of a process with a pipeline: by itself, with the right exit code, torn down by no one."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import free_port, run_ranks
from torch import nn

from pipemorph_trainer import Pipeline, TrainerContext

LATE = r"""
// A gloo worker that is slow to let go of what it worked on: once armed, it stops after it has
// said that it is done, until the interpreter is about to end, or for three seconds.
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

static std::atomic<bool> armed{false}, ending{false};
extern "C" void arm() { armed = true; }
// Holds the interpreter while it ends. A thread that requests it now is too late.
extern "C" void end() { ending = true; usleep(1000000); }

void std::condition_variable::notify_all() noexcept {
    static const auto real = reinterpret_cast<void (*)(std::condition_variable*)>(
        dlsym(RTLD_NEXT, "_ZNSt18condition_variable10notify_allEv"));
    real(this);
    char name[16] = {};
    pthread_getname_np(pthread_self(), name, sizeof name);
    if (!armed || std::strcmp(name, "pt_gloo_runloop") != 0) return;
    for (int i = 0; i < 300 && !ending; ++i) usleep(10000);
}
"""

TRAIN = """
import atexit, ctypes, os, sys
late = ctypes.PyDLL(os.environ["LATE"])
atexit.register(late.end)
import torch
from torch import nn
from pipemorph_trainer import Pipeline, TrainerContext

pipe = Pipeline(
    nn.Linear(4, 4), context=TrainerContext.from_env(), loss_fn=nn.functional.mse_loss,
    microbatches=2, deadline_seconds=20.0,
)
pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
late.arm()
pipe.clip_grad_norm_(1.0)
if sys.argv[1] == "closed":
    pipe.close()
elif sys.argv[1] == "failed":
    pipe.__exit__(ValueError, ValueError("as in a with statement"), None)
print("the last line")
"""

OF_ONE_GROUP = 2
"""Threads that gloo starts for the collectives of a group."""

PEER_STOPS = """
import os, signal, torch
from torch import nn
from pipemorph_trainer import Options, Pipeline, TrainerContext

context = TrainerContext.from_env()
with Pipeline(
    nn.Linear(4, 4), context=context, loss_fn=nn.functional.mse_loss, microbatches=2,
    options=Options(route="direct"), deadline_seconds=5.0,
) as pipe:
    pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    pipe.clip_grad_norm_(1.0)
"""


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes gloo's workers slow, for LD_PRELOAD."""
    folder = tmp_path_factory.mktemp("late")
    (folder / "late.cpp").write_text(LATE)
    built = folder / "late.so"
    compiler = os.environ.get("CXX", "c++")
    subprocess.run(
        [compiler, "-std=c++20", "-shared", "-fPIC", str(folder / "late.cpp"), "-o", str(built)],
        check=True,
    )
    return built


@pytest.mark.full
@pytest.mark.parametrize("how", ["closed", "failed", "forgotten"])
def test_a_worker_that_lets_go_late_does_not_abort_the_process(
    how: str, late: Path, tmp_path: Path
) -> None:
    """Late workers once ended runs with "terminate called without an active exception"."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = subprocess.run(
        [sys.executable, str(script), how],
        env=environment(0, 1, free_port()) | {"LATE": str(late), "LD_PRELOAD": str(late)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    assert done.stdout == "the last line\n"


@pytest.mark.full
def test_a_rank_whose_peer_has_stopped_ends_by_itself(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PEER_STOPS)
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(rank, 2, port),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, output = ranks[0].communicate(timeout=100)
        assert ranks[1].poll() is None, "rank 1 was to be stopped, and has ended"
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.communicate()
    assert ranks[0].returncode == 1, f"{ranks[0].returncode}: {output[-3000:]}"
    waited = re.search(r"waited ([\d.]+) s for the gradient norm of iteration 0", output)
    assert waited is not None and float(waited[1]) >= 5.0, output[-3000:]


def workers() -> int:
    """Threads of gloo that run collectives."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            found += (task / "comm").read_text().strip() == "pt_gloo_runloop"
    return found


def wait_for_workers(wanted: int) -> None:
    """A closed pipeline is garbage once its last thread has noticed."""
    deadline = time.monotonic() + 30
    while gc.collect() >= 0 and workers() != wanted:
        assert time.monotonic() < deadline, f"{workers()} threads of gloo, expected {wanted}"
        time.sleep(0.01)


def two_pipelines(context: TrainerContext, mine: bool) -> None:
    if mine:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{context.master_port}",
            rank=context.rank,
            world_size=context.world_size,
        )
    for _ in range(2):
        pipe = Pipeline(
            nn.Linear(4, 4), context=context, loss_fn=nn.functional.mse_loss, microbatches=2,
            stages=2, deadline_seconds=30.0,
        )  # fmt: skip
        pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        pipe.clip_grad_norm_(1.0)
        assert workers() > OF_ONE_GROUP
        pipe.close()
        del pipe
        # Workers of the default group.
        wait_for_workers(OF_ONE_GROUP)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value == context.world_size


@pytest.mark.parametrize(
    "mine",
    [
        pytest.param(True, id="user's group"),
        pytest.param(False, marks=pytest.mark.full, id="pipeline's group"),
    ],
)
def test_a_pipeline_takes_its_groups_with_it_and_leaves_the_default_one(mine: bool) -> None:
    run_ranks(4, two_pipelines, mine, timeout=100.0)


def fail_without_groups(context: TrainerContext) -> None:
    pipe = Pipeline(
        nn.Linear(4, 4), context=context, loss_fn=nn.functional.mse_loss, microbatches=2,
        deadline_seconds=30.0,
    )  # fmt: skip
    pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    dist.destroy_process_group()
    pipe.__exit__(ValueError, ValueError("as in a with statement"), None)


@pytest.mark.full
def test_a_user_may_destroy_all_groups_before_a_pipeline_is_taken_down() -> None:
    run_ranks(2, fail_without_groups, timeout=100.0)
