"""Call a function as soon as a module has been imported.

`importlib.util.find_spec(name)` also asks a finder, and imports nothing: transformers and others
test for torch like this. So the function is called when the module is executed.
"""

import sys
from importlib.abc import Loader
from importlib.machinery import PathFinder

from .events import guarded

_waiting: dict[str, list] = {}  # maps the name of a module to the functions to call


def when_imported(name: str, function) -> None:
    """Call `function(module)` when the module is imported, or now if it already is.

    An error in the function does not reach the script.
    """
    if name in sys.modules:
        guarded(function)(sys.modules[name])
        return
    if not _waiting:
        sys.meta_path.insert(0, _Finder)
    _waiting.setdefault(name, []).append(guarded(function))


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in _waiting:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ObservingLoader(spec.loader)
        return spec


class _ObservingLoader(Loader):
    """The loader of the module. It calls the waiting functions after the module was executed."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for function in _waiting.pop(module.__name__, []):
            function(sys.modules[module.__name__])
