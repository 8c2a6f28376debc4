"""docs/reference/job-spec*.md: tables are those of the models, and every field has a row."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from pipemorph.spec.job_spec import JobSpec

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("job_spec", DOCS / "job_spec.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_models(script: ModuleType) -> None:
    assert script.PAGES
    for path in script.PAGES:
        text = path.read_text()
        assert script.page(text) == text, "run: python docs/job_spec.py"


def test_every_field_of_the_spec_is_on_a_page(script: ModuleType) -> None:
    text = "".join(path.read_text() for path in script.PAGES)
    for field in JobSpec.model_fields.values():
        name = field.alias
        assert f"<!-- fields: spec.{name} -->" in text or f"\n| `{name}` |" in text, name


def test_a_table_of_no_field_is_an_error(script: ModuleType) -> None:
    with pytest.raises(KeyError, match="colour"):
        script.page("<!-- fields: spec.colour -->\n<!-- end -->\n")
