"""Devices by name: what a plan is made for."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.planner.devices import known, target


def test_a_target_is_a_name_and_a_number() -> None:
    found = target("H200x16")
    assert (found.name, found.count, found.hosts, found.title) == ("h200", 16, 2, "h200x16")
    assert target("a100-80g").count == 1
    assert found.device.memory == pytest.approx(139.8)
    card = target("rtx4090x2")
    assert (card.name, card.count, target("RTX4090").title) == ("rtx4090", 2, "rtx4090x1")


@pytest.mark.parametrize("name", known())
def test_every_device_has_all_its_figures_and_their_source(name: str) -> None:
    each = known()[name]
    assert each.source and each.peak.get("float32", 0) <= max(each.peak.values())
    assert 1 < each.memory < 300 and 100 <= each.bandwidth <= 10_000
    if each.vendor == "nvidia":
        assert target(f"{name}x{each.per_host}").hosts == 1 and "float32" in each.peak


def test_devices_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine: {memory: 48, peak: {bf16: 100}, bandwidth: 500, link: 64, network: 3, per_host: 2}\n")
    assert target("minex3", file).hosts == 2
    file.write_text("mine: {memory: -1, peak: {bf16: 100}, bandwidth: 500, link: 64, network: 3, per_host: 2}\n")
    with pytest.raises(ConfigError, match=r"mine\.memory: input should be greater than 0, got -1"):
        target("mine", file)
    with pytest.raises(ConfigError, match="cannot be read"):
        target("mine", tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h20x8", "no device 'h20' is known, did you mean"),
        ("h200x0", "a plan is for one device at least"),
        ("v4-31", "did you mean v4-32"),
    ],
)
def test_what_cannot_be_a_target(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        target(text)
