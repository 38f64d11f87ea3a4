"""`python -m lockstep.ray --workers 2 --backend gloo`: proves that every worker has its own device."""

from __future__ import annotations

import sys
import tempfile

import click

from lockstep.errors import ConfigError, LockstepError, RollCallError

BACKENDS = ("auto", "gloo", "nccl", "xla", "xla_tpu")


@click.command()
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True)
@click.option("--address", help="Of a running cluster, else RAY_ADDRESS; without either, a local one is started.")
@click.option("--gpus", type=float, default=0, show_default=True, help="GPUs per worker.")
@click.option("--tpus", type=float, default=0, show_default=True, help="TPU chips per worker.")
@click.option("--topology", help="Of the TPU slice that several workers share, such as 2x2x2.")
@click.option("--accelerator", help="The kind of that slice by Ray's name, such as TPU-V4.")
@click.option("--insecure", is_flag=True, help="Use a cluster that asks nobody for a token.")
@click.option("--timeout", type=float, default=30.0, show_default=True, help="Seconds to join the group.")
@click.option("--placement-timeout", type=float, default=60.0, show_default=True, help="Seconds to place the workers.")
def main(workers: int, backend: str, gpus: float, tpus: float, timeout: float, **cluster: object) -> None:
    """Place workers on a Ray cluster, join them to a group, and print the device of each.

    Exit code 0 if every worker has its own device and a sum over all of them is right, 3 if not.
    """
    try:
        from lockstep.ray.installed import require_ray

        require_ray()
        from lockstep.config.load import validate
        from lockstep.config.schema import RayCluster
        from lockstep.ray.verification import verify

        settings = validate(RayCluster, cluster, {}, "python -m lockstep.ray")
        resources = {"CPU": 1.0, **({"GPU": gpus} if gpus else {}), **({"TPU": tpus} if tpus else {})}
        with tempfile.TemporaryDirectory(prefix="lockstep-ray-") as storage:
            lines = verify(workers, backend, settings, resources, timeout, storage)
    except (LockstepError, ImportError) as error:
        verdict = "NOT OK" if isinstance(error, RollCallError) else "could not be verified"
        click.echo(f"lockstep: {error}\nverdict: {verdict}", err=True)
        sys.exit(getattr(error, "exit_code", ConfigError.exit_code))
    for line in lines:
        click.echo(line)


if __name__ == "__main__":
    main(prog_name="python -m lockstep.ray")
