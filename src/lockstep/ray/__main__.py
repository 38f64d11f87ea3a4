"""`python -m lockstep.ray --workers 2 --backend gloo`: proves that every worker has its own device."""

from __future__ import annotations

import sys
import tempfile
from typing import TYPE_CHECKING, Any

import click

from lockstep.errors import ConfigError, LockstepError, RollCallError

if TYPE_CHECKING:
    from lockstep.config.schema import RayCluster

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

        settings = validate(RayCluster, cluster, {}, "python -m lockstep.ray")
        resources = {"CPU": 1.0, **({"GPU": gpus} if gpus else {}), **({"TPU": tpus} if tpus else {})}
        lines = verify(workers, backend, settings, resources, timeout)
    except (LockstepError, ImportError) as error:
        verdict = "NOT OK" if isinstance(error, RollCallError) else "could not be verified"
        click.echo(f"lockstep: {error}\nverdict: {verdict}", err=True)
        sys.exit(getattr(error, "exit_code", ConfigError.exit_code))
    for line in lines:
        click.echo(line)


def verify(
    workers: int, backend: str, settings: RayCluster, resources: dict[str, float], join_timeout: float, **config: Any
) -> list[str]:
    """Returns a line per worker and the verdict; raises what the roll call found. `config` is of TorchConfig."""
    import ray
    from ray.train import RunConfig
    from ray.train.torch import TorchTrainer

    from lockstep.ray import placement
    from lockstep.ray.backend import TorchConfig
    from lockstep.ray.cluster import connected
    from lockstep.ray.failures import cause_of
    from lockstep.ray.worker import ANSWER_SECONDS, Mailbox

    with tempfile.TemporaryDirectory(prefix="lockstep-ray-") as storage, connected(settings, workers, resources, {}):
        placement.find(settings, workers, resources)
        mailbox = ray.remote(num_cpus=0)(Mailbox).remote()
        trainer = TorchTrainer(
            _tell_reports,
            train_loop_config={"mailbox": mailbox},
            scaling_config=placement.scaling(settings, workers, resources),
            torch_config=TorchConfig(backend=backend, join_timeout_s=join_timeout, **config),
            run_config=RunConfig(name="verification", storage_path=storage),
        )
        try:
            trainer.fit()
        except Exception as error:
            raise cause_of(error) from None
        reports = ray.get(mailbox.take_facts.remote(), timeout=ANSWER_SECONDS)[0]["reports"]
    devices = len({each.physical_device for each in reports})
    lines = [
        f"worker rank {each.rank}: node {each.host}, device {each.device}, physical device {each.physical_device}, ok"
        for each in reports
    ]
    verdict = f"{len(reports)} workers on {devices} devices, none shared, and a sum over all of them is right"
    return [*lines, f"verdict: OK, {verdict}"]


def _tell_reports(config: dict[str, Any]) -> None:
    """Runs on every worker."""
    import ray

    from lockstep.ray.session import current
    from lockstep.ray.worker import ANSWER_SECONDS

    present = current().present
    if present.group.rank == 0:
        ray.get(config["mailbox"].tell.remote(0, [], {"reports": present.reports}), timeout=ANSWER_SECONDS)


if __name__ == "__main__":
    main(prog_name="python -m lockstep.ray")
