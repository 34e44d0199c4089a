"""Test the helpers of the page tests."""

from importlib.metadata import version

import pytest
from packaging.version import Version

from tests.pages.pages import bound_to

CLAIM = "In Accelerate {version}, it\nneeds `lo`"
ON_ONE_LINE = "In Accelerate {version}, it needs"
RELEASE = [str(part) for part in Version(version("accelerate")).release]


@pytest.fixture
def page_about(tmp_path):
    def page_about(named: str):
        (tmp_path / "page.md").write_text(CLAIM.format(version=named))
        return tmp_path / "page.md"

    return page_about


@pytest.mark.parametrize("parts", range(1, len(RELEASE) + 1))
def test_a_test_runs_with_the_version_on_the_page(page_about, parts):
    bound_to("accelerate", page_about(".".join(RELEASE[:parts])), ON_ONE_LINE)


@pytest.mark.parametrize("named", ["0", "0.99", "0.99.9", "1.9"])
def test_a_test_fails_with_a_newer_version_and_says_what_to_update(page_about, named):
    page = page_about(named)
    with pytest.raises(pytest.fail.Exception) as failed:
        bound_to("accelerate", page, ON_ONE_LINE)
    claim = f'"In Accelerate {named}, it needs"'
    assert str(failed.value).startswith(
        f"tutorials/{page} says {claim}, but accelerate {version('accelerate')} is installed. "
    )


@pytest.mark.parametrize("named", ["999", "999.0", f"{RELEASE[0]}.{RELEASE[1]}.999"])
def test_a_test_is_skipped_with_an_older_version(page_about, named):
    reason = f"page.md is about accelerate {named}, but {version('accelerate')} is older"
    with pytest.raises(pytest.skip.Exception, match=reason):
        bound_to("accelerate", page_about(named), ON_ONE_LINE)


def test_a_claim_that_is_not_on_the_page_is_an_error(page_about):
    with pytest.raises(AssertionError, match="does not contain 'In PyTorch {version}'"):
        bound_to("accelerate", page_about("1.15"), "In PyTorch {version}")
