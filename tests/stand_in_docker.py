"""A stand-in for docker: takes the options that we give it, records its arguments, and runs the command as it is.

Beside it is a folder `calls`: `calls.jsonl` gets every argument list, `NAME.pid` is the container of a name.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent / "calls"
WITH_VALUE = {"-e", "-v", "-w", "-t"}
FLAGS = {"-d", "--rm", "--privileged"}
EQUALS = {"--name", "--net", "--ipc"}


def main(argv: list[str]) -> int:
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps([os.uname().nodename, *argv]) + "\n")
    verb, options, rest = argv[0], [], argv[1:]
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        assert option in WITH_VALUE | FLAGS or option.partition("=")[0] in EQUALS, option
        options.append((option, rest.pop(0) if option in WITH_VALUE else ""))
    if verb == "run":
        return run(options, rest[1:])
    if verb == "stop":
        return stop(rest[0])
    return 2


def file_of(name: str) -> Path:
    return FOLDER / f"{os.uname().nodename}-{name}.pid"


def run(options: list[tuple[str, str]], command: list[str]) -> int:
    env = dict(os.environ)
    env.update(value.split("=", 1) for option, value in options if option == "-e")
    folder = next(value for option, value in options if option == "-w")
    if ("-d", "") not in options:
        return subprocess.run(command, cwd=folder, env=env).returncode
    name = next(option.partition("=")[2] for option, _ in options if option.startswith("--name="))
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=folder, env=env, stdin=quiet, stdout=quiet, stderr=quiet,
                               start_new_session=True)  # fmt: skip
    file_of(name).write_text(str(process.pid))
    print("0123456789ab")
    return 0


def stop(name: str) -> int:
    pid = int(file_of(name).read_text())
    os.kill(pid, signal.SIGTERM)
    while Path(f"/proc/{pid}").exists() and ") Z" not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
