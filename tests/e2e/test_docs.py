"""Every command and snippet of the documentation works as it stands there."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from conftest import ROOT, wait_until
from lockstep.config.load import load
from lockstep.config.schema import RunConfig
from pages import blocks, run_page
from ray_cluster import SETTINGS
from slurm_cluster import SlurmCluster

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which `lockstep` and `python` are those under test."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, command in {"lockstep": f'"{sys.executable}" -m lockstep', "python": f'"{sys.executable}"'}.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        script.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}


ON_RAY = sorted((ROOT / "docs").glob("ray*.md"))
ON_SLURM = ROOT / "docs" / "slurm.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"  # test_install.py follows it, with what it has installed
RUNNABLE = [page for page in PAGES if blocks(page, "sh", "python") and page not in (*ON_RAY, ON_SLURM, TUTORIAL)]


# Pages whose every command has a shorter test elsewhere, with the same packages.
LONG = (
    "afterwards.md", "checkpoints.md", "coming-from.md", "data.md", "index.md", "lightning.md", "logging.md",
    "parity.md", "planning.md", "pretrained.md", "report.md", "run.md", "runs.md", "tasks.md",
)  # fmt: skip


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.long if page.name in LONG else ()) for page in RUNNABLE],
    ids=[page.name for page in RUNNABLE],
)
def test_commands_and_snippets_run_in_order(page: Path, tmp_path: Path, shell: dict[str, str]) -> None:
    run_page(page, tmp_path, shell)


# A cluster that asks for a token, which a process that has imported Ray without one could not start any more.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "object_store_memory": 100_000_000,
                                                        "include_dashboard": False})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """What the environment of a command says of a cluster of our own: its address, and its token."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'lockstep-train[ray]'")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    running = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env={**os.environ, **SETTINGS, **token}, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with running:
        assert running.stdout is not None
        yield {**token, "RAY_ADDRESS": running.stdout.readline().strip()}


@pytest.mark.long
@pytest.mark.parametrize("page", ON_RAY, ids=[page.name for page in ON_RAY])
def test_commands_and_snippets_about_ray_run_on_a_cluster(
    page: Path, cluster: dict[str, str], tmp_path: Path, shell: dict[str, str]
) -> None:
    run_page(page, tmp_path, {**shell, **cluster})


@pytest.mark.long
def test_commands_about_slurm_run_on_a_cluster(tmp_path: Path, shell: dict[str, str], slurm: SlurmCluster) -> None:
    own = shell["PATH"]
    run_page(ON_SLURM, tmp_path, {**shell, **slurm.env, "PATH": f"{own}:{slurm.env['PATH']}"})
    wait_until(lambda: not slurm.command("squeue", "-h").strip(), 120, "the end of all jobs")
    summaries = [json.loads(each.read_text()) for each in tmp_path.glob("runs/**/summary.json")]
    assert [each["status"] for each in summaries] == ["completed"] * 4, summaries


def test_the_readmes_task_trains_with_the_readmes_config(tmp_path: Path, shell: dict[str, str]) -> None:
    ((_, task),) = blocks(ROOT / "README.md", "python")
    ((_, config),) = blocks(ROOT / "README.md", "yaml")
    (tmp_path / "shapes.py").write_text(task)
    (tmp_path / "config.yaml").write_text(config)
    assert load(tmp_path / "config.yaml").processes == 2
    finished = subprocess.run(
        ["lockstep", "train", "config.yaml"], cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_every_config_of_training_trains(tmp_path: Path, shell: dict[str, str], compiled: bool) -> None:
    """In one process, one after the other: with the task that `lockstep init` writes."""
    configs = [yaml.safe_load(text) for _, text in blocks(ROOT / "docs" / "training.md", "yaml")]
    configs = [each for each in configs if ("compile" in each.get("train", {})) is compiled]
    (tmp_path / "all.json").write_text(json.dumps(configs))
    (tmp_path / "each.py").write_text(
        "import json, lockstep\n"
        "if __name__ == '__main__':\n"
        "    for each in json.load(open('all.json')):\n"
        "        train = {'epochs': None, 'steps': 5, **each.pop('train', {})}\n"
        "        config = {'task': 'start/task.py:MyTask', 'data': {'split': {'train': 0.9, 'val': 0.1}}, **each}\n"
        "        train.update({'steps': None} if train['epochs'] else {})\n"
        "        assert lockstep.train({'processes': 1, **config, 'train': train})['status'] == 'completed', each\n"
    )
    finished = subprocess.run(
        ["bash", "-euc", "lockstep init start && python each.py"],
        cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_the_loops_side_by_side_are_those_of_the_examples() -> None:
    """The README shows them shortened; what it shows of `run.` must be what the example does."""
    _, ours = (text for _, text in blocks(ROOT / "README.md", "py"))
    example = (ROOT / "examples" / "own_loop.py").read_text()
    calls = re.findall(r"run\.\w+", ours)
    assert calls == [call for call in re.findall(r"run\.\w+", example) if call in set(calls)]
    assert "lockstep.launch(main, processes=2)" in example


def test_every_key_of_the_config_is_documented() -> None:
    listed = {
        re.sub(r"\[\]", "", name)
        for name in re.findall(r"^\| `([\w.\[\]]+)` \|", (ROOT / "docs" / "config.md").read_text(), re.M)
    }
    schema = RunConfig.model_json_schema(by_alias=True)
    assert listed == set(keys(schema, schema, ""))


def keys(schema: dict, node: dict, path: str) -> list[str]:  # type: ignore[type-arg]
    """The leaves of the config, by their path."""
    kinds = [kind for option in [node, *node.get("anyOf", [])] for kind in option.get("oneOf", [])]
    if kinds:  # two kinds of mapping, or a value that may also be a mapping: `compile: true`
        short = [path] if any("$ref" not in kind for kind in kinds) else []
        return [*short, *(leaf for kind in kinds if "$ref" in kind for leaf in keys(schema, kind, path))]
    for option in [node, *node.get("anyOf", []), *node.get("allOf", []), node.get("items", {})]:
        if "$ref" in option:
            return keys(schema, schema["$defs"][option["$ref"].rsplit("/", 1)[1]], path)
    for option in [node, *node.get("anyOf", [])]:
        if "items" in option and "$ref" in option["items"]:
            return keys(schema, option["items"], path)
    if "properties" not in node:
        return [path]
    return [
        leaf for name, each in node["properties"].items() for leaf in keys(schema, each, f"{path}.{name}".lstrip("."))
    ]


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "examples" / "README.md", ROOT / "benchmarks" / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_yaml_in_the_pages_is_valid() -> None:
    for page in PAGES:
        for _, text in blocks(page, "yaml"):
            assert isinstance(yaml.safe_load(text), dict)


def test_make_offers_what_the_readme_says() -> None:
    for target in ("train", "test", "faults", "verify", "lint", "bench", "docs", "dist", "release-notes"):
        shown = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=30)
        assert shown.returncode == 0, shown.stderr
