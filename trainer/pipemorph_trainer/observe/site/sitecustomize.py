"""Begins the observation of a process whose environment has ``PIPEMORPH_OBSERVE``.

This folder is put on ``PYTHONPATH`` by the user. The next ``sitecustomize`` on the path, which this
one hides, runs as without it.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _run_next() -> None:
    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec(
        "sitecustomize", [each for each in sys.path if Path(each).resolve() != here]
    )
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if os.environ.get("PIPEMORPH_OBSERVE"):
    try:
        from pipemorph_trainer.observe import observe

        observe()
    except Exception as error:  # noqa: BLE001 - training goes on, whatever it is
        print(f"PipeMorph does not observe this process: {error}", file=sys.stderr)
_run_next()
