"""Our DataParallel computes the gradient of the whole batch, with the same phases as torch's."""

import os
import re
import sys
import threading
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accel_demo.anatomy.data_parallel import picture, tables
from accel_demo.anatomy.data_parallel.phases import (
    DataParallel,
    data_parallel,
    parallel_apply,
    replicate,
)
from accel_demo.anatomy.data_parallel.scatter_gather import chunk_sizes, gather, scatter
from accel_demo.anatomy.data_parallel.tables import largest_difference
from tests.anatomy.programs import words_in
from tests.conftest import GPUS, VISIBLE_GPUS

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "image label")


class Structured(nn.Module):
    """A module with nested inputs and outputs, and an embedding table that two layers share."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.table.weight
        self.mixed = nn.Linear(6, 6)

    def forward(self, batch, pair, scale=1.0, *, shift):
        hidden = self.mixed(self.table(batch["words"]) + batch["more"][0]) * scale
        logits = self.out(hidden) + shift
        return {"logits": logits, "both": (hidden, [pair.image * 2]), "pair": pair, "none": None}


def structured_inputs(batch_size):
    words = torch.randint(7, (batch_size,))
    image = torch.randn(batch_size, 6, requires_grad=True)
    more = torch.randn(batch_size, 6, requires_grad=True)
    pair = Pair(image, torch.arange(batch_size))
    shift = torch.randn(batch_size, 1, requires_grad=True)
    batch = OrderedDict(words=words, more=[more, "not a tensor"])
    return (batch, pair, 0.5), {"shift": shift}, [image, more, shift]


def structured_loss(output):
    assert output["none"] is None and isinstance(output["pair"], Pair)
    hidden, (doubled,) = output["both"]
    loss = F.cross_entropy(output["logits"], output["pair"].label % 7)
    return loss + hidden.square().mean() + doubled.abs().mean()


def test_the_gradient_is_that_of_the_whole_batch_for_any_replica_count_and_batch_size():
    torch.manual_seed(0)
    net, uneven = Structured(), 0
    for batch_size in (1, 2, 3, 5, 7, 8, 9, 13, 16, 30):
        arguments, kwargs, leaves = structured_inputs(batch_size)
        tensors = [*net.parameters(), *leaves]
        expected = net(*arguments, **kwargs)
        expected_gradients = torch.autograd.grad(structured_loss(expected), tensors)
        for replicas in range(1, 9):
            outputs = data_parallel(net, arguments, replicas, kwargs)
            torch.testing.assert_close(outputs["logits"], expected["logits"])
            assert torch.equal(outputs["pair"].label, torch.arange(batch_size))
            gradients = torch.autograd.grad(structured_loss(outputs), tensors)
            assert largest_difference(gradients, expected_gradients) < 1e-6, (batch_size, replicas)
            uneven += len(set(chunk_sizes(batch_size, replicas))) > 1
    assert uneven > 20


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()), (7, 1, 5, 5)),
        (nn.LSTM(5, 4, num_layers=2), (7, 3, 5)),  # weights in a list; batch in dimension 1
        (nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), (7, 5)),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)).eval(), (7, 5)),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (7, 3, 8)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_modules_of_every_kind_can_be_replicated(net, shape):
    torch.manual_seed(0)

    class BatchFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, inputs):
            if isinstance(self.net, nn.LSTM):
                return self.net(inputs.transpose(0, 1))[0].transpose(0, 1)
            return self.net(inputs)

    inputs, module = torch.randn(shape), BatchFirst()
    parameters = [tensor for tensor in module.parameters() if tensor.requires_grad]
    expected = torch.autograd.grad(module(inputs).square().mean(), parameters)
    outputs = data_parallel(module, inputs, 3)
    torch.testing.assert_close(outputs, module(inputs))
    gradients = torch.autograd.grad(outputs.square().mean(), parameters)
    assert largest_difference(gradients, expected) < 1e-6


def test_gradients_are_summed_into_the_original_and_backward_goes_through_every_replica():
    torch.manual_seed(0)
    net, inputs = nn.Linear(4, 3), torch.randn(10, 4)
    replicas = replicate(net, [CPU] * 4)
    parts = scatter((inputs,), [CPU] * 4)
    outputs = parallel_apply(replicas, parts, [{}] * 4, [CPU] * 4)
    loss = gather(outputs, CPU).square().sum()
    weights = [replica.weight for replica in replicas]  # inside the graph: its leaves are in `net`
    shares = torch.autograd.grad(loss, weights, retain_graph=True)
    net.weight.grad = torch.full_like(net.weight, 5.0)  # backward adds to it
    loss.backward()
    torch.testing.assert_close(net.weight.grad, 5 + torch.stack(shares).sum(dim=0))
    assert all(share.abs().max() > 0 for share in shares)


class Listing(nn.Module):
    """A module whose forward changes a list and an unregistered tensor in place."""

    def __init__(self):
        super().__init__()
        self.sizes, self.calls = [], torch.zeros(1)

    def forward(self, inputs):
        self.sizes.append(len(inputs))
        self.calls += 1
        return inputs


def test_replicas_share_lists_and_unregistered_tensors_with_the_model():
    module = Listing()
    data_parallel(module, torch.ones(10, 2), 4)
    assert sorted(module.sizes) == [1, 3, 3, 3] and module.calls == 4


def test_every_phase_records_its_shapes_threads_devices_and_bytes():
    net, record = nn.Linear(4, 3), []
    outputs = data_parallel(net, torch.randn(10, 4), 4, record=record)
    rows = {}
    for event in record:
        assert event.device == CPU
        rows.setdefault(event.phase, []).append((event.thread, event.shapes, event.size))
    parameters = ((3, 4), (3,))
    assert rows == {
        "scatter": [("main", ((3, 4),), size) for size in (0, 48, 48)] + [("main", ((1, 4),), 16)],
        "replicate": [("main", parameters, size) for size in (0, 60, 60, 60)],
        "parallel_apply": rows["parallel_apply"],  # compared below, as the order varies
        "gather": [("main", ((3, 3),), size) for size in (0, 36, 36)] + [("main", ((1, 3),), 12)],
    }
    shapes = [((3, 3),), ((3, 3),), ((3, 3),), ((1, 3),)]
    expected = [(f"replica {replica}", shapes[replica], 0) for replica in range(4)]
    assert sorted(rows["parallel_apply"]) == expected
    record.clear()
    outputs.sum().backward()
    sent = {
        "backward of gather": [[] for _ in "0123"],
        "backward of replicate": [[] for _ in "0123"],
    }
    for event in record:
        sent[event.phase][event.replica].append(event.size)
    assert sent["backward of gather"] == [[0], [36], [36], [12]]  # gradients of the outputs
    assert [sum(sizes) for sizes in sent["backward of replicate"]] == [0, 60, 60, 60]
    assert all(len(sizes) == 2 for sizes in sent["backward of replicate"])  # weight and bias


class Meeting(nn.Module):
    """A module whose forward returns only if all replicas run it at the same time."""

    def __init__(self, replicas):
        super().__init__()
        self.barrier, self.seen = threading.Barrier(replicas, timeout=30), []

    def forward(self, inputs):
        self.barrier.wait()
        self.seen.append((threading.get_ident(), os.getpid()))
        self.barrier.wait()
        return inputs


def test_replicas_are_threads_of_this_one_process_and_run_at_the_same_time():
    meeting = Meeting(5)
    inputs = torch.randn(10, 2)
    assert torch.equal(data_parallel(meeting, inputs, 5), inputs)
    threads, processes = zip(*meeting.seen, strict=True)
    assert len(set(threads)) == 5 and threading.get_ident() not in threads
    assert set(processes) == {os.getpid()}


class Scale(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.scale, self.barrier = nn.Parameter(torch.tensor(scale)), threading.Barrier(2, None, 30)

    def forward(self, inputs):
        self.barrier.wait()  # wait until both threads have swapped in their weights
        outputs = inputs * self.scale
        self.barrier.wait()
        return outputs


def test_threads_that_share_a_module_mix_up_weights_and_replicas_do_not():
    module, outputs_by_scale = Scale(), {}

    def call(scale):
        outputs_by_scale[scale] = torch.func.functional_call(
            module, {"scale": torch.tensor(scale)}, torch.ones(1)
        )

    threads = [threading.Thread(target=call, args=(scale,)) for scale in (2.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs_by_scale[2.0] == outputs_by_scale[3.0]

    replicas = replicate(Scale(), [CPU] * 2)
    with torch.no_grad():
        replicas[1].scale.mul_(3)
    outputs = parallel_apply(replicas, [(torch.ones(1),)] * 2, [{}] * 2, [CPU] * 2)
    assert [output.item() for output in outputs] == [1, 3]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.calls = 0
        self.register_buffer("rebound", torch.zeros(1))

    def forward(self, inputs):
        self.calls += 1
        self.rebound = self.rebound + 1
        assert not list(self.parameters())  # a replica has plain tensors instead of parameters
        return inputs * self.weight


def test_every_forward_copies_the_module_and_loses_the_attributes_that_forward_sets():
    module, record = Counting(), []
    wrapped = DataParallel(module, 2, record)
    for step in range(1, 4):
        outputs = wrapped(torch.ones(4, 2))
        assert torch.equal(outputs, torch.full((4, 2), float(step)))
        with torch.no_grad():
            module.weight += 1  # like an optimizer, update only the original
        assert sum(event.phase == "replicate" for event in record) == 2 * step
    assert module.calls == 0 and module.rebound == 0


def test_only_replica_0_shares_memory_with_the_module():
    net = nn.BatchNorm1d(3)
    first, second = replicate(net, [CPU] * 2)
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        assert getattr(first, name).data_ptr() == tensor.data_ptr()
        assert getattr(second, name).data_ptr() != tensor.data_ptr()
        assert torch.equal(getattr(second, name), tensor)


def test_replicas_keep_the_memory_format_of_the_module():
    """`view_as` would change the strides of a channels-last weight with one channel."""
    net = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
    assert net.weight.stride() != net.weight.view_as(net.weight).stride()
    for replica in replicate(net, [CPU] * 3):
        assert vars(replica)["weight"].stride() == net.weight.stride()


def test_only_the_samples_of_replica_0_update_batch_norm_statistics():
    torch.manual_seed(0)
    inputs = torch.randn(9, 3) + torch.arange(9).unsqueeze(1)
    net, alone, whole = nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    outputs = data_parallel(net, inputs, 2)
    first, second = inputs.split([5, 4])
    normalized = [alone(first)]
    for name, buffer in alone.named_buffers():
        assert torch.equal(getattr(net, name), buffer), name
    assert net.num_batches_tracked == 1
    torch.testing.assert_close(outputs, torch.cat([*normalized, nn.BatchNorm1d(3)(second)]))
    assert not torch.allclose(outputs, whole(inputs), atol=0.1)
    assert not torch.allclose(net.running_mean, whole.running_mean, atol=0.1)


def test_every_replica_draws_a_different_dropout_mask():
    torch.manual_seed(0)
    outputs = data_parallel(nn.Dropout(0.5), torch.ones(4, 1000), 4)
    assert set(outputs.unique().tolist()) == {0.0, 2.0}
    assert not any(torch.equal(outputs[a], outputs[b]) for a in range(4) for b in range(a))
    assert torch.equal(data_parallel(nn.Dropout(0.5).eval(), torch.ones(4, 9), 4), torch.ones(4, 9))


class Modes(nn.Linear):
    """A linear layer that records the grad, inference and autocast modes of each forward."""

    def forward(self, inputs):
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        self.seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dtype))
        return super().forward(inputs)


def test_threads_use_the_grad_inference_and_autocast_mode_of_the_caller():
    net = Modes(3, 2)
    for enter, expected, dtype in (
        (torch.enable_grad(), (True, False, None), torch.float32),
        (torch.no_grad(), (False, False, None), torch.float32),
        (torch.inference_mode(), (False, True, None), torch.float32),
        (torch.autocast("cpu", torch.bfloat16), (True, False, torch.bfloat16), torch.bfloat16),
        (torch.autocast("cpu", torch.float16), (True, False, torch.float16), torch.float16),
    ):
        net.seen = []
        with enter:
            outputs = data_parallel(net, torch.randn(3, 3), 3)
        assert net.seen == [expected] * 3
        assert (outputs.dtype, outputs.requires_grad) == (dtype, expected[0])


def test_a_device_without_autocast_is_supported():
    outputs = data_parallel(nn.Linear(3, 2, device="meta"), torch.ones(5, 3, device="meta"), 2)
    assert (outputs.device.type, outputs.shape) == ("meta", (5, 2))


class Fails(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, inputs):
        if 5 in inputs:
            raise self.error
        return inputs


@pytest.mark.parametrize("error", [KeyError("no five"), SystemExit(3), KeyboardInterrupt("stop")])
def test_an_exception_in_a_thread_is_raised_with_the_number_of_its_replica(error):
    message = re.escape(f"{type(error).__name__}: {error}")
    with pytest.raises(RuntimeError, match=f"^replica 2 on cpu: {message}$") as raised:
        data_parallel(Fails(error), torch.arange(8), 4)
    assert raised.value.__cause__ is error


LINEAR = nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("module", "inputs", "replicas", "message"),
    [
        (LINEAR, torch.ones(4, 3), 0, "replicas must be at least 1, got 0"),
        (LINEAR, torch.ones(4, 3), -2, "replicas must be at least 1, got -2"),
        (LINEAR, torch.ones(4, 3), [], "replicas must be a number or a list of devices"),
        (LINEAR, torch.ones(4, 3), True, "replicas must be a number or a list .*, got True"),
        (LINEAR, torch.ones(4, 3), 2.5, "replicas must be a number or a list of devices"),
        (LINEAR, torch.ones(4, 3), "cpu", "replicas must be a number or a list of devices"),
        (LINEAR, torch.ones(4, 3), ["cpu", "cuda:7"], "replicas: device cuda:7 is not available"),
        (LINEAR, torch.ones(4, 3), ["cpu", 7], "replicas: device 7 is not available"),
        (LINEAR, torch.ones(4, 3), ["cpu", "gpu"], "replicas: device gpu is not available"),
        (LINEAR, torch.ones(4, 3), ["meta", "cpu"], "module must be on meta, the first device"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_invalid_input_raises_a_value_error_that_names_the_argument(
    module, inputs, replicas, message
):
    with pytest.raises(ValueError, match=message) as raised:
        data_parallel(module, inputs, replicas)
    assert "\n" not in str(raised.value)
    if "replicas" in message:
        with pytest.raises(ValueError, match=message):
            DataParallel(module, replicas)


def test_empty_batches_few_samples_and_modules_without_parameters_are_supported():
    for batch_size in (0, 1, 3):
        inputs, record = torch.randn(batch_size, 3), []
        outputs = data_parallel(LINEAR, inputs, 8, record=record)
        torch.testing.assert_close(outputs, LINEAR(inputs))
        used = max(batch_size, 1)
        assert [event.phase for event in record].count("parallel_apply") == used
        assert torch.equal(data_parallel(nn.ReLU(), inputs, ["cpu"] * 2), inputs.relu())
    frozen = nn.Linear(3, 2).requires_grad_(False)
    assert not data_parallel(frozen, torch.ones(4, 3), 2).requires_grad


def test_a_plain_mean_of_uneven_chunks_is_biased_and_a_weighted_one_is_not():
    plain, weighted = "inside, plain mean", "inside, weighted mean"
    for replicas in range(1, 9):
        losses = tables.LOSSES.items()
        errors = {name: tables.gradient_error(loss, replicas) for name, loss in losses}
        assert errors["after the gather"] < 1e-6 and errors[weighted] < 1e-6
        assert (errors[plain] > 1e-2) == (replicas in (4, 8))  # these have a smaller last chunk
        assert errors[plain] > 1e-2 or errors[plain] < 1e-6
    weights = tables.sample_weights(8)
    assert weights == pytest.approx([1 / 32] * 28 + [1 / 16] * 2)


def test_every_replica_computes_a_loss_only_if_the_loss_is_in_forward():
    net, record = nn.Linear(6, 3), []
    batch = {"inputs": torch.randn(10, 6), "labels": torch.randn(10, 3)}
    losses = data_parallel(tables.LossInside(net), batch, 4, record=record)
    assert losses.shape == (4,)
    for loss, part in zip(losses, scatter(batch, [CPU] * 4), strict=True):
        assert loss.item() == pytest.approx(tables.LossInside(net)(part).item())
    gathered = [event.shapes for event in record if event.phase == "gather"]
    assert gathered == [((),)] * 4  # one loss from each replica, instead of its outputs


class Traced(nn.Module):
    """A model that also computes the distance between its kernels, inside or outside forward."""

    def __init__(self, inside):
        super().__init__()
        self.layer, self.inside, self.threads = nn.Linear(4, 3), inside, []

    def kernel_distance(self):
        self.threads.append(threading.current_thread().name)
        return torch.cdist(self.layer.weight, self.layer.weight, p=1).sum()

    def forward(self, inputs):
        outputs = self.layer(inputs)
        return (outputs, self.kernel_distance()) if self.inside else outputs


def test_code_on_weights_is_never_split_and_inside_forward_every_replica_runs_it():
    torch.manual_seed(0)
    inputs, main = torch.randn(8, 4), threading.current_thread().name
    outside = DataParallel(Traced(inside=False), 4)
    (outside(inputs).sum() + outside.module.kernel_distance()).backward()
    assert outside.module.threads == [main]  # once, in the main thread
    with pytest.raises(AttributeError):
        outside.kernel_distance()

    inside = DataParallel(Traced(inside=True), 4)
    inside.load_state_dict(outside.state_dict())
    outputs, distances = inside(inputs)
    assert sorted(inside.module.threads) == [f"replica {replica}" for replica in range(4)]
    (outputs.sum() + distances.mean()).backward()  # mean: every replica computed the full distance
    assert len(set(distances.tolist())) == 1
    torch.testing.assert_close(inside.module.layer.weight.grad, outside.module.layer.weight.grad)


def test_a_nan_in_the_gradient_is_reported():
    def nan_in_the_last_bias(net, batch, replicas):
        loss = tables.loss_after_gather(net, batch, replicas)
        return loss + net[2].bias.sum() * float("nan")

    error = tables.gradient_error(nan_in_the_last_bias, 2)
    assert tables.error_in_digits(error) == "nan"
    errors = (0.0, 9.9e-7, 1e-6, 4.5e-4, 0.02)
    cells = ["below 1e-6", "below 1e-6", "1e-06", "4e-04", "0.020"]
    assert list(map(tables.error_in_digits, errors)) == cells


def test_a_network_in_two_calls_is_replicated_and_gathered_twice_for_the_same_gradients():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 3).double(), nn.Linear(3, 2).double()
    weights, inputs = [*first.parameters(), *second.parameters()], torch.randn(8, 4).double()
    once, twice = [], []
    outputs = data_parallel(nn.Sequential(first, second), inputs, 4, record=once)
    hidden = data_parallel(first, inputs, 4, record=twice)
    outputs_of_two = data_parallel(second, hidden, 4, record=twice)
    calls, sizes = [], []
    for record in (once, twice):
        calls.append([event.phase for event in record if event.replica == 0].count("gather"))
        sizes.append(
            [
                sum(event.size for event in record if event.phase == phase)
                for phase in ("replicate", "scatter", "gather")
            ]
        )
    assert calls == [1, 2]
    between = 6 * 3 * 8  # 6 samples of the other replicas, gathered and then scattered again
    assert [b - a for a, b in zip(*sizes, strict=True)] == [0, between, between]
    gradients, expected = (
        torch.autograd.grad(result.square().sum(), weights) for result in (outputs_of_two, outputs)
    )
    assert largest_difference(gradients, expected) < 1e-12


def test_on_a_cpu_torchs_own_wrapper_only_calls_the_module_and_its_functions_raise():
    meeting = Meeting(1)
    wrapped = nn.DataParallel(meeting, device_ids=[0, 7], output_device=["anything"])
    assert wrapped.device_ids == [] and "DataParallel(\n  (module): Meeting()" in str(wrapped)
    wrapped(torch.ones(8, 2))
    assert meeting.seen == [(threading.get_ident(), os.getpid())]
    net, inputs = nn.Linear(2, 2), torch.ones(4, 2)
    for function, arguments in (
        (nn.parallel.data_parallel, (net, inputs, [0, 1])),
        (nn.parallel.replicate, (net, [0, 1])),
        (nn.parallel.scatter, (inputs, [0, 1])),
        (nn.parallel.parallel_apply, ([net, net], [inputs, inputs], None, [0, 1])),
        (nn.parallel.gather, ([inputs, inputs], 0)),
    ):
        with pytest.raises((RuntimeError, AssertionError)):
            function(*arguments)


def test_torch_ignores_a_list_as_output_device_and_uses_the_current_device(monkeypatch):
    monkeypatch.setattr(torch._utils, "_get_current_device_index", lambda: 5)
    asked = torch._utils._get_device_index  # nn.DataParallel calls this function
    assert asked([torch.device("cuda:1")], True) == asked(["anything"], True) == 5
    assert asked(torch.device("cuda:1"), True) == 1


def test_a_variable_is_a_tensor_and_resize_fails_on_a_short_last_batch():
    assert type(torch.autograd.Variable(torch.ones(2))) is torch.Tensor
    labels = torch.zeros(6, 1)  # from a last batch that has 6 samples instead of 8
    with pytest.warns(UserWarning, match="resize is deprecated"), pytest.raises(RuntimeError):
        labels.resize(8)
    assert labels.reshape(-1).shape == (6,)


@pytest.mark.parametrize(
    ("typed", "row", "words"),
    [
        (
            ["step", "--replicas", "3"],
            "| `parallel_apply`      | 3 threads | 4×3 ",
            {"replica 2", "parallel_apply", "4×6 → 4×3", "all: 10×3", "3 threads, nothing moves"},
        ),
        (
            ["bias"],
            "|        8 | 4, 4, 4, 4, 4, 4, 4, 2 | below 1e-6       | 0.1",
            {"in a part of 4", "in a part of 2", "right: 1/30", "inside, weighted mean"},
        ),
    ],
)
def test_each_table_is_printed_and_drawn(typed, row, words, monkeypatch, tmp_path, capsys):
    drawn = tmp_path / "picture.svg"
    monkeypatch.setattr(sys, "argv", ["data_parallel", *typed, "--plot", str(drawn)])
    tables.main("")
    assert row in capsys.readouterr().out and words <= words_in(drawn)


@pytest.mark.parametrize(
    ("replicas", "title"),
    [(1, "over 1 replica"), (8, "over 8 replicas"), (16, "over 16 replicas, 15 used")],
)
def test_the_bias_picture_names_the_number_of_replicas_and_its_texts_do_not_overlap(
    replicas, title
):
    errors = {name: [0.0, 0.047][replicas > 8 :] * replicas for name in tables.LOSSES}
    errors = {name: values[:replicas] for name, values in errors.items()}
    weights, sizes = tables.sample_weights(replicas), chunk_sizes(30, replicas)
    figure = picture.draw_bias(weights, sizes, errors)
    figure.draw_without_rendering()
    left, right = figure.axes
    assert left.get_title() == f"30 samples {title}"
    boxes = [item.get_window_extent() for item in (*right.texts, right.get_legend())]
    assert len(boxes) == 1 + {1: 0, 8: 4, 16: 16}[replicas]  # a legend, and labels for large errors
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index])


def compare_with_torch(gpus):
    """Compare each phase with its counterpart in nn.parallel, on GPUs.

    nn.parallel accepts each GPU only once, so two replicas on one GPU are compared with a forward
    of the whole batch.
    """
    torch.manual_seed(0)
    devices = [torch.device("cuda", index) for index in range(gpus)]
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    net, inputs = net.to(devices[0]), torch.randn(10, 6, device=devices[0])
    parts, torch_parts = scatter((inputs,), devices), nn.parallel.scatter((inputs,), devices)
    for (part,), (other,) in zip(parts, torch_parts, strict=True):
        assert part.device == other.device and torch.equal(part, other)
    replicas, others = replicate(net, devices), nn.parallel.replicate(net, devices)
    for replica, other in zip(replicas, others, strict=True):
        assert torch.equal(replica[0].weight, other[0].weight)
        assert replica[0].weight.device == other[0].weight.device
        assert not list(replica.parameters()) and not list(other.parameters())
    outputs = parallel_apply(replicas, parts, [{}] * gpus, devices)
    expected = nn.parallel.parallel_apply(others, torch_parts, None, devices)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(gather(outputs, devices[0]), nn.parallel.gather(expected, 0))
    results = []
    for wrapped in (DataParallel(net, devices), nn.DataParallel(net, list(range(gpus)))):
        net.zero_grad()
        for part in net.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.reset_running_stats()
        result = wrapped(inputs)
        assert result.device == devices[0]
        result.square().mean().backward()
        tensors = [*(parameter.grad for parameter in net.parameters()), *net.buffers()]
        results.append([result.detach(), *(tensor.clone() for tensor in tensors)])
    torch.testing.assert_close(*results)
    net.eval()
    expected = net(inputs)
    torch.testing.assert_close(data_parallel(net, inputs.cpu(), [*devices, devices[-1]]), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "gpus",
    [
        pytest.param(count, marks=pytest.mark.skipif(GPUS < count, reason=f"needs {count} GPU(s)"))
        for count in (1, 2)
    ],
)
def test_each_phase_has_the_same_result_as_torchs_phase_on_gpus(start, gpus):
    code = (  # importing this module hides the GPUs; unhide them before CUDA starts
        "import os; shown = os.environ.get('CUDA_VISIBLE_DEVICES')\n"
        "from tests.anatomy.test_data_parallel import compare_with_torch\n"
        "del os.environ['CUDA_VISIBLE_DEVICES']\n"
        "if shown is not None: os.environ['CUDA_VISIBLE_DEVICES'] = shown\n"
        f"compare_with_torch({gpus}); print('the same on {gpus}')"
    )
    result = start(["python", "-c", code], **VISIBLE_GPUS)
    assert result.returncode == 0 and f"the same on {gpus}" in result.stdout, result.stderr
