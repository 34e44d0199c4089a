"""Count the graphs of a compiled model in DDP, and print the names of its saved weights.

torchrun --standalone --nproc-per-node 2 tutorials/37_ddp.py

The backend of torch.compile is "eager" or a function that runs the captured graphs as they are.
"""

import gc
import logging

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from accel_demo.processes.devices import use_cpu
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


def main():
    dist.init_process_group("gloo")
    torch._logging.set_logs(dynamo=logging.ERROR)
    orders = [[name, *graphs_and_buckets(wrap)] for name, wrap in ORDERS.items()]
    names = [[name, *graphs_and_names(prepare)] for name, prepare in METHODS.items()]
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} connected processes, a network of {LAYERS} layers\n")
        print(table(["order", "layers in each graph", "layers in each bucket"], orders))
        print("\nWith Accelerate: graphs of two networks, and the name of the first weight\n")
        head = ["method", "own class", "`nn.Sequential`", "`state_dict()`", "`get_state_dict`"]
        print(table(head, names))
    dist.destroy_process_group()
    torch._dynamo.reset()  # its cache keeps the group, whose threads must end before Python
    gc.collect()


# Raw DDP. Each function takes a network, its inputs and a backend.
def run_then_wrap(network, inputs, backend):
    network.compile(backend=backend)
    network(inputs)
    return in_ddp(network)


def compile_then_wrap(network, inputs, backend):
    network.compile(backend=backend)
    return in_ddp(network)


def wrap_then_compile(network, inputs, backend):
    return torch.compile(in_ddp(network), backend=backend)


def in_ddp(network):
    return DistributedDataParallel(network, bucket_cap_mb=BUCKET_MB)


ORDERS = {
    "`model.compile()`, run it, wrap it": run_then_wrap,
    "`model.compile()`, then wrap it": compile_then_wrap,
    "wrap it, then `torch.compile(ddp)`": wrap_then_compile,
}


def graphs_and_buckets(wrap) -> list[str]:
    """Return the number of layers in each captured graph, and in each of DDP's buckets."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):  # runs the graph without compiling it
        graphs.append(sum("linear" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    torch.manual_seed(0)
    inputs = torch.randn(8, WIDTH)
    model = wrap(Network(), inputs, backend)
    for _ in range(3):  # DDP forms its final buckets after the first step
        model(inputs).sum().backward()
    ddp = getattr(model, "_orig_mod", model)
    sizes = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")
    bytes_of_layer = 4 * (WIDTH * WIDTH + WIDTH)
    buckets = [f"{int(size) / bytes_of_layer:g}" for size in sizes]
    return [", ".join(map(str, graphs)), ", ".join(reversed(buckets))]


# Accelerate. Each function takes an Accelerator and a model.
def in_place(model):
    model.compile(backend="eager")
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


METHODS = {
    "not compiled": lambda it, model: it.prepare(model),
    "`model.compile()`, then `prepare`": lambda it, model: it.prepare(in_place(model)),
    "`torch.compile(model)`, then `prepare`": lambda it, model: it.prepare(compiled(model)),
    "`prepare`, then `model.compile()`": lambda it, model: in_place(it.prepare(model)),
    "`prepare`, then `torch.compile(model)`": lambda it, model: compiled(it.prepare(model)),
    "`Accelerator(dynamo_backend=…)`": lambda it, model: it.prepare(model),  # which compiles it
}


def graphs_and_names(method) -> list:
    """Return the graphs of both networks, and the first weight's name in both state dicts."""
    graphs = []
    for network in (Network(), nn.Sequential(nn.Linear(WIDTH, WIDTH))):
        AcceleratorState._reset_state(reset_partial_state=True)
        torch._dynamo.reset()
        counters.clear()
        backend = "eager" if method is METHODS["`Accelerator(dynamo_backend=…)`"] else None
        accelerator = Accelerator(cpu=use_cpu(), dynamo_backend=backend)
        model = method(accelerator, network)
        model(torch.randn(8, WIDTH, device=accelerator.device))
        graphs.append(counters["stats"]["unique_graphs"])
    states = model.state_dict(), accelerator.get_state_dict(model)
    return [*graphs, *(f"`{next(iter(state))}`" for state in states)]


if __name__ == "__main__":
    main()
