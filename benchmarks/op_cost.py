"""Processor time of the main thread per op, beyond the op itself.

One command: ``python benchmarks/op_cost.py [--against REVISION] [--json FILE]``. Two stages, each a
linear layer of 8 values, run 64 microbatches under zero-bubble, so that the ops cost next to
nothing. Per iteration, what the main thread has used of a processor (``CLOCK_THREAD_CPUTIME_ID``)
less what the forwards and backwards themselves took of it is divided by the number of ops:
messages, waits, telemetry and the boundary between two iterations. Waiting uses no processor time,
so other load on the machine changes it less than a time on the clock.

With ``--against`` that revision is checked out and built below ``~/.cache/pipemorph/revisions``,
runs in turn with this one, and the ratio is printed. Exits 1 if it is above 0.5 on the direct
route, or above 0.4 on the delegated one.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any

STAGES, MICROBATCHES, WIDTH, WARM_UP = 2, 64, 8, 3
ROUTES = ("direct", "delegated")
LIMITS = {"direct": 0.5, "delegated": 0.4}
DEADLINE_SECONDS = 300


def rank_main(route: str, iterations: int) -> None:
    """What every rank runs. Rank 0 prints a line of JSON: microseconds per op on each rank."""
    import torch
    import torch.distributed as dist

    import pipemorph_trainer
    from pipemorph_trainer import Pipeline, TrainerContext

    context = TrainerContext.from_env()
    torch.set_num_threads(1)
    torch.manual_seed(context.rank)
    options: dict[str, Any] = {"route": route}
    if "options" in inspect.signature(Pipeline.__init__).parameters:  # Not in older revisions.
        options = {"options": pipemorph_trainer.Options(**options)}
    pipe = Pipeline(
        torch.nn.Linear(WIDTH, WIDTH), context=context, policy="zero-bubble",
        loss_fn=torch.nn.functional.mse_loss, microbatches=MICROBATCHES, **options,
    )  # fmt: skip
    in_ops = [0.0]

    def timed(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = thread_time()
        found = run(*args, **kwargs)
        in_ops[0] += thread_time() - began
        return found

    # Found by its name, since revisions keep it in different places.
    runner: Any = next(each for each in gc.get_objects() if type(each).__name__ == "StageRunner")
    for name in ("forward", "backward_input", "backward_weight", "backward"):
        setattr(runner, name, partial(timed, getattr(runner, name)))
    x, target = torch.randn(2, MICROBATCHES, WIDTH).unbind()
    costs = []
    for _ in range(WARM_UP + iterations):
        in_ops[0], began = 0.0, thread_time()
        pipe.step(x, target=target)
        costs.append(thread_time() - began - in_ops[0])
    found = torch.zeros(STAGES, dtype=torch.float64)
    found[context.rank] = statistics.median(costs[WARM_UP:]) / (3 * MICROBATCHES) * 1e6
    dist.all_reduce(found)
    pipe.close()
    if context.rank == 0:
        print(json.dumps(found.tolist()), flush=True)


def built(revision: str) -> Path:
    """The interpreter of an environment with ``revision`` of this project, and otherwise what is
    installed here. Built once.

    Raises :class:`subprocess.CalledProcessError` if the revision does not exist or build."""
    here = Path(__file__).resolve().parents[1]
    name = _output(["git", "-C", str(here), "rev-parse", "--verify", f"{revision}^{{commit}}"])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pipemorph"
    root = cache / "revisions" / name
    python = root / "bin" / "python"
    done = (root / ".built").exists()
    if not done:
        shutil.rmtree(root, ignore_errors=True)
        venv.create(root)
    packages = _output(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    )
    # Behind its own packages; .pth files there, of an editable install, have no effect. Every time,
    # since another checkout may have built it, with packages that are gone.
    (Path(packages) / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if done:
        return python
    uv = Path(sys.executable).with_name("uv")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        archive = source / "source.tar"
        _output(["git", "-C", str(here), "archive", "--output", str(archive), name])
        _output(["tar", "-C", folder, "-xf", str(archive)])
        _output(
            [str(uv), "pip", "install", "--quiet", "--no-deps", "--python", str(python), folder]
        )
    (root / ".built").touch()
    return python


def _output(command: list[str]) -> str:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=900)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="REVISION", help="runs in turn with this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=30, help="per route and round")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rank", choices=ROUTES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.rank, args.iterations)
        return 0
    # Not on the path of another revision.
    from goals import finish
    from ranks import run_ranks

    contenders = {"this revision": Path(sys.executable)}
    if args.against:
        contenders[args.against] = built(args.against)
    found: dict[str, dict[str, list[float]]] = {
        route: {name: [] for name in contenders} for route in ROUTES
    }
    """Per round, the mean over ranks."""
    for _ in range(args.rounds):
        for route in ROUTES:
            for name, python in contenders.items():
                flags = [route, "--iterations", str(args.iterations)]
                line = run_ranks(__file__, STAGES, flags, DEADLINE_SECONDS, python=python)
                found[route][name].append(statistics.fmean(json.loads(line)))
    print(
        f"processor time of the main thread per op beyond the op, µs; {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}; medians of {args.rounds} rounds\n"
        "| route | revision | µs per op | spread |\n|---|---|---:|---:|"
    )
    goals = []
    for route, by_name in found.items():
        for name, costs in by_name.items():
            print(
                f"| {route} | {name} | {statistics.median(costs):.0f} | "
                f"{min(costs):.0f}–{max(costs):.0f} |"
            )
    for route, by_name in found.items():
        for name in list(by_name)[1:]:
            ratios = [a / b for a, b in zip(by_name["this revision"], by_name[name], strict=True)]
            ratio, limit = statistics.median(ratios), LIMITS[route]
            spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
            goal = f"{route}: {ratio:.2f}× of {name} ({spread}); goal: at most {limit}×"
            goals.append((goal, ratio <= limit))
    return 0 if finish(goals, args.json, found) else 1


if __name__ == "__main__":
    sys.exit(main())
