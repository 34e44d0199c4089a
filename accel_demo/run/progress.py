"""The position of a run: epoch, micro-batch and optimizer step."""

from accel_demo.config import TrainConfig


class Progress:
    """The current position: epoch, micro-batch, optimizer step and accumulation window.

    `epoch` is the index of the current epoch, starting from 0. `batches` counts the micro-batches
    of this epoch on this process, including the current one. `step` counts finished optimizer
    steps, including those that fp16 skipped because they overflowed. A window is the group of
    micro-batches for one optimizer step: `config.accumulate` micro-batches, or fewer at the end of
    an epoch.
    """

    def __init__(
        self, config: TrainConfig, batches_per_epoch: int, epoch: int, batches: int, step: int
    ):
        self.accumulate, self.epochs = config.accumulate, config.epochs
        self.batches_per_epoch = batches_per_epoch
        self.total_steps = config.total_steps(batches_per_epoch)
        self.epoch, self.batches, self.step = epoch, batches, step

    @property
    def ends_epoch(self) -> bool:
        return self.batches == self.batches_per_epoch

    @property
    def ends_window(self) -> bool:
        return self.batches % self.accumulate == 0 or self.ends_epoch

    @property
    def window_scale(self) -> float:
        """`accumulate` divided by the length of the current window: above 1 in a short window."""
        window_start = (self.batches - 1) // self.accumulate * self.accumulate
        return self.accumulate / min(self.accumulate, self.batches_per_epoch - window_start)

    @property
    def is_complete(self) -> bool:
        """True after the last optimizer step or the last epoch of the run."""
        return self.step >= self.total_steps or self.epoch >= self.epochs

    def next_epoch(self) -> None:
        self.epoch, self.batches = self.epoch + 1, 0
