"""Configure Sphinx, which makes the site from the Markdown files as they are.

The source folder is the repository, so links between the files lead to the same files on the site.
"""

from pathlib import Path

import yaml

REPOSITORY = Path(__file__).parents[1]
COURSE = yaml.safe_load((REPOSITORY / "tutorials/course.yaml").read_text(encoding="utf-8"))
MODULES = [  # in docs/api.md
    "processes.group",
    "processes.devices",
    "processes.connect",
    "processes.environment",
    "processes.launch",
    "processes.launch_checks",
    "data",
    "batches",
    "models",
    "config",
    "options",
    "show",
    "wording",
    "errors",
    "files",
    "lab.measurements",
    "anatomy.batch_norm",
    "anatomy.ring",
    "anatomy.data_parallel.phases",
]

project = html_title = "accel-demo"
root_doc = "README"
include_patterns = [
    "*.md",
    "tutorials/*.md",
    "tutorials/pitfalls/*.md",
    "tutorials/zh/*.md",
    "accelerate_configs/*.md",
    "accel_demo/*/*.md",
    "benchmarks/*.md",
    "docs/*.md",
]
extensions = ["myst_parser", "sphinx.ext.autodoc"]

myst_heading_anchors = 6  # links such as page.md#section, with GitHub's names of sections
myst_enable_extensions = ["html_image"]  # also copies pictures in <img>

default_role = "code"  # of `names` in docstrings
autodoc_default_options = {"members": True}
add_module_names = False
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # PyTorch's docstrings link to its own pages

html_theme = "furo"
html_static_path = ["site.css", "predict.js"]
html_css_files = ["site.css"]
html_js_files = [("predict.js", {"defer": "defer"})]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_show_search_summary = False  # it would fetch pages, which a browser refuses for file://


def setup(app):
    app.connect("source-read", add_contents)
    app.connect("source-read", add_modules)
    app.connect("build-finished", forward_index)


def add_contents(app, name, source):
    """Append the table of contents in the sidebar to the first page."""
    if name != root_doc:
        return
    source[0] += contents("The course", ["tutorials/README", "tutorials/pitfalls/README"])
    for number, title in COURSE["parts"].items():
        pages = [page for page, *_ in COURSE["pages"] if page.startswith(str(number))]
        source[0] += contents(f"{number} · {title}", [f"tutorials/{page}" for page in pages])
    source[0] += contents("中文", ["tutorials/zh/README", "tutorials/zh/[0-9]*"])
    reference = ["accel_demo/*/README", "docs/api", "accelerate_configs/README"]
    source[0] += contents("The package", [*reference, "benchmarks/BENCHMARKS", "tutorials/SKILL"])
    source[0] += contents("The project", ["CONTRIBUTING", "CHANGELOG"])


def contents(caption: str, patterns: list[str]) -> str:
    entries = "\n".join(patterns)
    return f"\n\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{entries}\n```\n"


def add_modules(app, name, source):
    """Append a section for each module to the page of functions and classes."""
    if name != "docs/api":
        return
    for module in MODULES:
        directive = f"```{{eval-rst}}\n.. automodule:: accel_demo.{module}\n```\n"
        source[0] += f"\n## `accel_demo.{module}`\n\n{directive}"


def forward_index(app, error):
    page = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html">'
    (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")
