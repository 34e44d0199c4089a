"""The position of a run: epoch, micro-batch, optimizer step."""

from accel_demo.config import TrainConfig


class Progress:
    """Count epochs, micro-batches and optimizer steps, and find the accumulation windows.

    `epoch` counts finished epochs, so it is also the number of the current one, from 0. `batches`
    counts the micro-batches of the current epoch in this process, including the current one.
    `step` counts optimizer steps. A window is the micro-batches of one optimizer step:
    `config.accumulate` of them, fewer if the epoch ends first.
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
        """`accumulate` divided by the length of this window: 1, or more in a short last one."""
        window_start = (self.batches - 1) // self.accumulate * self.accumulate
        return self.accumulate / min(self.accumulate, self.batches_per_epoch - window_start)

    @property
    def is_complete(self) -> bool:
        """True after the last optimizer step of the run, or if no epoch is left."""
        return self.step >= self.total_steps or self.epoch >= self.epochs

    def next_epoch(self) -> None:
        self.epoch, self.batches = self.epoch + 1, 0
