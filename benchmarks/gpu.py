"""GPTs of 124 million and 1.3 billion parameters on one GPU: steps and first steps under each framework, and what
Lockstep has to keep there.

python benchmarks/gpu.py --out FILE         on a machine with an NVIDIA GPU of 80 GB or more; about twenty minutes
python benchmarks/gpu.py --only small       the smaller model alone; large, costs, checks, curves, or names of cases
python benchmarks/gpu.py --together         all cases compile at once and are measured one after another: soon, without
                                            first steps, as far as their memory allows
python benchmarks/gpu.py --tiny             anywhere: the same code with a tiny model on the CPU, which measures nothing

With one round, cases run in the order in which --only names them. --json FILE is written after every case, and no case
begins later than --seconds after the start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import report
import torch
import turns
import yaml
from gpt_sizes import size_of, text_bytes

TASK = Path(__file__).with_name("gpu_task.py")


@dataclass(frozen=True)
class Case:
    """A row: who trains which model, and how."""

    name: str
    text: str
    model: str  # small or large
    who: str  # plain, accelerate, lightning, fabric, transformers, lockstep
    compile: Any = True
    activation_checkpointing: bool = False
    precision: str = "bf16"
    group: str = ""  # costs: one thing of Lockstep's switched off
    settings: dict[str, Any] = field(default_factory=dict)  # of Lockstep
    cache_of: str = ""  # another case, whose compiled code this one uses: it has no cold start


CASES = [
    Case("plain-eager", "plain PyTorch, eager", "small", "plain", False),
    Case("plain", "plain PyTorch, compiled", "small", "plain"),
    Case("accelerate", "Accelerate, compiled", "small", "accelerate"),
    Case("lightning", "Lightning, compiled, AdamW not fused", "small", "lightning"),
    Case("lightning-by-hand", "Lightning, compiled, clipped by hand", "small", "lightning"),
    Case("fabric", "Lightning Fabric, compiled", "small", "fabric"),
    Case("transformers", "transformers' Trainer, compiled", "small", "transformers"),
    Case("lockstep-eager", "Lockstep, eager", "small", "lockstep", False),
    Case("lockstep", "Lockstep, `compile: true`", "small", "lockstep"),
    Case("lockstep-blocks", "Lockstep, `compile: blocks`", "small", "lockstep", "blocks"),
    Case(
        "no-log",
        "Lockstep without logging and its look for NaN",
        "small",
        "lockstep",
        group="costs",
        settings={"log": {"every": "100000 steps"}},
        cache_of="lockstep",
    ),
    Case(
        "no-heartbeat",
        "Lockstep without heartbeats",
        "small",
        "lockstep",
        group="costs",
        settings={"task": {"heartbeat": False}},
        cache_of="lockstep",
    ),
    Case(
        "no-comparing",
        "Lockstep without comparing replicas",
        "small",
        "lockstep",
        group="costs",
        settings={"watch": {"fingerprint_every": None}},
        cache_of="lockstep",
    ),
    Case("all-on", "Lockstep, once more", "small", "lockstep", group="costs", cache_of="lockstep"),
    Case("plain-again", "plain PyTorch, once more", "small", "plain", group="costs", cache_of="plain"),
    Case("plain-large", "plain PyTorch, compiled", "large", "plain"),
    Case(
        "plain-large-activation checkpointing",
        "plain PyTorch, compiled, recomputed",
        "large",
        "plain",
        activation_checkpointing=True,
    ),
    Case("lockstep-large", "Lockstep, `compile: true`", "large", "lockstep"),
    Case("lockstep-large-blocks", "Lockstep, `compile: blocks`", "large", "lockstep", "blocks"),
    Case(
        "lockstep-large-activation checkpointing",
        "Lockstep, `compile: true`, `activation_checkpointing: blocks`",
        "large",
        "lockstep",
        activation_checkpointing=True,
    ),
    Case("lockstep-large-fp8", "Lockstep, `compile: true`, `precision: fp8`", "large", "lockstep", precision="fp8"),
    Case(
        "lockstep-large-fp8-blocks",
        "Lockstep, `compile: blocks`, `precision: fp8`",
        "large",
        "lockstep",
        "blocks",
        precision="fp8",
    ),
]

MODULES = {"lightning": "pytorch_lightning", "fabric": "lightning_fabric"}  # where the name is not the module's

NOTES = """\
bf16 autocast, fused AdamW, gradients clipped to a norm of 1; {small} x {context} tokens per step for the small model,
{large} x {context} for the large one. The median over blocks of 30 steps (10 of the large model), the device waited
for at each end, after one block to warm up. The others load with torch's `DataLoader` (pinned memory) and log nothing;
Lockstep logs every 10 steps, compares replicas and watches, as it does by default. First steps are seconds from the
command to the end of the first step: cold with an empty cache of compiled code, warm in a second start with the same.
The ceiling, {ceiling:.0f} TFLOP/s, was measured just before with bf16 matrices of {side} x {side}; a token is counted
as 6 x parameters + 12 x layers x width x context operations."""


def main() -> None:
    parser = report.options(__doc__, repeats=1)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to prove the code")
    parser.add_argument("--only", nargs="+", help="small, large, costs, checks, or names of cases")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no case begins")
    parser.add_argument("--together", action="store_true", help="compile all cases at once, measure one after another")
    parser.add_argument("--cold", action="store_true", help="one start of each case, with an empty cache")
    parser.add_argument("--out", type=Path, help="write what is printed there as well")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    chosen = report.parse(parser)
    chosen.tiny = chosen.tiny or chosen.quick
    if chosen.child:
        name, file = chosen.child
        in_this_process(name, file, chosen.tiny)
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        speed, raw = compare(chosen, Path(folder))
        checks = []
        if chosen.only and "curves" in chosen.only:
            checks.append(curves(chosen.tiny, Path(folder), raw))
        if not chosen.only or "checks" in chosen.only:
            checks = [resume_check(chosen.tiny, Path(folder)), digits_check(chosen.tiny, Path(folder))]
    device = "a tiny model on the CPU" if chosen.tiny else torch.cuda.get_device_name()
    verdicts = "\n".join(f"- {text}" for _, text in checks)
    text = f"On {device}:\n\n{speed}\n\n{verdicts}".rstrip()
    report.publish(text, {"device": device, "seconds": time.monotonic() - began, **raw}, chosen.json)
    if chosen.out:
        chosen.out.write_text(f"{text}\n\n{report.provenance()}\n", encoding="utf-8")
    sys.exit(0 if all(good for good, _ in checks) else 1)


# Speed


def compare(chosen: argparse.Namespace, folder: Path) -> tuple[str, dict[str, Any]]:
    """The tables of step times, and everything that was measured for them."""
    tiny = chosen.tiny
    if chosen.only == ["curves"]:
        return "", {}
    ceiling = in_child("ceiling", tiny, folder)
    cases = [
        each for each in CASES if each.who in ("plain", "lockstep") or report.installed(MODULES.get(each.who, each.who))
    ]
    wanted = chosen.only or (["plain", "lockstep", "lockstep-blocks"] if tiny else ["small", "large", "costs"])
    cases = [
        each for name in wanted for each in cases if name in (each.name, each.group or each.model)
    ]  # in the order of --only
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    began = time.monotonic()
    caches: dict[str, Path] = {}
    if chosen.together:
        found |= measured_together(cases, tiny, folder, chosen, ceiling["ceiling"])
    for name in report.interleaved(
        [] if chosen.together else [each.name for each in cases], chosen, shuffled=chosen.repeats > 1
    ):
        if time.monotonic() - began > chosen.seconds:
            print(f"{name} is left out: no time", file=sys.stderr, flush=True)
            continue
        try:
            found[name].append(measured(name, tiny, folder, caches, chosen.cold))
        except report.MeasurementFailed as failure:  # the others are worth having
            print(f"{name} failed: {failure}", file=sys.stderr, flush=True)
        else:
            case = case_of(name)
            print(f"{name}: {cells(case, found[name], tiny, ceiling['ceiling'], None)}", file=sys.stderr, flush=True)
        if chosen.json is not None:
            chosen.json.write_text(json.dumps({"ceiling": ceiling, "found": found}), encoding="utf-8")
    header = ["", "step", "of plain", "tokens/s", "of the ceiling", "peak memory", "first step, cold", "warm"]
    parts = []
    for model, title in (("small", "124 million parameters"), ("large", "1.3 billion parameters")):
        ours = [each for each in cases if each.model == model]
        plain = step_of(model, found["plain" if model == "small" else "plain-large"])
        rows = [[each.text, *cells(each, found[each.name], tiny, ceiling["ceiling"], plain)] for each in ours]
        if rows:
            parts.append(f"{title}:\n\n{report.table(header, rows)}")
    parts += [first_steps(cases, found), same_losses(cases, found)]
    sizes = {each: batch_size(each, tiny) for each in ("small", "large")}
    notes = NOTES.format(context=size_of("small", tiny)["context"], **sizes, **ceiling)
    return "\n\n".join([*filter(None, parts), notes]), {"ceiling": ceiling, "found": found}


def case_of(name: str) -> Case:
    return next(each for each in CASES if each.name == name)


def measured(name: str, tiny: bool, folder: Path, caches: dict[str, Path], once: bool) -> dict[str, Any]:
    """Two starts with one cache of compiled code, empty before the first; steps are those of the second."""
    case = case_of(name)
    shared = caches.get(case.cache_of)
    cache = shared or Path(tempfile.mkdtemp(prefix="cache-", dir=folder))
    caches[name] = cache
    starts = []
    for _ in range(1 if shared or once else 2):
        began = time.time()
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
        if case.who == "lockstep":
            result = trained_by_lockstep(case, tiny, folder, variables)
        else:
            result = in_child(name, tiny, folder, **variables)
        result["phases"] = {phase: at - began for phase, at in result["phases"].items()}
        starts.append(result)
    firsts = [each["phases"]["backward, optimizer"] for each in starts]
    return {
        **result,
        "cold": None if shared else firsts[0],
        "warm": None if once else firsts[-1],
        "cold phases": starts[0]["phases"],
    }


def measured_together(
    cases: list[Case], tiny: bool, folder: Path, chosen: argparse.Namespace, ceiling: float
) -> dict[str, list[dict[str, Any]]]:
    """Steps alone: the first ones are those of several processes at once."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    cache = folder / "cache"
    commands = {each.name: command_of(each, tiny, folder) for each in cases}
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    for name, failure in turns.taken(commands, folder, min(chosen.seconds, 500), **variables):
        if failure:
            print(f"{name} failed: {failure}", file=sys.stderr, flush=True)
            continue
        result = dict(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))
        found[name].append({**result, "phases": {}, "cold phases": {}, "cold": None, "warm": None})
        print(f"{name}: {cells(case_of(name), found[name], tiny, ceiling, None)}", file=sys.stderr, flush=True)
        if chosen.json is not None:
            chosen.json.write_text(json.dumps({"found": found}), encoding="utf-8")
    return found


def first_steps(cases: list[Case], found: dict[str, list[dict[str, Any]]]) -> str:
    """Where the time to the first step goes: when each phase ended, in seconds after the command."""
    shown = [case for case in cases if found[case.name] and not case.group]
    names = list(dict.fromkeys(phase for case in shown for phase in found[case.name][0]["phases"]))
    parts = []
    for title, start, time_of in (("Cold", "cold phases", "cold"), ("Warm", "phases", "warm")):
        rows = []
        for case in shown:
            phases = found[case.name][0][start] if found[case.name][0][time_of] else {}
            rows.append([case.text, *(f"{phases[name]:.1f}" if name in phases else "-" for name in names)])
        parts.append(f"{title} start, seconds from the command to the end of each phase:\n\n")
        parts[-1] += report.table(["", *names], rows)
    return "\n\n".join(parts) if names else ""


def same_losses(cases: list[Case], found: dict[str, list[dict[str, Any]]]) -> str:
    """Every way of compiling must train the same: losses of Lockstep's cases at the same steps."""
    rows = []
    for case in cases:
        if found[case.name] and case.who in ("lockstep", "plain"):
            losses = found[case.name][0]["losses"]
            rows.append([case.text, case.model, *(f"{each:.4f}" for each in losses[1:])])
    return (
        "Losses before every block of steps:\n\n" + report.table(["", "model", *["loss"] * (len(rows[0]) - 2)], rows)
        if rows
        else ""
    )


def step_of(model: str, found: list[dict[str, Any]]) -> float | None:
    stamps = [each["stamps"][1:] for each in found]  # without the warm-up
    blocks = [(after - before) / block_of(model) for each in stamps for before, after in itertools.pairwise(each)]
    return statistics.median(blocks) if blocks else None


def cells(case: Case, found: list[dict[str, Any]], tiny: bool, ceiling: float, plain: float | None) -> list[str]:
    step = step_of(case.model, found)
    if step is None:
        return ["failed", *["-"] * 6]
    size = size_of(case.model, tiny)
    tokens = batch_size(case.model, tiny) * size["context"]
    parameters = 12 * size["layers"] * size["width"] ** 2 + size["vocab"] * size["width"]
    operations = 6 * parameters + 12 * size["layers"] * size["width"] * size["context"]
    share = tokens * operations / step / (ceiling * 1e12)
    peak = max(each["peak"] for each in found)
    firsts = [min((each[name] for each in found if each[name]), default=None) for name in ("cold", "warm")]
    return [
        f"{step * 1e3:.1f} ms", f"{step / plain:.3f}" if plain else "-", f"{tokens / step / 1e3:.0f} k", f"{share:.0%}",
        f"{peak / 2**30:.1f} GiB", *(f"{each:.1f} s" if each else "-" for each in firsts),
    ]  # fmt: skip


def model_of(model: str, tiny: bool) -> dict[str, Any]:
    """What the task is told of its model."""
    lr = 1e-3 if tiny else 6e-4 if model == "small" else 2e-4
    return {**size_of(model, tiny), "max_bytes": text_bytes(tiny), "lr": lr}


def batch_size(model: str, tiny: bool) -> int:
    return 4 if tiny else 32 if model == "small" else 16


def block_of(model: str) -> int:
    """Steps between two looks at the clock: rows of Lockstep's log."""
    return 30 if model == "small" else 10


def steps_of(model: str, tiny: bool) -> tuple[int, int]:
    """Steps to warm up, and steps to measure."""
    block = block_of(model)
    return (block, block) if tiny else (block, 3 * block)


def child(name: str, tiny: bool, file: Path) -> list[str]:
    return [sys.executable, __file__, "--child", name, str(file), *(["--tiny"] if tiny else [])]


def in_child(name: str, tiny: bool, folder: Path, **variables: str) -> dict[str, Any]:
    file = folder / f"{name}.json"
    report.run(child(name, tiny, file), limit=400, **variables)
    return dict(json.loads(file.read_text(encoding="utf-8")))


def command_of(case: Case, tiny: bool, folder: Path) -> list[str]:
    """Returns the command that runs a case and writes its stamps to NAME.json."""
    if case.who != "lockstep":
        return child(case.name, tiny, folder / f"{case.name}.json")
    stamps = folder / f"{case.name}.json"
    steps = sum(steps_of(case.model, tiny))
    task = {
        "type": f"{TASK}:TimedText",
        "steps": steps,
        "block": block_of(case.model),
        "stamps": str(stamps),
        **model_of(case.model, tiny),
    }
    training = {
        "steps": steps + 1, "compile": case.compile, "batch_size": batch_size(case.model, tiny), "clip_norm": 1.0,
        "precision": case.precision, "activation_checkpointing": "blocks" if case.activation_checkpointing else None,
    }  # fmt: skip
    settings = dict(case.settings)
    task |= settings.pop("task", {})
    return lockstep_command(case.name, tiny, folder, task, training, **settings)


def trained_by_lockstep(case: Case, tiny: bool, folder: Path, variables: dict[str, str]) -> dict[str, Any]:
    report.run(command_of(case, tiny, folder), limit=400, **variables)
    run, stamps = max((folder / case.name).iterdir()), folder / f"{case.name}.json"
    shutil.rmtree(run / "checkpoints")
    found = dict(json.loads(stamps.read_text(encoding="utf-8")))
    timeline = [json.loads(line) for line in (run / "timeline.jsonl").read_text(encoding="utf-8").splitlines()]
    started = {"launcher": next(each["at"] for each in timeline if each["kind"] == "start")}
    met = next(each for each in timeline if each["kind"] == "roll call")
    ordered = {**started, "until roll call": met["at"], "roll call": met["until"], **found["phases"]}
    return {**found, "phases": dict(sorted(ordered.items(), key=lambda each: each[1]))}


def lockstep_train(
    name: str,
    tiny: bool,
    folder: Path,
    task: dict[str, Any],
    training: dict[str, Any],
    **settings: Any,
) -> Path:
    """Train through the command line; the run's folder."""
    report.run(lockstep_command(name, tiny, folder, task, training, **settings), limit=400)
    return max((folder / name).iterdir())


def lockstep_command(
    name: str, tiny: bool, folder: Path, task: dict[str, Any], training: dict[str, Any], **settings: Any
) -> list[str]:
    config = {
        "task": task,
        "runtime": "cpu" if tiny else "cuda",
        "processes": 1,
        "train": {"precision": "bf16", **training},
        "data": {"pin_memory": not tiny, "drop_last": True},
        "checkpoint": {"every": None},
        **settings,
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return [*report.lockstep(), "train", str(file), f"--out={folder / name}"]


# What has to hold


def resume_check(tiny: bool, folder: Path) -> tuple[bool, str]:
    """Train 20 steps; go on from the checkpoint of step 10 in a copy of the folder; the losses must be the same."""
    task = {"type": f"{TASK}:TimedText", "deterministic": True, **model_of("small", tiny)}
    training = {"steps": 20, "batch_size": 4 if tiny else 8}
    settings = {"checkpoint": {"every": "10 steps", "keep": {"last": 2}}, "log": {"every": "1 step"}}
    try:
        first = lockstep_train("resume", tiny, folder, task, training, **settings)
        copy = first.with_name("copy")
        shutil.copytree(first, copy)
        shutil.rmtree(copy / "checkpoints" / "step-00000020")
        report.run([*report.lockstep(), "resume", str(copy)], limit=400)
    except report.MeasurementFailed as failure:
        return False, f"save and resume: failed\n\n```\n{failure}\n```"
    before, after = losses(first), losses(copy)
    furthest = max(abs(before[step] - after[step]) for step in range(11, 21))
    same = "bit for bit the same" if furthest == 0 else f"DIFFERENT, by up to {furthest:g}"
    return furthest == 0, f"resumed from the checkpoint of step 10: the losses of steps 11 to 20 are {same}"


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row["train/loss"] for row in rows if "examples_per_second" in row}


def digits_check(tiny: bool, folder: Path) -> tuple[bool, str]:
    """A small network in bf16 must learn."""
    training = {"epochs": 5, "batch_size": 64}
    settings = {"data": {"split": {"train": 0.8, "val": 0.2}}}
    try:
        run = lockstep_train("digits", tiny, folder, {"type": f"{TASK}:NoisyDigits"}, training, **settings)
    except report.MeasurementFailed as failure:
        return False, f"noisy digits: failed\n\n```\n{failure}\n```"
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    accuracy = summary["metrics"]["val/accuracy"]
    return (
        accuracy > 0.9,
        f"noisy digits, bf16, on {summary['runtime']}: validation accuracy {accuracy:.3f} after 5 epochs",
    )


CURVES = {"bf16": "bf16", "fp8": "fp8"}
CURVE_BATCH = 4  # examples of a step: the runs share the GPU


def curves(tiny: bool, folder: Path, raw: dict[str, Any]) -> tuple[bool, str]:
    """The large model trains on real text in bf16 and in fp8, at the same time: losses must agree to 0.5 %."""
    steps, commands = 50 if tiny else 500, {}
    for name, precision in CURVES.items():
        file = str(folder / f"{name}.json")
        task = {"type": f"{TASK}:Curve", "steps": steps, "file": file, **model_of("large", tiny)}
        training = {
            "steps": steps + 1, "compile": "blocks", "batch_size": CURVE_BATCH, "clip_norm": 1.0,
            "precision": precision,
        }  # fmt: skip
        settings = {"scheduler": {"type": "cosine", "warmup": "5%"}}
        commands[name] = lockstep_command(name, tiny, folder, task, training, **settings)
    found: dict[str, list[float]] = {}
    failed = ""
    for name, failure in turns.taken(commands, folder, 500, at_once=True):
        if failure:
            failed += f"\n\n```\n{name}: {failure}\n```"
        else:
            found[name] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    raw["curves"] = found
    tenth, ends = steps // 10, range(steps // 5, steps + 1, steps // 5)
    means = {name: [statistics.mean(each[end - tenth : end]) for end in ends] for name, each in found.items()}
    rows = [[name, *(f"{each:.4f}" for each in row)] for name, row in means.items()]
    text = report.table([f"loss, mean of {tenth} steps up to", *map(str, ends)], rows) + failed
    if not {"bf16", "fp8"} <= means.keys():
        return False, f"curves: failed\n\n{text}"
    off = means["fp8"][-1] / means["bf16"][-1] - 1
    return abs(off) < 0.005, f"fp8 ends {off:+.2%} off bf16:\n\n{text}"


# In a child process


def measure_ceiling(tiny: bool, file: str) -> None:
    """The fastest that this device multiplies large bf16 matrices."""
    side, device = (256, "cpu") if tiny else (8192, "cuda")
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))

    def block() -> float:
        began = time.perf_counter()
        for _ in range(20):
            left @ right
        if not tiny:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / 20

    block()
    best = min(block() for _ in range(10))
    Path(file).write_text(json.dumps({"ceiling": 2 * side**3 / best / 1e12, "side": side}), encoding="utf-8")


def in_this_process(name: str, file: str, tiny: bool) -> None:
    if name == "ceiling":
        measure_ceiling(tiny, file)
        return
    case = case_of(name)
    from gpu_task import TimedText
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    steps, block = sum(steps_of(case.model, tiny)), block_of(case.model)
    task = TimedText(steps=steps, block=block, stamps=file, **model_of(case.model, tiny))
    data = DataLoader(
        task.train_data(), batch_size(case.model, tiny), shuffle=True, drop_last=True, pin_memory=not tiny
    )
    ways = {"plain": plain, "accelerate": accelerate, "lightning": lightning, "fabric": fabric,
            "transformers": transformers}  # fmt: skip
    ways[case.who](case, task, data, tiny)


def plain(case: Case, task: Any, loader: Any, tiny: bool) -> None:
    device = torch.device("cpu" if tiny else "cuda")
    model = task.model().to(device)
    optimizer = task.optimizer(model)
    if case.activation_checkpointing:
        recompute_blocks(model)
    if case.compile:
        model.compile()
    for batch in itertools.islice(loader, task.steps + 1):
        on_device = [each.to(device, non_blocking=True) for each in batch]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = task.loss(model, on_device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def recompute_blocks(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, block in enumerate(list(model.blocks)):
        model.blocks[index] = checkpoint_wrapper(block)


def accelerate(case: Case, task: Any, loader: Any, tiny: bool) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=tiny, mixed_precision="bf16", dynamo_backend="inductor")
    model = task.model()
    model, optimizer, loader = accelerator.prepare(model, task.optimizer(model), loader)
    for batch in itertools.islice(loader, task.steps + 1):
        accelerator.backward(task.loss(model, batch))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def lightning(case: Case, task: Any, loader: Any, tiny: bool) -> None:
    """Lightning refuses to clip with a fused optimizer: one that is not, or clipping in a hook."""
    from pytorch_lightning import LightningModule, Trainer

    by_hand = case.name == "lightning-by-hand"

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model()
            self.model.compile()

        def training_step(self, batch: Any, index: int) -> Any:
            return task.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            optimizer = task.optimizer(self.model)
            if by_hand:
                return optimizer
            return type(optimizer)(optimizer.param_groups, lr=task.lr, betas=(0.9, 0.95), fused=False, foreach=True)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if by_hand:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    trainer = Trainer(
        accelerator="cpu" if tiny else "gpu", devices=1, precision="bf16-mixed", max_steps=task.steps + 1,
        gradient_clip_val=None if by_hand else 1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), loader)


def fabric(case: Case, task: Any, loader: Any, tiny: bool) -> None:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu" if tiny else "gpu", devices=1, precision="bf16-mixed")
    fabric.launch()
    model = task.model()
    optimizer = task.optimizer(model)
    model, optimizer = fabric.setup(cast(torch.nn.Module, torch.compile(model)), optimizer)
    for batch in itertools.islice(fabric.setup_dataloaders(loader), task.steps + 1):
        fabric.backward(task.loss(model, batch))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()


def transformers(case: Case, task: Any, loader: Any, tiny: bool) -> None:
    from transformers import Trainer, TrainingArguments

    class Timed(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return task.loss(model, inputs["windows"])

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=task.steps + 1, per_device_train_batch_size=loader.batch_size, bf16=True,
            torch_compile=True, max_grad_norm=1.0, dataloader_pin_memory=not tiny, dataloader_drop_last=True,
            logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=tiny,
            remove_unused_columns=False, lr_scheduler_type="constant",
        )  # fmt: skip
        model = task.model()
        trainer = Timed(
            model, arguments, train_dataset=task.train_data(), optimizers=(task.optimizer(model), None),
            data_collator=lambda rows: {"windows": [torch.stack([row[0] for row in rows])]},
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":
    main()
