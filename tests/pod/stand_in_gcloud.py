"""A stand-in for gcloud: takes only what the reference of `gcloud compute tpus tpu-vm` has, records and does it.

STAND_IN_GCLOUD is a folder. In it, `calls.jsonl` gets every argument list; `pods/NAME.json` is a pod that was created,
and `pods/NAME/N` the home folder of its worker N, where `ssh` really runs a command by a shell, and `scp` copies to.
`fails` (a file: exit status, then what to say) makes the next call fail.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(os.environ["STAND_IN_GCLOUD"])
PODS = FOLDER / "pods"
EVERYWHERE = {"--zone", "--project", "--quiet", "--format"}
# The options of every verb, and how many names or paths it takes.
VERBS = {
    "create": ({"--spot", "--reserved", "--accelerator-type", "--version", "--metadata-from-file", "--network",
                "--service-account", "--async"}, 1),
    "delete": ({"--async"}, 1),
    "start": ({"--async"}, 1),
    "describe": (set(), 1),
    "list": (set(), 0),
    "ssh": ({"--worker", "--command", "--strict-host-key-checking"}, 1),
    "scp": ({"--worker", "--strict-host-key-checking", "--recurse"}, 2),
}  # fmt: skip
FLAGS = {"--spot", "--reserved", "--async", "--quiet", "--recurse"}
HOSTS = {"v4-8": 1, "v4-16": 2, "v4-32": 4, "v5litepod-16": 4}
NAME = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"


def fail(text: str, status: int = 1) -> None:
    sys.exit(print(text, file=sys.stderr) or status)


def parse(argv: list[str]) -> tuple[str, dict[str, str], list[str]]:
    if argv[:3] != ["compute", "tpus", "tpu-vm"] or len(argv) < 4 or argv[3] not in VERBS:
        fail(f"ERROR: (gcloud) Invalid choice: {argv[:4]}", 2)
    verb, (allowed, count) = argv[3], VERBS[argv[3]]
    options: dict[str, str] = {}
    names: list[str] = []
    for argument in argv[4:]:
        option, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            names.append(argument)
        elif option not in allowed | EVERYWHERE or bool(equals) == (option in FLAGS) or option in options:
            fail(f"ERROR: (gcloud.compute.tpus.tpu-vm.{verb}) unrecognized arguments: {argument}", 2)
        else:
            options[option] = value
    if len(names) != count:
        fail(f"ERROR: (gcloud.compute.tpus.tpu-vm.{verb}) expected {count} positional arguments, got {names}", 2)
    return verb, options, names


def pod_of(verb: str, name: str) -> dict[str, str]:
    name = name.rpartition("@")[2]
    if not re.fullmatch(NAME, name):
        fail(f"ERROR: (gcloud.compute.tpus.tpu-vm.{verb}) INVALID_ARGUMENT: {name}", 2)
    if not (PODS / f"{name}.json").exists():
        fail(
            f"ERROR: (gcloud.compute.tpus.tpu-vm.{verb}) NOT_FOUND: Resource "
            f"'projects/p/locations/us-central2-b/nodes/{name}' was not found"
        )
    pod = json.loads((PODS / f"{name}.json").read_text())
    if verb in ("ssh", "scp") and pod["state"] != "READY":
        fail(
            f'ERROR: (gcloud.compute.tpus.tpu-vm.{verb}) This TPU has terminal state "{pod["state"]}", so it cannot be '
            "used anymore."
        )
    return pod


def workers(pod: dict[str, str], options: dict[str, str]) -> list[int]:
    count, wanted = HOSTS[pod["acceleratorType"]], options.get("--worker", "0")
    chosen = list(range(count)) if wanted == "all" else [int(wanted)]
    if not all(0 <= each < count for each in chosen):
        fail(f"ERROR: (gcloud.compute.tpus.tpu-vm.ssh) Invalid value for [--worker]: {wanted}", 2)
    return chosen


def ssh(pod: dict[str, str], options: dict[str, str]) -> int:
    # gcloud splits the command at spaces, and ssh puts it together again for the login shell of the user.
    command = " ".join(options["--command"].split(" "))
    chosen, worst = workers(pod, options), 0
    for worker in chosen:
        print(f"SSH: Attempting to connect to worker {worker}...", file=sys.stderr, flush=True)
        home = PODS / pod["name"] / str(worker)
        env = {**os.environ, "HOME": str(home), "TPU_WORKER": str(worker)}
        status = subprocess.run(["sh", "-c", command], cwd=home, env=env).returncode
        if status and len(chosen) > 1:
            print(
                f"##### Command execution on worker {worker} failed with exit status {status}. Continuing.",
                file=sys.stderr,
            )
        worst = worst or status
    return worst


def on_worker(name: str, worker: int, path: str) -> Path:
    return PODS / name / str(worker) / path.lstrip("/")


def scp(pod: dict[str, str], options: dict[str, str], source: str, target: str) -> int:
    for worker in workers(pod, options):
        if ":" in source:
            shutil.copyfile(on_worker(pod["name"], worker, source.partition(":")[2]), target)
        else:
            where = on_worker(pod["name"], worker, target.partition(":")[2])
            if not where.parent.is_dir():
                print(f"scp: {where}: No such file or directory", file=sys.stderr)
                fail("ERROR: (gcloud.compute.tpus.tpu-vm.scp) [/usr/bin/scp] exited with return code [1].")
            shutil.copyfile(source, where)
    return 0


def create(name: str, options: dict[str, str]) -> int:
    if (PODS / f"{name}.json").exists():
        fail("ERROR: (gcloud.compute.tpus.tpu-vm.create) ALREADY_EXISTS: Resource already exists")
    kind = options["--accelerator-type"]
    key, _, file = options.get("--metadata-from-file", "").partition("=")
    if file and (key != "startup-script" or not Path(file).read_text().startswith("#!")):
        fail("ERROR: (gcloud.compute.tpus.tpu-vm.create) argument --metadata-from-file: Bad value", 2)
    for worker in range(HOSTS[kind]):
        (PODS / name / str(worker)).mkdir(parents=True)
    pod = {"name": name, "acceleratorType": kind, "state": "READY", "runtimeVersion": options["--version"]}
    (PODS / f"{name}.json").write_text(json.dumps(pod))
    return 0


def main() -> int:
    with (FOLDER / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(["gcloud", *sys.argv[1:]]) + "\n")
    verb, options, names = parse(sys.argv[1:])
    if (FOLDER / "fails").exists():
        status, _, text = (FOLDER / "fails").read_text().partition("\n")
        (FOLDER / "fails").unlink()
        fail(text, int(status))
    if verb == "list":
        print(*["NAME STATUS", *(file.stem for file in sorted(PODS.glob("*.json")))], sep="\n")
        return 0
    if verb == "create":
        return create(names[0], options)
    name = next((each.partition(":")[0] for each in names if ":" in each), names[0])
    pod = pod_of(verb, name)
    if verb == "ssh":
        return ssh(pod, options)
    if verb == "scp":
        return scp(pod, options, *names)
    if verb == "describe":
        print(json.dumps(pod))
    if verb == "start":
        (PODS / f"{name}.json").write_text(json.dumps({**pod, "state": "READY"}))
    if verb == "delete":
        (PODS / f"{name}.json").unlink()
        shutil.rmtree(PODS / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
