# wrong: the gradient covers only pairs whose first kernel is on this rank
import torch
import torch.distributed as dist


def total_distance(rows):
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.detach())
    share = (rows[:, None] - torch.cat(parts)).abs().sum()
    total = share.detach().clone()
    dist.all_reduce(total)
    return share + (total - share.detach())
