"""Page 13: the lengths of the shortened passes, and faults that the audit does not see."""

import pytest

from accel_demo.lab.audit.command import run_checks
from accel_demo.observer.limits import shortened
from tests.exercises.wrong_answers import edited
from tests.observer.test_checks import findings_above_notes, observe
from tests.pages.pages import TUTORIALS

REPAIRED = (TUTORIALS / "13_repaired.py").read_text()
UNSEEN = {
    "wrong in the same way on all ranks": (
        "F.cross_entropy(model(images), labels)",
        "2 * F.cross_entropy(model(images), labels)",
    ),
    "another tensor was meant": ("dist.all_reduce(counts)", "dist.all_reduce(counts[:1])"),
    "wrong from the fourth epoch on": ("set_epoch(epoch)", "set_epoch(min(epoch, 2))"),
}


def test_a_shortened_pass_has_as_many_batches_as_the_page_says():
    text = " ".join((TUTORIALS / "13_audit.md").read_text().split())
    assert "A pass over a loader with 16 batches or more ends after 8 to 15" in text
    assert {shortened(length, 8) for length in range(16, 200)} == set(range(8, 16))


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSEEN)
def test_the_audit_does_not_see_what_the_page_says_it_cannot_see(name, tmp_path):
    evidence = observe(edited(REPAIRED, *UNSEEN[name]), tmp_path)
    assert evidence.counts("step") == [20, 20]
    assert findings_above_notes(evidence) == []


def test_a_metric_is_not_checked_if_another_value_is_combined_after_the_evaluation(tmp_path):
    """The repaired script combines the loss, so a collective follows the evaluation in any case."""
    for name, script, reason in (
        ("right", REPAIRED, None),
        (
            "wrong",
            edited(REPAIRED, "    dist.all_reduce(counts)\n", ""),
            "what the collectives after an evaluation combine is unknown",
        ),
    ):
        (tmp_path / name).mkdir()
        findings, skipped = run_checks(observe(script, tmp_path / name))
        assert findings == []
        assert skipped.get("metrics") == reason
