"""Test how a run counts batches and steps, and when it is complete."""

import pytest

from accel_demo.config import TrainConfig
from accel_demo.run.progress import Progress


def progress_at(batches: int, step: int = 0, epoch: int = 0, **choices) -> Progress:
    """Return a position in a run whose epochs have seven micro-batches."""
    return Progress(TrainConfig(**choices), 7, epoch, batches, step)


def test_the_loss_of_a_short_last_window_is_scaled_up():
    windows = [progress_at(batches, accumulate=3) for batches in range(1, 8)]
    assert [window.ends_window for window in windows] == [False, False, True] * 2 + [True]
    assert [window.window_scale for window in windows] == [1] * 6 + [3]


def test_without_accumulation_every_micro_batch_is_a_window():
    for batches in range(1, 8):
        assert progress_at(batches).ends_window and progress_at(batches).window_scale == 1


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 7), (2, 4), (3, 3), (7, 1), (9, 1)])
def test_an_epoch_has_as_many_steps_as_windows(accumulate, steps):
    config = TrainConfig(accumulate=accumulate, epochs=2)
    assert (config.steps_per_epoch(7), config.total_steps(7)) == (steps, 2 * steps)
    ends = [progress_at(batches, accumulate=accumulate).ends_window for batches in range(1, 8)]
    assert ends.count(True) == steps


def test_a_run_is_complete_after_all_epochs_or_after_max_steps():
    assert not progress_at(7, step=13, epoch=1, epochs=2).is_complete
    assert progress_at(7, step=14, epoch=1, epochs=2).is_complete
    assert progress_at(2, step=9, epoch=1, epochs=2, max_steps=9).is_complete
    assert progress_at(0, step=3, epoch=2, epochs=2).is_complete


def test_the_next_epoch_begins_at_its_first_micro_batch():
    progress = progress_at(7, step=7)
    assert progress.ends_epoch
    progress.next_epoch()
    assert (progress.epoch, progress.batches, progress.step) == (1, 0, 7)
    assert not progress.ends_epoch
