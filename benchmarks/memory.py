"""Peak memory per rank of a model whose weights and Adam state dominate, sharded by Lockstep and by hand.

python benchmarks/memory.py                  on 1, 2 and 4 ranks of this host's CPU (4 GB of its memory)
python benchmarks/memory.py --runtime cuda   the memory of GPUs; ranks share one where there are fewer
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import report
import yaml

TASK = Path(__file__).with_name("memory_task.py")
RANKS = (1, 2, 4)
SIZE = {"layers": 48, "width": 640, "steps": 4}
QUICK = {"layers": 2, "width": 64, "steps": 2}
NONE = {"layers": 0, "width": 8}
# A block that is freed goes back to the system, so that the host's own bookkeeping is not what is measured.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}

NOTES = """\
{parameters:.0f} million parameters in {layers} blocks, float32: 16 bytes each with gradient and Adam's two,
{state:.2f} GiB. The ideal is that divided by the ranks, plus one block that is whole (its weights and gradients,
{block:.0f} MiB). Peak is the largest of all ranks while training{how}.
By hand: fully_shard per block and on the root, made on the meta device, AdamW. Set-up: while the model is made and
divided; rank 0 alone ever has all of the weights. Tensors: all that a rank has at once in a step, as lockstep plan
notes them, without what a process has beside its tensors."""


def main() -> None:
    parser = report.options(__doc__, repeats=1)
    parser.add_argument("--runtime", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--layers", type=int, help="blocks of the model (default: 48)")
    parser.add_argument("--width", type=int, help="and their width (default: 640)")
    parser.add_argument("--only", nargs="+", choices=["lockstep", "hand"], default=["lockstep", "hand"])
    parser.add_argument("--tensors", nargs=2, metavar=("CONFIG", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, metavar=("SIZE", "FILE"), help=argparse.SUPPRESS)
    chosen = report.parse(parser)
    if chosen.tensors:
        count_tensors(Path(chosen.tensors[0]), Path(chosen.tensors[1]))
        return
    if chosen.child:
        trained_by_hand(json.loads(chosen.child[0]), chosen.child[1], chosen.runtime)
        return
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        text, raw = compare(chosen, Path(folder))
    report.publish(text, raw, chosen.json)


def compare(chosen: argparse.Namespace, folder: Path) -> tuple[str, dict[str, Any]]:
    size = dict(QUICK if chosen.quick else SIZE)
    size |= {name: value for name in ("layers", "width") if (value := getattr(chosen, name))}
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for ranks, way in report.interleaved([(ranks, way) for ranks in chosen.ranks for way in chosen.only], chosen):
        try:
            found[f"{way}-{ranks}"].append(measured(way, size, ranks, chosen.runtime, folder))
        except report.MeasurementFailed as failure:  # the others are worth having
            print(f"{way} on {ranks} failed: {failure}", file=sys.stderr)
    total, block = parameters_of(size)
    header = ["ranks", "ideal", "tensors", "to the ideal", "Lockstep", "to the ideal", "by hand", "to the ideal",
              "Lockstep, set-up on rank 0"]  # fmt: skip
    rows = []
    for ranks in chosen.ranks:
        ideal = 16 * total / ranks + 8 * block
        alive = tensors(size, ranks, folder)
        cells = [str(ranks), _mib(ideal), _mib(alive), f"{alive / ideal:.2f}"]
        for way in ("lockstep", "hand"):
            peaks = [max(each["training"]) for each in found[f"{way}-{ranks}"]]
            cells += [_mib(min(peaks)), f"{min(peaks) / ideal:.2f}"] if peaks else ["-", "-"]
        first = [each["set up"][0] for each in found[f"lockstep-{ranks}"]]
        rows.append([*cells, _mib(min(first)) if first else "-"])
    how = "" if chosen.runtime == "cuda" else ", less that of a rank whose model is next to nothing"
    notes = NOTES.format(
        parameters=total / 1e6, layers=size["layers"], state=16 * total / 2**30, block=8 * block / 2**20, how=how
    )
    return f"{report.table(header, rows)}\n\n{notes}", {"found": found}


def measured(way: str, size: dict[str, int], ranks: int, runtime: str, folder: Path) -> dict[str, Any]:
    """The peaks of every rank, less those of ranks that have imported everything and have no model."""
    train = trained_by_lockstep if way == "lockstep" else start_by_hand
    with_model = train(size, ranks, runtime, folder)
    without = train({**size, **NONE}, ranks, runtime, folder)
    return {when: [a - b for a, b in zip(with_model[when], without[when], strict=True)] for when in with_model}


def tensors(size: dict[str, int], ranks: int, folder: Path) -> int:
    """Bytes of all tensors that a rank has at once in a step, by what lockstep plan notes of it."""
    notes = folder / f"tensors-{ranks}"
    file = _config(size, ranks, "cpu", folder, notes)
    report.run([sys.executable, __file__, "--tensors", str(file), str(notes)], limit=300, **ENVIRONMENT)
    return int(notes.read_text(encoding="utf-8"))


def count_tensors(config: Path, out: Path) -> None:
    from lockstep.config.load import load
    from lockstep.planner.step import trace

    loaded = load(config)
    out.write_text(str(trace(loaded, int(loaded.processes)).peak), encoding="utf-8")


def trained_by_lockstep(size: dict[str, int], ranks: int, runtime: str, folder: Path) -> dict[str, list[int]]:
    notes = folder / f"lockstep-{ranks}-{size['layers']}"
    file = _config(size, ranks, runtime, folder, notes)
    report.run([*report.lockstep(), "train", str(file), f"--out={folder / 'runs'}"], limit=600, **ENVIRONMENT)
    return _notes(notes, ranks)


def _config(size: dict[str, int], ranks: int, runtime: str, folder: Path, notes: Path) -> Path:
    config = {
        "task": {"type": f"{TASK}:Heavy", **size, "notes": str(notes), "on_gpu": runtime == "cuda"},
        "runtime": runtime,
        "processes": ranks,
        "strategy": {"type": "fsdp", "mesh": {"data": -1}},
        "train": {"steps": size["steps"] + 1, "batch_size": 4},
        "data": {"pin_memory": False},
        "launch": {"share_devices": True, "threads": 1},
        "checkpoint": {"every": None},
    }
    file = folder / f"{notes.name}.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


def start_by_hand(size: dict[str, int], ranks: int, runtime: str, folder: Path) -> dict[str, list[int]]:
    notes = folder / f"hand-{ranks}-{size['layers']}"
    child = [__file__, f"--runtime={runtime}", "--child", json.dumps(size), str(notes)]
    report.run([*report.torchrun(ranks), *child], limit=600, **ENVIRONMENT)
    return _notes(notes, ranks)


def trained_by_hand(size: dict[str, int], file: str, runtime: str) -> None:
    import torch
    import torch.distributed as dist
    from fsdp_by_hand import mesh_of_all, sharded
    from memory_task import Heavy, Notes

    notes, task = Notes(file, runtime == "cuda"), Heavy(**size, notes="")
    mesh = mesh_of_all(runtime)
    model = sharded(task.model, "blocks", mesh, activation_checkpointing=False, compiled=False, bf16=False)
    optimizer = task.optimizer(model)
    (data,) = task.train_data().tensors
    mine = data[:4][mesh.get_rank() :: mesh.size()].to(runtime)
    for step in range(size["steps"] + 1):
        if step == 0:
            notes.first_step()
        if step == size["steps"]:
            notes.last_step()
        model(mine[:, :-1], mine[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.barrier()
    dist.destroy_process_group()


def parameters_of(size: dict[str, int]) -> tuple[int, int]:
    """Of the whole model, and of one block."""
    import torch
    from memory_task import network

    with torch.device("meta"):
        model = network(size["layers"], size["width"])
    block = next(iter(model.get_submodule("blocks").children()))
    return sum(each.numel() for each in model.parameters()), sum(each.numel() for each in block.parameters())


def _notes(file: Path, ranks: int) -> dict[str, list[int]]:
    found = [json.loads(Path(f"{file}-{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    return {when: [each[when] for each in found] for when in ("set up", "training")}


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


if __name__ == "__main__":
    main()
