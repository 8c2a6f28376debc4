"""docs/reference/api.md: every public name of the trainer has a place, and a docstring fills it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import pipemorph.client
import pipemorph_trainer
import pipemorph_trainer.data
import pipemorph_trainer.torch

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "reference/api.md").read_text()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_reference", DOCS / "api_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_on_the_page() -> None:
    modules = (
        pipemorph_trainer, pipemorph_trainer.torch, pipemorph_trainer.data, pipemorph.client,
    )  # fmt: skip
    names = {name for module in modules for name in module.__all__} - {"SplitBackward"}
    assert not names - set(re.findall(r"\w+", PAGE))


def test_docstrings_fill_every_place(script: ModuleType) -> None:
    for name in script.MARK.findall(PAGE):
        text = script.describe_name(name)
        assert len(text.split()) > 10, name
        assert "``" not in text.replace("```", "") and ":class:" not in text, name


def test_a_name_that_does_not_exist_is_an_error(script: ModuleType) -> None:
    with pytest.raises(KeyError, match="Pipelines"):
        script.fill_docstrings("<!-- api: pipemorph_trainer.Pipelines -->")
