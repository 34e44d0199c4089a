"""The position of a run: epoch, micro-batch and optimizer step."""

from dataclasses import dataclass

from accel_demo.config import TrainConfig


@dataclass
class Progress:
    """The current position: epoch, micro-batch, optimizer step and accumulation window.

    `epoch` is the index of the current epoch, starting from 0. `batches` counts the micro-batches
    of this epoch on this process, including the current one. `step` counts finished optimizer
    steps, including those that fp16 skipped because they overflowed. A window is the group of
    micro-batches for one optimizer step: `config.accumulate` micro-batches, or fewer at the end of
    an epoch.
    """

    config: TrainConfig
    batches_per_epoch: int
    epoch: int
    batches: int
    step: int

    @property
    def ends_epoch(self) -> bool:
        return self.batches == self.batches_per_epoch

    @property
    def ends_window(self) -> bool:
        return self.batches % self.config.accumulate == 0 or self.ends_epoch

    @property
    def window_scale(self) -> float:
        """`accumulate` divided by the length of the current window: above 1 in a short window."""
        accumulate = self.config.accumulate
        window_start = (self.batches - 1) // accumulate * accumulate
        return accumulate / min(accumulate, self.batches_per_epoch - window_start)

    @property
    def is_complete(self) -> bool:
        """True after the last optimizer step or the last epoch of the run."""
        is_last_step = self.step >= self.config.total_steps(self.batches_per_epoch)
        return is_last_step or self.epoch >= self.config.epochs

    def next_epoch(self) -> None:
        self.epoch, self.batches = self.epoch + 1, 0
