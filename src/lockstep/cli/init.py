"""`lockstep init`."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.help import examples
from lockstep.cli.messages import say


@click.command(epilog=examples("lockstep init demo"))
@click.argument("folder", type=click.Path(path_type=Path), default=Path())
def init(folder: Path) -> None:
    """Write a task and a config to start from into FOLDER."""
    from lockstep.errors import ConfigError

    templates = Path(__file__).parents[1] / "templates"
    files = {"task.py": templates / "task.py.txt", "config.yaml": templates / "config.yaml"}
    present = [name for name in files if (folder / name).exists()]
    if present:
        raise ConfigError(f"{folder / present[0]} is there already; name another folder: lockstep init FOLDER")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, template in files.items():
            text = template.read_text(encoding="utf-8").replace("name: NAME", _name_line(folder))
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
    say(f"wrote {folder / 'task.py'} and {folder / 'config.yaml'}; next: lockstep train {folder / 'config.yaml'}")


def _name_line(folder: Path) -> str:
    """What names the runs after the folder, as wide as what it replaces where it can be."""
    from lockstep.config.load import to_yaml
    from lockstep.launchers.base import run_name

    return to_yaml({"name": run_name(folder.resolve().name)}).strip().ljust(len("name: NAME"))
