"""Functions that run when a module has been imported, so that observing imports nothing itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def call_after_import(name: str, function: Callable[[], object]) -> None:
    """Call ``function`` when the module ``name`` has been imported; at once if it is already."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _ModuleFinder(name, function))


class _ModuleFinder(MetaPathFinder):
    """Finds one module as the import system does, and calls a function after it was executed."""

    def __init__(self, name: str, function: Callable[[], object]) -> None:
        self._name = name
        self._function = function

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        # Also those of editable installations.
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _CallingLoader(spec.loader, self._function)
                return spec
        return None


class _CallingLoader(Loader):
    """A module's own loader, and a function that is called after the module was executed."""

    def __init__(self, loader: Any, function: Callable[[], object]) -> None:
        self._loader = loader
        self._function = function

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # inspect and others read a module's own loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._function()
