"""Count the graphs into which torch.compile divides a model in DDP.

torchrun --standalone --nproc-per-node 2 tutorials/37_ddp.py
"""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_demo.show import table

WIDTH, LAYERS, BUCKET_MB = 512, 6, 2


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs).relu()
        return inputs


def compile_run_wrap(network, inputs, backend):
    network.compile(backend=backend)
    network(inputs)
    return wrapped(network)


def compile_wrap(network, inputs, backend):
    network.compile(backend=backend)
    return wrapped(network)


def wrap_compile(network, inputs, backend):
    return torch.compile(wrapped(network), backend=backend)


def wrapped(network):
    return DistributedDataParallel(network, bucket_cap_mb=BUCKET_MB)


METHODS = {
    "`model.compile()`, run it, wrap it": compile_run_wrap,
    "`model.compile()`, then wrap it": compile_wrap,
    "wrap it, then `torch.compile(ddp)`": wrap_compile,
}


def main():
    dist.init_process_group("gloo")
    torch._logging.set_logs(dynamo=logging.ERROR)
    rows = []
    for name, method in METHODS.items():
        torch._dynamo.reset()
        graphs = []

        def backend(graph, inputs, graphs=graphs):  # runs the graph without compiling it
            graphs.append(graph)
            return graph.forward

        torch.manual_seed(0)
        inputs = torch.randn(8, WIDTH)
        model = method(Network(), inputs, backend)
        for _ in range(3):  # DDP forms its buckets after the first step
            model(inputs).sum().backward()
        ddp = getattr(model, "_orig_mod", model)
        buckets = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].count(",") + 1
        rows.append([name, len(graphs), buckets])
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} connected processes, a network of {LAYERS} layers\n")
        print(table(["order", "graphs", "buckets"], rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
