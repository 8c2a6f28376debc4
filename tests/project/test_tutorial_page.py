"""Pages show the files of the examples that their commands run."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent

ROOT = Path(__file__).resolve().parents[2]


def read_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_tutorial_shows_the_files_that_it_runs() -> None:
    for language, name in (("python", "train.py"), ("yaml", "job.yaml")):
        (shown,) = read_blocks("docs/tutorial.md", language)
        assert (ROOT / "examples/tutorial" / name).read_text().endswith(shown)


def test_readme_shows_the_end_of_the_tutorials_script() -> None:
    shown, *_ = read_blocks("README.md", "python")
    assert shown.startswith("context = ")
    assert (ROOT / "examples/tutorial/train.py").read_text().endswith(f"\n{shown}")


def test_torchtitan_page_shows_lines_of_its_example() -> None:
    (shown,) = read_blocks("docs/how-to/torchtitan.md", "python")
    imported, used = shown.split("\n\n", 1)
    example = (ROOT / "examples/torchtitan/train.py").read_text()
    assert imported in example
    assert example.endswith(indent(used, " " * 4))
