"""Which examples a run has seen after it was killed and resumed on other numbers of ranks: Lockstep beside its peers.

python benchmarks/elastic.py                            all peers and forms; on two cores about half an hour
python benchmarks/elastic.py --peer lockstep --form tar one of them
python benchmarks/elastic.py --quick                    few examples and ranks: proves the code

One epoch over 1,000 numbered examples in global batches of 24, on gloo and the CPU. Every rank kills itself by SIGKILL
at a random step, the run is resumed on the next number of ranks, and the last one finishes the epoch. An example counts
when its gradient reached the model in a step that the resumed run still has: work after the last checkpoint is redone.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import elastic_peers
import report
import torch
from elastic_peers import Notes, Segment

NAMES = {
    "lockstep": "Lockstep", "accelerate": "Accelerate", "lightning": "Lightning",
    "transformers": "transformers' Trainer", "torchdata": "torchdata",
}  # fmt: skip
# The forms that a peer has a documented way for. tar: every rank reads its files; tar-whole: every rank reads all.
FORMS = {
    "lockstep": ["indexed", "weighted", "packed", "tar", "tar-whole"],
    "accelerate": ["indexed", "weighted", "packed", "tar-whole"],
    "lightning": ["indexed", "weighted", "packed", "tar"],
    "transformers": ["indexed", "packed", "tar-whole"],
    "torchdata": ["indexed", "packed", "tar"],
}
MODULES = {
    "lockstep": "lockstep", "accelerate": "accelerate", "lightning": "lightning.pytorch",
    "transformers": "transformers.trainer", "torchdata": "torchdata.stateful_dataloader",
}  # fmt: skip
WORKERS = (0, 2)
LIMIT = 400.0  # seconds until a segment that does not end is killed

NOTES = """\
Ranks: {ranks}. {examples} examples, global batches of {batch}, a checkpoint every {every} steps. Lost and repeated:
compared with the same framework's run that was never killed, on {first} ranks. Out of order: seen, but in another step
than there. Padding: what that run saw more than once, to fill its last batch."""


def train(segment: Segment) -> str:
    """Trains one segment; returns what went wrong, in a few words."""
    if segment.peer != "lockstep":
        return train_forked(segment)
    import lockstep

    try:
        with report.silent_processes():
            lockstep.launch(
                partial(elastic_peers.lockstep, segment=segment), segment.ranks, runtime="cpu", seed=0,
                folder=f"{segment.folder}/run", launch={"threads": 1},
                data={"workers": segment.workers}, timeouts={"rendezvous": 300},
            )  # fmt: skip
    except Exception as error:
        return "" if was_killed(segment) else shortened(str(error))
    return "" if not segment.kill else f"ended before step {segment.kill}"


def train_forked(segment: Segment) -> str:
    """Starts the ranks with torchrun's variables, by fork: the peer is imported once."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(segment, rank, port)) for rank in range(segment.ranks)]
    for each in ranks:
        each.start()
    deadline = time.monotonic() + LIMIT
    while any(each.is_alive() for each in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
        if any(each.exitcode for each in ranks):
            deadline = min(deadline, time.monotonic() + 5)
    late = [each for each in ranks if each.is_alive()]
    for each in late:
        each.kill()
    for each in ranks:
        each.join()
    errors = sorted(Path(segment.folder).glob(f"error-{segment.number}-*"), key=lambda file: file.stat().st_mtime)
    if was_killed(segment):
        return ""
    if errors:
        return shortened(errors[0].read_text(encoding="utf-8"))
    return f"did not end in {LIMIT:g} s" if late else f"ended before step {segment.kill}" if segment.kill else ""


def rank_main(segment: Segment, rank: int, port: int) -> None:
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": segment.ranks, "LOCAL_WORLD_SIZE": segment.ranks,
        "GROUP_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "elastic",
        "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        getattr(elastic_peers, segment.peer)(segment, Notes(segment, rank))
    except BaseException as error:
        traceback.print_exc()
        (Path(segment.folder) / f"error-{segment.number}-{rank}").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


def shortened(error: str) -> str:
    return next((line.strip()[:150] for line in error.splitlines() if line.strip()), "failed")


def was_killed(segment: Segment) -> bool:
    return segment.kill > 0 and any(segment.kill in steps(segment, rank)[1] for rank in range(segment.ranks))


def steps(segment: Segment, rank: int) -> tuple[int, dict[int, list[int]]]:
    """Where a rank of a segment began, and what it saw in each step."""
    file = Path(segment.folder) / f"notes-{segment.number}-{rank}.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    begun = [value for name, value in lines if name == "resumed"]
    return begun[0] if begun else -1, {name: seen for name, seen in lines if name != "resumed"}


def history(segments: Iterable[Segment]) -> tuple[dict[int, Counter[int]], list[int]]:
    """What every step saw that the run still has, and the steps that it was resumed at."""
    found: dict[int, Counter[int]] = {}
    resumed = []
    for segment in segments:
        ranks = [steps(segment, rank) for rank in range(segment.ranks)]
        begun = max(begin for begin, _ in ranks)
        if begun < 0:
            break  # it did not begin to train: what was there before is all
        resumed.append(begun)
        found = {step: seen for step, seen in found.items() if step <= begun}
        for _, seen_in in ranks:
            for step, seen in seen_in.items():
                found.setdefault(step, Counter()).update(seen)
    return found, resumed[1:]


def case(first: Segment, ranks: list[int], seed: int) -> dict[str, Any]:
    """Trains without and with kills, and compares."""
    began, folder = time.monotonic(), Path(first.folder)
    elastic_peers.write_tars(folder / "tars", first.examples)
    draw, kills = random.Random(f"{seed} {first.form} {first.workers}"), []
    for part in range(1, len(ranks)):
        middle = first.steps * part // len(ranks)
        near = range(middle - first.every, middle + first.every)
        kills.append(draw.choice([step for step in near if step % first.every and step > first.every]))
    segments = [
        replace(first, ranks=count, folder=str(folder / "killed"), number=number, kill=kill)
        for number, (count, kill) in enumerate(zip(ranks, [*kills, 0], strict=True))
    ]
    reference = replace(first, ranks=ranks[0], folder=str(folder / "whole"))
    for each in ("killed", "whole"):
        (folder / each).mkdir()
    problems, made = [train(reference)], []
    if problems[0]:
        raise SystemExit(f"{first.peer} did not train without a kill: {problems[0]}")
    for segment in segments:
        made.append(segment)
        problems.append(train(segment))
        if problems[-1]:
            problems[-1] = f"on {segment.ranks} ranks: {problems[-1]}"
            break
    whole, _ = history([reference])
    found, resumed = history(made)
    expected, seen = sum(whole.values(), Counter()), sum(found.values(), Counter())
    same = sum((whole[step] & found.get(step, Counter())).total() for step in whole)
    return {
        "peer": first.peer, "form": first.form, "workers": first.workers, "lost": (expected - seen).total(),
        "repeated": (seen - expected).total(), "out of order": (expected & seen).total() - same,
        "padding": expected.total() - first.examples, "kills": kills, "resumed": resumed,
        "problem": "; ".join(filter(None, problems)), "seconds": round(time.monotonic() - began),
    }  # fmt: skip


def measure(peer: str, chosen: argparse.Namespace) -> None:
    """All cases of one peer, in a process of its own, which imports it once."""
    torch.set_num_threads(1)
    for each in (MODULES[peer], "torch._dynamo"):  # what ranks would import, once before they are forked
        importlib.import_module(each)
    examples, batch, every = sizes(chosen)
    for form in [each for each in FORMS[peer] if each in chosen.form]:
        for workers in chosen.workers:
            with tempfile.TemporaryDirectory(prefix="elastic-", ignore_cleanup_errors=True) as folder:
                first = Segment(peer, form, workers, chosen.ranks[0], examples, batch, every, folder)
                print("ROW " + json.dumps(case(first, chosen.ranks, chosen.seed)), flush=True)


def sizes(chosen: argparse.Namespace) -> tuple[int, int, int]:
    """Examples, the global batch, and steps between checkpoints."""
    return (96, 6, 2) if chosen.quick else (1000, 24, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few examples and ranks: proves the code")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every case there, as soon as it is done")
    parser.add_argument("--peer", choices=list(NAMES), action="append", help="measure nobody else")
    parser.add_argument("--form", choices=FORMS["lockstep"], action="append", help="measure no other form")
    parser.add_argument("--workers", type=int, action="append", help="data workers (default: 0 and 2)")
    parser.add_argument("--ranks", type=int, nargs="+", help="the numbers of ranks (default: 4 2 8 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the steps to be killed at")
    parser.add_argument("--measure", choices=list(NAMES), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    chosen.ranks = chosen.ranks or ([2, 3, 2] if chosen.quick else [4, 2, 8, 3])
    chosen.workers, chosen.form = chosen.workers or list(WORKERS), chosen.form or FORMS["lockstep"]
    if chosen.measure:
        measure(chosen.measure, chosen)
        return
    found: list[dict[str, Any]] = []
    for peer in chosen.peer or NAMES:
        if not report.installed(peer):
            continue
        command = [sys.executable, __file__, *sys.argv[1:], "--measure", peer]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            variables = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables)
            for line in child.stdout or ():
                if line.startswith("ROW "):
                    found.append(json.loads(line.removeprefix("ROW ")))
                    print(json.dumps(found[-1]), file=sys.stderr, flush=True)
                    if chosen.json:
                        chosen.json.write_text(json.dumps({"provenance": versions(), "cases": found}, indent=1) + "\n")
            if child.wait():
                errors.seek(0)
                print(f"{peer}: exit code {child.returncode}\n{errors.read()[-3000:]}", file=sys.stderr)
    examples, batch, every = sizes(chosen)
    ranks = " -> ".join(map(str, chosen.ranks))
    notes = NOTES.format(ranks=ranks, first=chosen.ranks[0], examples=examples, batch=batch, every=every)
    print(f"{shown(found)}\n\n{notes}\n\n{versions()}")


def shown(found: list[dict[str, Any]]) -> str:
    lines = []
    for row in found:
        title = f"{NAMES[row['peer']]}: {row['form']}, {row['workers']} workers"
        figures = [str(row[each]) for each in ("lost", "repeated", "out of order", "padding")]
        lines.append([title, *figures, row["problem"]])
    return report.table(["", "lost", "repeated", "out of order", "padding", "problem"], lines)


def versions() -> str:
    peers = [f"{name} {importlib.metadata.version(name)}" for name in list(NAMES)[1:] if importlib.util.find_spec(name)]
    return f"{report.provenance()}; {', '.join(peers)}"


if __name__ == "__main__":
    main()
