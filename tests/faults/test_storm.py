"""A minute of storm; `make storm MINUTES=10` is the same for longer, from another seed each time."""

from __future__ import annotations

from pathlib import Path

import pytest
from storm import Storm

SEED, MINUTES = 12, 0.5


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes left behind are found by /proc")
def test_whatever_happens_to_runs_they_end_as_if_nothing_had(tmp_path: Path) -> None:
    storm = Storm(SEED, (2, 3), tmp_path)
    storm.rage(MINUTES)
    assert storm.starts > storm.episodes > 0
