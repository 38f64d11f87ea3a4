"""`python -m lockstep`, and the command `lockstep`."""

import sys


def main() -> None:
    try:
        from lockstep.cli import main as commands
    except KeyboardInterrupt:
        sys.exit(130)
    commands(prog_name="lockstep")  # also as python -m lockstep: click names the completion variable after it


if __name__ == "__main__":
    main()
