"""The documentation site: ``make docs`` builds it with Sphinx, and every warning is an error.

The sources are the pages as they lie in the repository, so links between them hold in both places.
"""

import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
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
    "Start": ("/README",),
    "Use it": (
        "running",
        "job-spec",
        "trainer",
        "how-to/adapt-under-torchrun",
        "how-to/torchtitan",
        "how-to/kubeflow-trainer",
        "how-to/megatron-core",
        "cuda",
        "operations",
        "security",
        "/charts/pipemorph-operator/README",
        "schedules",
        "benchmarks",
    ),
    "How it works": (
        "ARCHITECTURE",
        "glossary",
        "control-loop",
        "stage-rules",
        "split-backward",
        "engine",
        "scaling",
    ),
    "Change it": (
        "/CONTRIBUTING",
        "how-to/add-a-policy",
        "how-to/add-a-transport",
        "how-to/add-a-condition",
        "testbeds",
        "decisions/index",
    ),
    "The project": ("/CHANGELOG", "/SECURITY", "/CODE_OF_CONDUCT"),
}
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


def add_home(app: Sphinx, error: Exception | None) -> None:
    """``index.html`` leads to the page that a visitor starts with."""
    if error is None:
        (Path(app.outdir) / "index.html").write_text(HOME)


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("build-finished", add_home)
