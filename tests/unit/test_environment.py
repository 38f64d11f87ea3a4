"""Variables that are set for a while."""

from __future__ import annotations

import os

import pytest

from lockstep.runtime import with_variables


def test_afterwards_the_variables_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_KNOWN", "before")
    monkeypatch.delenv("LOCKSTEP_TEST_NEW", raising=False)
    with (
        pytest.raises(ValueError, match="inside"),
        with_variables({"LOCKSTEP_TEST_KNOWN": "while", "LOCKSTEP_TEST_NEW": "while"}),
    ):
        assert (os.environ["LOCKSTEP_TEST_KNOWN"], os.environ["LOCKSTEP_TEST_NEW"]) == ("while", "while")
        raise ValueError("inside")
    assert os.environ["LOCKSTEP_TEST_KNOWN"] == "before"
    assert "LOCKSTEP_TEST_NEW" not in os.environ
