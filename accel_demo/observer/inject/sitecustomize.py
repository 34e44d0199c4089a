"""Load the observer, then the `sitecustomize` that Python would import without this folder.

Python imports a module called `sitecustomize` at startup, from the first folder on PYTHONPATH.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location

NAME = "accel_demo_observer"  # not accel_demo.observer: the script's Python may not have accel_demo


def load_observer() -> None:
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    file = os.path.join(package, "__init__.py")
    spec = spec_from_file_location(NAME, file, submodule_search_locations=[package])
    load(spec, NAME)
    import_module(f"{NAME}.agent").start()


def load(spec, name: str) -> None:
    """Execute a module. It may import itself meanwhile."""
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def import_next() -> None:
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != own]
    if spec := PathFinder.find_spec("sitecustomize"):
        load(spec, "sitecustomize")


if "ACCEL_DEMO_AUDIT" in os.environ or "ACCEL_DEMO_NODE" in os.environ:
    try:
        load_observer()
    except Exception as error:  # the training must start in any case; nothing of it is reported
        print(f"accel-demo: the observer could not start ({error!r})", file=sys.stderr)
if __name__ == "sitecustomize":  # not in a forked process, which has imported the next one already
    import_next()
