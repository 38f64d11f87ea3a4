"""`lockstep completion`: what a shell needs to complete the names of commands, options and runs."""

from __future__ import annotations

import click

from lockstep.cli.help import examples


@click.command(
    epilog=examples(
        "lockstep completion bash > ~/.local/share/bash-completion/completions/lockstep",
        'lockstep completion zsh > "${fpath[1]}/_lockstep"',
        "lockstep completion fish > ~/.config/fish/completions/lockstep.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that lets SHELL complete lockstep's commands, options and runs with the tab key.

    Bash must be 4.4 or newer, with bash-completion for the folder of the example. To try it in the shell at hand:
    eval "$(lockstep completion bash)".
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # click has had all three since 8.0
    # Not its source(): that of bash starts a bash to look at its version, which may be on another machine.
    made = kind(context.find_root().command, {}, "lockstep", "_LOCKSTEP_COMPLETE")
    click.echo(made.source_template % made.source_vars())
