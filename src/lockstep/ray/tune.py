"""`lockstep train --sweep`: trials of a config on a cluster, by Ray Tune, and the best of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import BasicVariantGenerator

from lockstep.config.load import with_values
from lockstep.config.schema import RunConfig
from lockstep.config.sweep import Axis, Sweep
from lockstep.distributed.signals import Signals
from lockstep.errors import INTERRUPTED_EXIT_CODE, ConfigError, WorkerFailed
from lockstep.ray import placement
from lockstep.ray.cluster import Cluster, connected, environment
from lockstep.ray.controller import BackgroundFit, Folder, resolved, say, train_on
from lockstep.record import folder_lock, run_folder
from lockstep.record.trials import Trial, conclude, trial_folder

# A trial's process only waits for its workers, which have what they need.
_TRIAL_RESOURCES = {"memory": 1024 * 1024}


def sweep_over(config: RunConfig, sweep: Sweep, folder: Path) -> int:
    """Runs all trials, shows their results and keeps the best config; returns the exit code."""
    signals = Signals(save_on_request=False)
    config, env, task = resolved(config)
    resources, workers = placement.per_worker(config), int(config.processes) * (sweep.concurrency or 1)
    settings = config.launch.ray
    with signals.listening(), connected(settings, workers, resources, env) as cluster, signals.listening():
        placement.find(settings, workers, resources)
        fit = BackgroundFit(_tuner(config, sweep, folder, task, cluster))
        while not fit.wait(0.2) and not signals.count:
            pass
        if signals.count:
            say(f"{signals.name}: ending all trials; what they saved is in {folder}")
            return INTERRUPTED_EXIT_CODE
    if fit.error is not None:
        raise _explained(fit.error, sweep)
    return conclude([_trial(result, sweep, folder) for result in fit.result], sweep, folder, say)


def _tuner(config: RunConfig, sweep: Sweep, folder: Path, task: str, cluster: Cluster) -> tune.Tuner:
    place = folder.resolve()

    def trial(values: dict[str, Any]) -> None:
        _run_trial(config, values, place, task, cluster)

    return tune.Tuner(
        tune.with_resources(trial, tune.PlacementGroupFactory([_TRIAL_RESOURCES])),
        param_space={name: _domain(axis) for name, axis in sweep.space.items()},
        tune_config=tune.TuneConfig(
            metric=sweep.metric,
            mode=sweep.mode,
            num_samples=sweep.samples,
            scheduler=_scheduler(config, sweep),
            search_alg=BasicVariantGenerator(max_concurrent=sweep.concurrency or 1, random_state=sweep.seed),
        ),
        run_config=tune.RunConfig(name="tune", storage_path=str(place), verbose=1),
    )


def _scheduler(config: RunConfig, sweep: Sweep) -> ASHAScheduler | None:
    prune = sweep.prune
    if prune is None:
        return None
    # One more than there are: a trial that gets that far ends by itself.
    most = (prune.most or config.train.epoch_limit or 1_000_000) + 1
    return ASHAScheduler("epoch", max_t=most, grace_period=prune.grace, reduction_factor=prune.reduction)


def _domain(axis: Axis) -> Any:
    if axis.grid is not None:
        return tune.grid_search(axis.grid)
    return getattr(tune, axis.kind)(*([axis.choice] if axis.choice is not None else axis.values_of_range()))


def _run_trial(config: RunConfig, values: Mapping[str, Any], folder: Path, task: str, cluster: Cluster) -> None:
    """Runs in a trial's process: one run, which reports its validations to Tune."""
    number = int(tune.get_context().get_trial_id().rpartition("_")[2])
    run = folder / trial_folder(number)

    def make_folder(chosen: RunConfig) -> Folder:
        run_folder.write_config(run, chosen)
        return Folder(run)

    config = with_values(config, values)
    (run / "logs").mkdir(parents=True)
    with environment(config.launch.ray), folder_lock.locked(run):
        signals = Signals(save_on_request=False)
        config, _, result = train_on(cluster, config, task, make_folder, signals, [TuneReportCallback()])
    failure = result.failure
    if failure is not None:
        run_folder.record(run, "failed", failure.cause)
        raise WorkerFailed(failure.rank, failure.host, failure.render(int(config.processes)), failure.exit_code)


def _trial(result: Any, sweep: Sweep, folder: Path) -> Trial:
    number = _number(result.metrics["trial_id"])
    run, metric = folder / trial_folder(number), result.metrics.get(sweep.metric)
    summary = run_folder.read_summary(run)
    ended = str(summary["status"]) if run_folder.has_ended_before(summary) else "pruned"
    status = "failed" if result.error is not None else ended
    if status == "pruned":
        run_folder.record(run, status, f"by the sweep, at epoch {result.metrics.get('epoch')}")
    cause = str(summary.get("reason") or result.error or "") if status == "failed" else ""
    values = dict(result.config or {})
    return Trial(number, values, status, result.metrics.get("epoch"), metric, cause.strip().split("\n")[0])


def _explained(error: Exception, sweep: Sweep) -> Exception:
    if "metric" in str(error) and sweep.metric in str(error):
        return ConfigError(f"sweep: metric: {sweep.metric!r} is not among what the trials measure: {error}")
    return error


def _number(trial_id: str) -> int:
    return int(trial_id.rpartition("_")[2])
