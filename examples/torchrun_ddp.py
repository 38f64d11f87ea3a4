"""An ordinary DistributedDataParallel script. It does not know lockstep, and starts either way, unchanged:

torchrun --nproc_per_node=2 examples/torchrun_ddp.py
lockstep run --processes 2 examples/torchrun_ddp.py
"""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(0)
    x = torch.rand(4096, 2) * 2 - 1
    dataset = TensorDataset(x, torch.sin(3 * x[:, :1]) * x[:, 1:])
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)

    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(model, device_ids=[local_rank] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)

    if dist.get_rank() == 0:
        final_loss = total.item() / (len(loader) * dist.get_world_size())
        print(f"world size {dist.get_world_size()}, final loss {final_loss:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
