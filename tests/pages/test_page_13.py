"""Page 13: the lengths of the shortened passes, and faults that the audit does not see."""

import math

import pytest

from accel_demo.data import packaged_set
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


def test_the_passes_have_as_many_batches_as_the_page_says():
    whole = math.ceil(len(packaged_set("train")) / 2 / 64)
    text = " ".join((TUTORIALS / "13_audit.md").read_text().split())
    epochs = (
        f"an epoch has {whole} batches per process and the audit's epoch has {shortened(whole, 8)}"
    )
    assert epochs in text
    assert {shortened(length, 8) for length in range(16, 200)} == set(range(8, 16))
    assert shortened(100, 8) == 12


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSEEN)
def test_the_audit_does_not_see_what_the_page_says_it_cannot_see(name, tmp_path):
    evidence = observe(edited(REPAIRED, *UNSEEN[name]), tmp_path)
    assert evidence.counts("step") == [20, 20]
    assert findings_above_notes(evidence) == []
