"""Run train.py with FSDP2 on CPUs: `python -m tests.core.fsdp2_on_cpu FLAGS`, in several processes.

Accelerate shards models with FSDP2 only on GPUs. PyTorch itself can also do so on CPUs. This
program sets the state of an `Accelerator` on CPUs as Accelerate does on GPUs (in
`AcceleratorState.__init__`), so that all of Accelerate's own code for FSDP2 runs. It takes the
options of FSDP from accelerate_configs/fsdp2.yaml.
"""

import os

import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin

from accel_demo import train
from accel_demo.config import CommandLine
from accel_demo.errors import one_line_errors
from accel_demo.processes.lost_processes import report_lost_processes
from tests.conftest import REPOSITORY


class AcceleratorWithFSDP2(Accelerator):
    """An `Accelerator` with FSDP2 on CPUs. It prints how much of the model each process holds."""

    def __init__(self, **options):
        super().__init__(**options)
        self.state.fsdp_plugin = plugin_of_the_config()
        if self.state.mixed_precision != "no":
            self.state.fsdp_plugin.set_mixed_precision(self.state.mixed_precision)
        for state in (AcceleratorState, PartialState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        assert self.is_fsdp2

    def prepare(self, *arguments):
        model = arguments[0] if isinstance(arguments[0], torch.nn.Module) else None
        whole = sum(p.numel() for p in model.parameters()) if model else 0
        prepared = super().prepare(*arguments)
        if model:
            held = sum(parameter.to_local().numel() for parameter in prepared[0].parameters())
            print(f"rank {self.process_index} of {self.num_processes} holds {held} of {whole}")
        return prepared


def plugin_of_the_config() -> FullyShardedDataParallelPlugin:
    """Return the plugin that a process of `accelerate launch` creates from the variables."""
    config = yaml.safe_load((REPOSITORY / "accelerate_configs" / "fsdp2.yaml").read_text())
    for name, value in config["fsdp_config"].items():
        os.environ[name.upper()] = str(value)
    return FullyShardedDataParallelPlugin()


if __name__ == "__main__":
    with one_line_errors(), report_lost_processes():
        config, _ = CommandLine(__doc__).read()
        train.Accelerator = AcceleratorWithFSDP2
        train.main(config)
