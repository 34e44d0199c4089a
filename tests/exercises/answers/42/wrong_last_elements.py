# wrong: elements at the end have not changed on any rank
import torch
import torch.distributed as dist


class ShardedAdam:
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.parameters, self.lr, self.betas, self.eps = parameters, lr, betas, eps
        count = sum(parameter.numel() for parameter in parameters)
        self.size = count // dist.get_world_size()
        self.first, self.second = torch.zeros(self.size), torch.zeros(self.size)
        self.steps = 0

    @torch.no_grad()
    def step(self):
        gradients = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        dist.all_reduce(gradients)
        gradients /= dist.get_world_size()
        flat = torch.cat([parameter.flatten() for parameter in self.parameters])
        start = dist.get_rank() * self.size
        gradient = gradients[start : start + self.size]
        share = flat[start : start + self.size]
        self.steps += 1
        self.first.mul_(self.betas[0]).add_(gradient, alpha=1 - self.betas[0])
        self.second.mul_(self.betas[1]).add_(gradient**2, alpha=1 - self.betas[1])
        mean = self.first / (1 - self.betas[0] ** self.steps)
        spread = torch.sqrt(self.second / (1 - self.betas[1] ** self.steps))
        parts = [torch.empty_like(share) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, share - self.lr * mean / (spread + self.eps))
        flat[: self.size * dist.get_world_size()] = torch.cat(parts)
        start = 0
        for parameter in self.parameters:
            parameter.copy_(flat[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
