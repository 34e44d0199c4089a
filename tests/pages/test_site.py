"""Build the site as CONTRIBUTING.md says, and use it in Chromium, from files and offline."""

import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.conftest import BIN, REPOSITORY

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
COMMAND = "sphinx-build -W -E -c docs -d build/doctrees . build/site"
WITH_OPTIONS, WITH_TEXT = "tutorials/46_send_less.html", "tutorials/22_ddp.html"
CHINESE = ["tutorials/zh/10_where_am_i.html", "tutorials/zh/11_from_one_process_to_many.html"]
PREDICTING = [WITH_OPTIONS, WITH_TEXT, *CHINESE]
TYPICAL = ["README.html", "tutorials/10_where_am_i.html", "tutorials/zh/README.html", *PREDICTING]
VIEWS = [(390, "dark", True), (1280, "light", False)]
MORE_VIEWS = [(390, "light", False), (1280, "dark", True)]
# Sections and words of a page in each language
WORDS = {
    "en": ["Run", "See", "Why", "Your prediction", "Prediction", "Show results", "You predicted: "],
    "zh-CN": ["运行", "观察", "为什么", "预测题的答案", "你的预测", "显示结果", "你的预测："],
}
WIDER_THAN_SCREEN = "document.documentElement.scrollWidth > innerWidth"
SEVERE = """async () => (await axe.run({ preload: false })).violations
    .filter(found => ["serious", "critical"].includes(found.impact))
    .map(found => `${found.id}: ${found.nodes.map(node => node.html).join(" ")}`)"""


def run_sphinx(command: str, folder: Path) -> subprocess.CompletedProcess:
    words = shlex.split(command.replace("build/", f"{folder}/"))
    program = [sys.executable, BIN / words[0], *words[1:]]
    return subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder with the site."""
    folder = tmp_path_factory.mktemp("build")
    result = run_sphinx(COMMAND, folder)
    assert result.returncode == 0, result.stderr
    return folder / "site"


@pytest.fixture
def opened(open_page, site):
    """`opened(name)` opens a page of the site. After the test, the browser forgets predictions."""
    pages = []

    def opened(name: str, width: int = 1280, theme: str = "light", anchor: str = ""):
        page = open_page(site / name, width, site=site, anchor=anchor)
        page.emulate_media(color_scheme=theme)
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.evaluate("localStorage.clear()")


def test_the_documentation_has_the_command():
    assert COMMAND in (REPOSITORY / "README.md").read_text()
    assert COMMAND in (REPOSITORY / "CONTRIBUTING.md").read_text()


def test_a_link_to_a_missing_section_stops_the_build(tmp_path):
    (tmp_path / "README.md").write_text("# Title\n\n[link](README.md#no-such-section)\n")
    result = run_sphinx(COMMAND.replace(" . ", f" {tmp_path} "), tmp_path)
    assert result.returncode == 1
    assert "no-such-section" in result.stderr


def test_every_link_leads_to_a_file_and_a_section_of_the_site(site):
    pages = {path: read_links(path) for path in site.rglob("*.html")}
    assert len(pages) > 40
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                assert link.startswith(("https://", "http://")), (path, link)
                continue
            name, _, section = link.partition("#")
            target = (path.parent / unquote(name.partition("?")[0])).resolve() if name else path
            assert target.is_file() and target.is_relative_to(site.resolve()), (path, link)
            assert not section or unquote(section) in pages[target].names, (path, link)


class Links(HTMLParser):
    """The links of a page, the files that it loads, and the names that a link can end with."""

    def __init__(self):
        super().__init__()
        self.links, self.names = set(), {""}

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.links |= {values[name] for name in ("href", "src") if values.get(name)}
        self.names.add(values.get("id"))


def read_links(path: Path) -> Links:
    links = Links()
    links.feed(path.read_text(encoding="utf-8"))
    return links


def test_every_page_opens_on_a_phone_and_asks_for_a_prediction_if_it_has_an_answer(opened, site):
    with_answer, asking = set(), set()
    for markdown in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "tutorials").glob("**/*.md")]:
        name = str(markdown.relative_to(REPOSITORY).with_suffix(".html"))
        if re.search(r"\n\*\*(Your prediction|预测题的答案)\*\*", markdown.read_text()):
            with_answer.add(name)
    names = [str(path.relative_to(site)) for path in site.rglob("*.html")]
    page = opened("README.html", width=390)
    for name in {*names} - {"index.html"}:  # which leads to README.html
        page.goto((site / name).as_uri())
        assert not page.evaluate(WIDER_THAN_SCREEN), name
        assert name == "CONTRIBUTING.html" or "[[[cog" not in page.inner_text("body"), name
        if page.locator("[name=prediction]").count():
            asking.add(name)
            assert words_of(page)[3] not in page.inner_text("article"), name
    assert with_answer == asking and len(asking) > 34


def words_of(page):
    """Return the words of the page's language."""
    return WORDS[page.evaluate("document.documentElement.lang")]


def section(page, heading):
    return page.locator(f"section > section:has(> h2:text-matches('^{heading}¶'))")


@pytest.mark.parametrize(
    ("name", "width", "theme", "predicts"),
    [(name, *view) for name in TYPICAL for view in VIEWS]
    + [(CHINESE[0], *view) for view in MORE_VIEWS],
)
def test_axe_finds_nothing_severe(opened, name, width, theme, predicts):
    from axe_playwright_python.base import AXE_SCRIPT

    page = opened(name, width, theme)
    page.evaluate(AXE_SCRIPT)
    if predicts and "README" not in name:
        predict(page)
    assert not page.evaluate(WIDER_THAN_SCREEN)
    assert page.evaluate(SEVERE) == []


def test_the_background_follows_the_theme_of_the_system(opened):
    color = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert max(opened("README.html", theme="dark").evaluate(color)) < 64
    assert min(opened("README.html", theme="light").evaluate(color)) > 192


def predict(page):
    """Predict with the keyboard."""
    field = page.locator("[name=prediction]")
    field.first.focus()
    if field.count() > 1:
        page.keyboard.press("ArrowDown")
    else:
        page.keyboard.type("(b) my answer")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")


@pytest.mark.parametrize("name", PREDICTING)
def test_the_results_are_hidden_until_the_reader_has_predicted(opened, name):
    page = opened(name)
    run, see, why, answer, legend, button, predicted = words_of(page)
    answers = page.get_by_text(answer, exact=True)  # one for each question
    results = [section(page, see), section(page, why), *answers.all()]
    entries = page.locator(".toc-tree").get_by_text(re.compile(f"^({see}|{why})$"))
    assert page.inner_text("legend") == legend
    page.get_by_role("button", name=button).click()  # without a prediction
    assert section(page, run).is_visible()
    assert len(results) > 2 and not any(result.is_visible() for result in results)
    assert entries.evaluate_all("all => all.map(link => link.offsetParent)") == [None, None]
    predict(page)
    assert all(result.is_visible() for result in results)
    assert f"{predicted}(b)" in page.locator(".prediction").nth(1).inner_text()
    assert f"{predicted}(b)" in page.evaluate("document.activeElement.innerText")
    assert None not in entries.evaluate_all("all => all.map(link => link.offsetParent)")
    link = page.locator(".prediction a").get_attribute("href")
    assert link == f"#{section(page, see).get_attribute('id')}"
    page.reload()
    assert page.locator(".prediction").nth(1).is_visible()
    assert page.locator("[name=prediction]").count() == 0


@pytest.mark.parametrize("folder", ["tutorials", "tutorials/zh"])
def test_outputs_before_the_section_see_are_hidden_too(opened, folder):
    page = opened(f"{folder}/11_from_one_process_to_many.html")
    outputs = section(page, words_of(page)[0]).locator(".highlight-text")
    assert outputs.count() == 3 and not outputs.first.is_visible()
    predict(page)
    assert outputs.first.is_visible()


def test_a_link_to_a_section_shows_it_without_a_prediction(opened):
    assert opened(WITH_TEXT, anchor="#common-mistakes").locator("#common-mistakes").is_visible()
    page = opened("tutorials/50_when_it_hangs.html")
    page.click("#run a[href='#on-your-script']")
    page.wait_for_selector("#on-your-script", state="visible")


@pytest.mark.parametrize("name", [WITH_OPTIONS, CHINESE[0]])
def test_without_javascript_everything_is_shown(opened, chromium, name):
    page = opened(name)
    session = chromium.new_cdp_session(page)
    session.send("Emulation.setScriptExecutionDisabled", {"value": True})
    page.reload()
    _, see, _, answer, *_ = words_of(page)
    assert section(page, see).is_visible() and page.get_by_text(answer).is_visible()
    assert page.locator("section li").get_by_text(re.compile(r"^\(a\) ")).first.is_visible()
    assert page.locator("[name=prediction]").count() == 0


def test_each_page_and_each_title_in_the_sidebar_has_its_language(opened, site):
    page, chinese = opened("README.html"), {*(site / "tutorials/zh").glob("*.html")}
    assert len(chinese) > 4
    for path in [*chinese, site / "tutorials/README.html", site / "docs/api.html"]:
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.lang") == (
            "zh-CN" if path in chinese else "en"
        )
        titles = page.evaluate(
            """[...document.querySelectorAll(".sidebar-tree :is(a, .caption-text)")].map(
                title => [title.textContent, title.closest("[lang]").lang])"""
        )
        assert len(titles) > 40
        for title, language in titles:
            assert (language == "zh-CN") == bool(re.search("[\u4e00-\u9fff]", title)), title


def test_chinese_texts_of_english_pages_have_their_language(opened):
    page = opened("tutorials/README.html")
    language = "element => element.closest('[lang]').lang"
    for text, expected in [("中文读者", "zh-CN"), ("激活值", "zh-CN"), ("activation", "en")]:
        assert page.get_by_text(text, exact=True).first.evaluate(language) == expected


@pytest.mark.parametrize("name", ["tutorials/zh/README.html", *CHINESE])
def test_the_theme_is_in_chinese_on_a_chinese_page(opened, name):
    page = opened(name)
    attributes = """["aria-label", "title", "placeholder"].flatMap(name => {
        const elements = [...document.querySelectorAll(`body [${name}]`)];
        return elements.map(element => element.getAttribute(name));
    })"""
    texts = ".skip-to-content, .back-to-top, .toc-title, .related-pages .context, svg title"
    labels = [*page.evaluate(attributes), *page.locator(texts).all_text_contents()]
    assert len(labels) > 20
    assert [label for label in labels if not re.search("[\u4e00-\u9fff]", label)] == []


@pytest.mark.parametrize("chinese", ["tutorials/zh/README.html", *CHINESE])
def test_a_page_leads_to_its_translation_and_back(opened, chinese):
    page = opened(chinese)
    page.get_by_role("link", name="English", exact=True).click()
    assert page.url.endswith(chinese.replace("zh/", "")) and "/zh/" not in page.url
    page.locator("article").get_by_role("link", name=re.compile("^中文")).first.click()
    assert page.url.endswith(chinese)


def test_the_index_leads_to_the_readme_and_the_search_finds_a_term(opened):
    page = opened("index.html")
    page.wait_for_url("**/README.html")
    page.fill("input[name=q]", "straggler")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="40 · Where the time goes").nth(1).wait_for()
    assert "search.html" in page.url
