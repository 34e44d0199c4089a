"""Grade exercise 37: count the graphs, and compare outputs, gradients and saved weights."""

import logging
import sys
import tempfile
from pathlib import Path

from grading import Wrong, grade, import_answer, naming_errors, torch

SIZES = (8, 8, 8, 6, 5)  # of the batches; two graphs are enough
SCALES = {"small inputs": 0.1, "large inputs": 30.0}
RIGHT = f"one graph per step, two for {len(SIZES)} batches, and weights that fit a plain Model"


def observe(answer: Path) -> None:
    import reference_37

    torch._logging.set_logs(dynamo=logging.ERROR)
    module = import_answer(answer)
    for name, scale in SCALES.items():
        compare_models(module.Model, reference_37.Model, name, scale)
    generator = torch.Generator().manual_seed(37)
    batches = [
        (
            torch.randn(size, 8, generator=generator) * scale,
            torch.randint(4, (size,), generator=generator),
        )
        for size, scale in zip(SIZES, [*SCALES.values()] * len(SIZES), strict=False)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights.pt")
        graphs = count_graphs(module.train, batches, path)
        if not path.exists():
            raise Wrong("train saves no file at path")
        saved = torch.load(path)
    if graphs == 0:
        raise Wrong("the backend was not called: train must pass it to torch.compile or .compile")
    if graphs > 2:
        broken = torch._dynamo.explain(module.Model())(batches[0][0])
        if broken.graph_break_count:
            raise breaks(broken.break_reasons[0].reason)
        recompiled = "When torch.compile recompiles"
        raise Wrong(f"{graphs} graphs for {len(SIZES)} batches of three sizes", read=recompiled)
    compare_weights(saved, reference_37.train(batches))


def compare_models(make_model, make_reference, name: str, scale: float) -> None:
    torch.manual_seed(1)
    model, reference = make_model(), make_reference()
    if [*model.state_dict()] != [*reference.state_dict()]:
        raise Wrong(f"the weights of Model have other names: {', '.join(model.state_dict())}")
    model.load_state_dict(reference.state_dict())
    inputs = torch.randn(8, 8) * scale
    outputs = []
    for network in (model, reference):
        with naming_errors("Model raises"):
            output = network(inputs)
        output.square().sum().backward()
        outputs.append(output.detach())
    if not torch.allclose(*outputs, rtol=1e-4, atol=1e-6):
        raise Wrong(f"{name}: the output differs from what Model returned before")
    for (weight, own), right in zip(model.named_parameters(), reference.parameters(), strict=True):
        if own.grad is None or not torch.allclose(own.grad, right.grad, rtol=1e-3, atol=1e-5):
            raise Wrong(f"{name}: the gradient of {weight} differs from what it was before")


def count_graphs(train, batches, path: Path) -> int:
    """Train, and return the number of graphs. Raises `Wrong` if a graph is broken."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with naming_errors("train raises"):
        train(batches, backend, path)
    if graphs and counters["graph_break"]:
        raise breaks(next(iter(counters["graph_break"])))
    return len(graphs)


def breaks(reason: str) -> Wrong:
    reason = reason.strip().splitlines()[0]
    return Wrong(f"something in forward breaks the graph: {reason}", read="What breaks a graph")


def compare_weights(saved: dict, right: dict) -> None:
    if any(name.startswith("_orig_mod.") for name in saved):
        place = "Where to compile"
        raise Wrong("the names of the saved weights begin with _orig_mod.", read=place)
    if [*saved] != [*right]:
        raise Wrong(f"the saved weights have other names: {', '.join(saved)}")
    if not all(torch.allclose(saved[name], right[name], rtol=1e-3, atol=1e-5) for name in right):
        raise Wrong("the saved weights differ from those of the same training without compiling")


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT))
