"""An ordinary DDP script, for startup.py: trains one step and writes down when it was finished.

torchrun --nproc_per_node=2 benchmarks/startup_plain.py FILE
"""

import sys
import time
from pathlib import Path

import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from workload import BATCH, make_data, make_model, make_optimizer


def main(file: str) -> None:
    dist.init_process_group("gloo")
    data = make_data()
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    model = DistributedDataParallel(make_model())
    optimizer = make_optimizer(model)
    inputs, targets = next(iter(loader))
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        Path(file).write_text(str(time.time()), encoding="ascii")
    time.sleep(0.1)  # after the stamp: gloo's destructor can deadlock with a thread of its own that is still busy
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
