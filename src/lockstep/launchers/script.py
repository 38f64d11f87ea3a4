"""How a script that calls `lockstep.launch` was started, in its run's folder, and how to start it again; no torch."""

from __future__ import annotations

import ast
import multiprocessing
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from lockstep import run_files
from lockstep.config.load import parse_yaml, to_yaml, validate
from lockstep.config.objects import loading
from lockstep.config.plain import LONGEST_CONFIG
from lockstep.config.schema import RunSettings, Section
from lockstep.distributed.signals import interactive
from lockstep.distributed.topology import Topology, launched
from lockstep.errors import ConfigError, LaunchError
from lockstep.record import run_folder

SCRIPT_FILE = "launch.yaml"
# For the script that is started again: the folder of the run to resume.
RESUME_FOLDER = "LOCKSTEP_RESUME_FOLDER"


class Script(Section):
    """What was started, where, and with which arguments, without its environment."""

    script: str | None = Field(None, description="its file; null where it was typed into a notebook or an interpreter")
    module: str | None = Field(None, description="or its module, where it was started with python -m")
    arguments: tuple[str, ...] = Field((), strict=False)
    directory: str
    function: str = Field(description="what lockstep.launch was given")
    call: int = Field(1, gt=0, description="which call of lockstep.launch in that script this is")
    processes: int | None = Field(None, gt=0, description="where torchrun, or another launcher, started them: how many")
    hosts: int = Field(1, gt=0)
    settings: dict[str, Any] = Field({}, description="of that call, as a config has them; they are the script's to set")

    @property
    def can_start(self) -> bool:
        return self.script is not None or self.module is not None

    @property
    def command(self) -> list[str]:
        """What follows `python`."""
        return [*(["-m", self.module] if self.module is not None else [str(self.script)]), *self.arguments]

    def same_program(self, other: Script) -> bool:
        return (self.script, self.module, self.function) == (other.script, other.module, other.function)

    def how_to_go_on(self, folder: Path | str) -> str:
        """`folder` may be the URL that it stands for."""
        if self.can_start:
            return f"lockstep resume {shlex.quote(str(folder))}"
        return f"lockstep.launch({self.function}, folder={str(folder)!r}, ...) in this session"


def refuse_while_importing(call: str) -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False) or loading:
        raise LaunchError(
            f"{call} was called while a rank was importing the file that calls it. "
            'Put the call under `if __name__ == "__main__":`'
        )


def require_guard(call: str) -> None:
    """Refuses to start ranks from a line outside of any `if` or `try`: every rank imports the script and reaches it."""
    statement = _statement_of_main(_running_line())
    if isinstance(statement, (ast.Expr, ast.Assign, ast.AnnAssign, ast.With, ast.For)):
        raise LaunchError(
            f"{sys.modules['__main__'].__file__}:{statement.lineno}: {call} is called at the top level of the script, "
            'which every rank imports and would start again. Put the call under `if __name__ == "__main__":`'
        )


def _running_line() -> int | None:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_lineno if frame.f_globals is vars(sys.modules["__main__"]) else None


def _statement_of_main(line: int | None) -> ast.stmt | None:
    """Returns the outermost statement of the script at a line, or None where ranks import no script."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if line is None or file is None or interactive() or (spec is not None and spec.name.endswith("__main__")):
        return None
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, ValueError, SyntaxError):
        return None
    return next((each for each in tree.body if each.lineno <= line <= (each.end_lineno or each.lineno)), None)


def running(function: str, call: int, settings: RunSettings, topology: Topology | None) -> Script:
    """Describes this process; `topology` is given where another launcher has started the ranks."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    module = None if spec is None or interactive() else str(spec.name).removesuffix(".__main__")
    script = None if module is not None or interactive() else str(Path(str(file)).absolute())
    processes, hosts = (None, 1) if topology is None else (topology.world_size, topology.host_count)
    return Script(
        script=script, module=module, arguments=tuple(sys.argv[1:]), directory=str(Path.cwd()), function=function,
        call=call, processes=processes, hosts=hosts, settings=settings.model_dump(mode="json", by_alias=True),
    )  # fmt: skip


def write(folder: Path, script: Script) -> None:
    """Writes down what was started, unless the run in the folder belongs to another program."""
    known = read(folder)
    if (folder / run_folder.CONFIG_FILE).exists() or (known is not None and not known.same_program(script)):
        return
    text = "# How this run was started. `lockstep resume` starts it again.\n"
    text += to_yaml(script.model_dump(mode="json", by_alias=True))
    run_folder.write_text(folder / SCRIPT_FILE, text)


def read(folder: Path) -> Script | None:
    """Reads how the script of a run was started; None for other runs."""
    file = folder / SCRIPT_FILE
    try:
        raw = parse_yaml(run_files.read_text(file, LONGEST_CONFIG))
    except FileNotFoundError:
        return None
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: does not say how the run was started")
    return validate(Script, raw, {}, str(file))


def folder_to_resume(call: int) -> Path | None:
    """Returns the folder that `lockstep resume` started this script for, at the call that made it."""
    named = os.environ.get(RESUME_FOLDER)
    if named is None:
        return None
    script = read(Path(named))
    if script is not None and script.call != call:
        return None
    del os.environ[RESUME_FOLDER]  # not for what this script starts itself
    return Path(named)


@dataclass(frozen=True)
class Start:
    """A command that replaces this process."""

    argv: Sequence[str]
    variables: Mapping[str, str]
    directory: str

    def render(self) -> str:
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.variables.items())
        return f"cd {shlex.quote(self.directory)} && {variables} {shlex.join(self.argv)}"

    def become(self) -> None:
        try:
            os.chdir(self.directory)
        except OSError as error:
            raise ConfigError(
                f"{self.directory}: the run was started there, and it cannot be entered: {error.strerror}. Start the "
                f"script by hand where it is now, with {RESUME_FOLDER}={self.variables[RESUME_FOLDER]}"
            ) from None
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(self.argv[0], list(self.argv), {**os.environ, **self.variables})


def start_again(folder: Path, env: Mapping[str, str], options: Mapping[str, Any]) -> Start | None:
    """Returns the command that resumes the run of a script; None for a run of `lockstep train`.

    `options` of the command line are refused: a script has its settings in itself.
    """
    if (folder / run_folder.CONFIG_FILE).exists() or (script := read(folder)) is None:
        return None
    given = [name for name, value in options.items() if value]
    if given:
        raise ConfigError(
            f"{given[0]}: the run in {folder} belongs to {shlex.join(script.command)}, which has its settings in "
            "itself: change them there"
        )
    if not script.can_start:
        raise ConfigError(
            f"{folder}: this run was started from a notebook or an interpreter, where nothing can start it again; go "
            f"on there with {script.how_to_go_on(folder)}"
        )
    if script.script is not None and not Path(script.script).is_file():
        raise ConfigError(f"{folder / SCRIPT_FILE}: script: there is no {script.script} any more; put it back, or say "
                          "in that file where it is")  # fmt: skip
    python = [sys.executable]
    if script.processes is not None and not launched(env):
        if script.hosts > 1:
            raise ConfigError(
                f"{folder}: this run was started on {script.hosts} hosts: start `lockstep resume` on each of them by "
                "the launcher that started it (torchrun ... -m lockstep resume RUN_DIR)"
            )
        python += ["-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={script.processes}"]
    return Start([*python, *script.command], {RESUME_FOLDER: str(folder.resolve())}, script.directory)
