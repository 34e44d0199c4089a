"""Configure Sphinx, which makes the site from the Markdown files as they are.

The source folder is the repository, so links between the files lead to the same files on the site.
"""

import re
from pathlib import Path

import yaml
from docutils import nodes

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

CHINESE = "tutorials/zh/"
CHINESE_TEXTS = {  # of the theme, which has no translation
    "Contents": "本页目录",
    "Menu": "菜单",
    "Expand": "展开",
    "Light mode": "浅色模式",
    "Dark mode": "深色模式",
    "Auto light/dark, in light mode": "跟随系统，目前是浅色模式",
    "Auto light/dark, in dark mode": "跟随系统，目前是深色模式",
    "Toggle site navigation sidebar": "打开或关闭全站目录",
    "Toggle table of contents sidebar": "打开或关闭本页目录",
    "Toggle Light / Dark / Auto color theme": "切换浅色、深色或跟随系统的配色",
    "Skip to content": "跳到正文",
    "Search": "搜索",
    "Index": "索引",
    "Back to top": "回到顶部",
    "Next": "下一页",
    "Previous": "上一页",
    "On this page": "本页目录",
    "Link to this heading": "本节的链接",
    "Made with": "网站主题：",
}

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
    app.connect("doctree-read", mark_chinese)
    app.connect("html-page-context", set_languages, priority=900)  # after Furo's
    app.connect("build-finished", translate_theme)
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


def mark_chinese(app, doctree):
    """Mark the Chinese texts of English pages, for fonts and screen readers."""
    if app.env.docname.startswith(CHINESE):
        return
    for element in doctree.findall(nodes.TextElement):
        if not isinstance(element, nodes.FixedTextElement) and is_chinese(element.astext()):
            element["classes"].append("language-zh-CN")  # docutils turns it into lang="zh-CN"


def is_chinese(text: str) -> bool:
    """Return True if a text has at least as many Chinese words, of two characters, as English."""
    characters = len(re.findall("[\u4e00-\u9fff]", text))
    return characters > 0 and characters / 2 >= len(re.findall("[A-Za-z]+", text))


def set_languages(app, name, template, context, doctree):
    """Set the language of the page, and of each title in the sidebar."""
    if name.startswith(CHINESE):
        context["language"] = "zh-CN"

    def with_language(match):
        return f'<{match[1]} lang="zh-CN"{match[2]}' if is_chinese(match[3]) else match[0]

    tree = context["furo_navigation_tree"]
    tree = re.sub(r"<(a|span)( [^>]*>([^<]*))", with_language, tree)
    context["furo_navigation_tree"] = f'<div lang="en">{tree}</div>'


def translate_theme(app, error):
    """Replace the theme's English texts in the Chinese pages."""
    english = re.compile(rf'(?<=[>"])(\s*)({"|".join(CHINESE_TEXTS)})(\s*)(?=[<"])')
    for page in (Path(app.outdir) / CHINESE).glob("*.html"):
        text = page.read_text(encoding="utf-8")
        text = english.sub(lambda match: match[1] + CHINESE_TEXTS[match[2]] + match[3], text)
        page.write_text(text, encoding="utf-8")


def forward_index(app, error):
    page = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html">'
    (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")
