"""Compiled code is kept in a folder of the user's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.strategy.compiled import keep_compiled_code

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # taken back after the test, whatever it sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_in_the_users_cache_where_nothing_was_said(home: Path) -> None:
    keep_compiled_code(None)
    folder = home / "cache" / "lockstep" / "compiled"
    assert [os.environ[name] for name in NAMES] == [str(folder), str(folder / "triton")]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_where_the_environment_says_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMES[0], "/elsewhere")
    keep_compiled_code(None)
    assert os.environ[NAMES[0]] == "/elsewhere" and NAMES[1] not in os.environ


def test_a_folder_that_was_asked_for_comes_before_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMES[0], "/elsewhere")
    monkeypatch.setenv(NAMES[1], "/kernels")
    keep_compiled_code(str(home / "mine"))
    assert [os.environ[name] for name in NAMES] == [str(home / "mine"), "/kernels"]


def test_a_folder_that_others_may_write_to_is_refused(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_to_all = home / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(ConfigError, match=r"train\.compile\.cache: .*open: others may write to it"):
        keep_compiled_code(str(open_to_all))
    default = home / "cache" / "lockstep" / "compiled"
    default.mkdir(parents=True)
    default.chmod(0o777)
    caplog.set_level("INFO")
    keep_compiled_code(None)
    assert "others may write to it" in caplog.text and NAMES[0] not in os.environ


def test_a_file_in_the_way_is_told(home: Path) -> None:
    (home / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file: (File exists|it is not a folder)"):
        keep_compiled_code(str(home / "file"))
    with pytest.raises(ConfigError, match="Not a directory"):
        keep_compiled_code(str(home / "file" / "below"))


def test_the_home_of_a_user_who_is_not_there_is_refused_and_a_process_without_a_home_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"train\.compile\.cache: ~nobody-at-all/x: there is no home folder"):
        keep_compiled_code("~nobody-at-all/x")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", no_home)
    caplog.set_level("INFO")
    keep_compiled_code(None)
    assert "compiled code is not kept: Could not determine home directory." in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(home: Path) -> None:
    theirs = home / "theirs"
    theirs.mkdir()
    os.chown(theirs, 54321, 54321)
    with pytest.raises(ConfigError, match=r"belongs to another user \(number 54321\)"):
        keep_compiled_code(str(theirs))
