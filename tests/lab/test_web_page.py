"""Test that a page needs no other file and runs only its own script."""

import json

import pytest

from accel_demo.lab.web_page import escape, write_page

PLANTED = "</script><script>document.title = 'planted'</script><img src=x onerror=alert(1)>"
SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
document.getElementById("here").textContent = data.text;
"""


def test_markup_in_the_title_or_the_data_is_escaped(tmp_path):
    file = tmp_path / "page.html"
    write_page(file, PLANTED, f"<p>{escape(PLANTED)}</p>", script=SCRIPT, data={"text": PLANTED})
    written = file.read_text()
    assert PLANTED not in written and "<img" not in written
    inert = written.split('id="data">')[1].split("</script>")[0]
    assert json.loads(inert) == {"text": PLANTED}


def test_nan_in_the_data_is_an_error_and_no_page_is_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_page(tmp_path / "page.html", "Title", "", data={"loss": float("nan")})
    assert not list(tmp_path.iterdir())


@pytest.mark.browser
def test_a_page_runs_only_its_own_script_and_requests_nothing(open_page, tmp_path):
    file = tmp_path / "page.html"
    body = f'<p id="here"></p><p>{escape(PLANTED)}</p>'
    write_page(file, "Title", body, script=SCRIPT, data={"text": PLANTED})
    page = open_page(file)
    assert page.title() == "Title"
    assert page.inner_text("#here") == PLANTED


@pytest.mark.browser
def test_an_unescaped_script_does_not_run(chromium, tmp_path):
    file = tmp_path / "page.html"
    write_page(file, "Title", f'<p id="here"></p>{PLANTED}', script=SCRIPT, data={"text": ""})
    page = chromium.new_page()
    refused = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(file.as_uri())
    assert page.title() == "Title"
    assert any("Content Security Policy" in text for text in refused), refused
    page.close()
