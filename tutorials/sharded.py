"""FSDP by hand: each rank stores a shard of a block, and gathers the block only to compute it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call


class Gather(torch.autograd.Function):
    """Forward: all-gather the block's weights. Backward: reduce-scatter their gradients."""

    @staticmethod
    def forward(ctx, shard, block):
        ctx.block = block
        return block.gather()

    @staticmethod
    def backward(ctx, gradient):
        ctx.block.gathered = None  # this block's backward is done: free its weights
        share = gradient.new_empty(len(gradient) // dist.get_world_size())
        dist.reduce_scatter_tensor(share, gradient)
        return share.div_(dist.get_world_size()), None


class Sharded(nn.Module):
    """A module whose parameters are flattened, padded and divided equally among the ranks."""

    def __init__(self, module: nn.Module):
        super().__init__()
        parameters = dict(module.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        flat = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
        padding = -len(flat) % dist.get_world_size()
        self.sizes = [*(shape.numel() for shape in self.shapes.values()), padding]
        shards = torch.cat([flat, flat.new_zeros(padding)]).chunk(dist.get_world_size())
        self.shard = nn.Parameter(shards[dist.get_rank()].clone())
        self.modules_without_weights = [module.to("meta")]  # in a list: its weights are not ours
        self.gathered: torch.Tensor | None = None  # the whole weights, during backward

    def gather(self) -> torch.Tensor:
        whole = self.shard.new_empty(len(self.shard) * dist.get_world_size())
        dist.all_gather_into_tensor(whole, self.shard.detach())
        return whole

    def weights(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cut the gathered weights into the module's parameters."""
        *parts, _ = whole.split(self.sizes)
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.view(shape) for (name, shape), part in named}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        whole = Gather.apply(self.shard, self)
        address = whole.untyped_storage().data_ptr()

        def pack(tensor):  # autograd would keep the gathered weights until backward
            if tensor.untyped_storage().data_ptr() != address:
                return tensor
            return tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(saved):  # in backward: gather the weights again, once for each block
            if isinstance(saved, torch.Tensor):
                return saved
            if self.gathered is None:
                self.gathered = self.gather()
            return self.gathered.as_strided(*saved)

        with saved_tensors_hooks(pack, unpack):
            return functional_call(self.modules_without_weights[0], self.weights(whole), inputs)
