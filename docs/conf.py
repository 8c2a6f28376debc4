"""The documentation site: ``make docs`` builds it with Sphinx, and every warning is an error.

The sources are the pages as they lie in the repository, so links between them hold in both places.
"""

import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from api_reference import fill_docstrings  # noqa: E402

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = "PipeMorph"
author = "The PipeMorph contributors"
release = version = _PROJECT["version"]

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
include_patterns = ["*.md", "docs/**.md", "charts/pipemorph-operator/README.md"]
exclude_patterns = [".*", "build", "csrc", "operator", "pipemorph", "shared", "tests", "trainer"]
root_doc = "docs/index"
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"PipeMorph {release}"
html_copy_source = False

# In the order of the side bar. A page that is missing here fails the build.
CONTENTS = {
    "Start": ("/README", "tutorial"),
    "Train": (
        "running",
        "how-to/write-a-training-script",
        "how-to/use-meshes",
        "how-to/uneven-batches",
        "how-to/checkpoints",
        "how-to/track-experiments",
        "how-to/adapt-under-torchrun",
        "how-to/adapt-torch-stages",
        "how-to/torchtitan",
        "how-to/kubeflow-trainer",
        "how-to/use-with-other-libraries",
        "how-to/use-from-python",
        "how-to/megatron-core",
        "how-to/observe",
        "how-to/diagnose-a-profiler-trace",
        "how-to/plan-without-training",
        "how-to/reproduce-the-paper",
        "cuda",
    ),
    "Operate": (
        "how-to/install",
        "how-to/upgrade",
        "how-to/run-on-a-cluster",
        "how-to/watch-a-job",
        "how-to/slow-job",
        "how-to/failed-job",
        "how-to/check-hardware",
        "/charts/pipemorph-operator/README",
    ),
    "Look up": (
        "/SUPPORT",
        "reference/job-spec",
        "reference/job-spec-cluster",
        "reference/job-spec-faults",
        "reference/cli",
        "reference/api",
        "reference/problem-file",
        "reference/op-table",
        "reference/report",
        "reference/conditions",
        "reference/metrics",
        "reference/alerts",
        "reference/limits",
        "reference/protocol",
        "reference/attacks",
        "glossary",
        "benchmarks",
        "benchmark-details",
    ),
    "Understand": (
        "ARCHITECTURE",
        "control-loop",
        "detection",
        "schedules",
        "trainer",
        "stage-rules",
        "split-backward",
        "activation-memory",
        "recovery",
        "state-in-memory",
        "engine",
        "engine-internals",
        "security",
        "scaling",
        "decisions/index",
    ),
    "Change it": (
        "/CONTRIBUTING",
        "how-to/add-a-policy",
        "how-to/add-a-transport",
        "how-to/add-a-condition",
        "how-to/add-an-alert",
        "testbeds",
        "testbed-fixtures",
    ),
    "The project": ("/CHANGELOG", "/SECURITY", "/CODE_OF_CONDUCT"),
}
API = "docs/reference/api"
HOME = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n'


def add_contents(_: Sphinx, page: str, source: list[str]) -> None:
    """Adds side bar entries, which readers of the Markdown need not see."""
    decisions = sorted(path.stem for path in (ROOT / "docs/decisions").glob("0*.md"))
    for caption, pages in {
        root_doc: CONTENTS,
        "docs/decisions/index": {"Decisions": decisions},
    }.get(page, {}).items():
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n"
        source[0] += "\n".join(pages) + "\n```\n"


def add_docstrings(_: Sphinx, page: str, source: list[str]) -> None:
    """Fills the page of the Python API, which readers of the Markdown have in ``help()``."""
    if page == API:
        source[0] = fill_docstrings(source[0])


def add_home(app: Sphinx, error: Exception | None) -> None:
    """``index.html`` leads to the page that a visitor starts with."""
    if error is None:
        (Path(app.outdir) / "index.html").write_text(HOME)


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("source-read", add_docstrings)
    app.connect("build-finished", add_home)
