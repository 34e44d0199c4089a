# wrong: with the gradients of one rank instead of the mean over all ranks
import torch
import torch.distributed as dist


class ShardedAdam:
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.parameters = parameters
        flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.size = -(-len(flat) // dist.get_world_size())
        self.share = torch.nn.Parameter(flat.split(self.size)[dist.get_rank()].clone())
        self.adam = torch.optim.Adam([self.share], lr, betas, eps)

    @torch.no_grad()
    def step(self):
        gradients = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        self.share.grad = gradients.split(self.size)[dist.get_rank()]
        self.adam.step()
        flat = torch.cat([parameter.flatten() for parameter in self.parameters])
        for rank, part in enumerate(flat.split(self.size)):
            if rank == dist.get_rank():
                part.copy_(self.share)
            dist.broadcast(part, rank)
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, flat.split(sizes), strict=True):
            parameter.copy_(part.view_as(parameter))
