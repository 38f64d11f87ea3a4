"""Which failure is the cause, what the user reads of it, and whether another attempt makes sense."""

from __future__ import annotations

from types import TracebackType

import pytest

from lockstep.config.objects import construct
from lockstep.distributed.failure import (
    Failure,
    Report,
    describe_exit,
    find_cause,
    report,
    user_traceback,
    worth_retrying,
)
from lockstep.errors import (
    CheckpointError,
    ConfigError,
    LaunchError,
    LockstepError,
    NonFiniteLoss,
    PeerLost,
    RankAbsent,
    RankMissing,
    RankZeroFailed,
    TopologyError,
    WorkerFailed,
)


def said(
    rank: int, time: float, message: str = "ValueError: wrong", consequence: bool = False, code: int = 5
) -> Report:
    return Report(rank, "box", message.split(":")[0], message, code, time, consequence=consequence)


def lost(rank: int, time: float) -> Report:
    return said(rank, time, "PeerLost: lost the connection to another rank", consequence=True)


@pytest.mark.requirement("D18")
@pytest.mark.parametrize(
    ("reports", "exit_codes", "rank", "cause"),
    [
        pytest.param([said(1, 5.0)], {1: 1}, 1, "ValueError: wrong", id="the only one"),
        pytest.param([said(0, 6.0), said(2, 5.0)], {0: 1, 2: 1}, 2, "ValueError: wrong", id="the earliest"),
        pytest.param([lost(0, 4.0), said(2, 5.0)], {0: 1, 2: 1}, 2, "ValueError: wrong", id="not a consequence"),
        pytest.param(
            [lost(0, 4.0), said(2, 5.0), said(1, 6.0, "KeyError: x"), lost(3, 3.0)],
            {0: 1, 1: 1, 2: 1, 3: 1},
            2,
            "ValueError: wrong",
            id="the earliest of those that are no consequence",
        ),
        pytest.param([lost(0, 4.0), lost(2, 5.0)], {0: 1, 1: -9, 2: 1}, 1, "killed by SIGKILL", id="a killed rank"),
        pytest.param(
            [lost(0, 4.0)], {0: 1, 1: 0}, 1, "the process left without finishing its work", id="silent exit 0"
        ),
        pytest.param([lost(0, 4.0)], {0: 1, 1: 3}, 1, "exit code 3", id="silent exit 3"),
        pytest.param([], {1: -11}, 1, "killed by SIGSEGV", id="no report at all"),
        pytest.param([said(1, 5.0)], {0: -15, 1: 1}, 1, "ValueError: wrong", id="a report before a silent rank"),
        pytest.param([lost(1, 5.0), lost(0, 4.0)], {0: 1, 1: 1}, 0, "PeerLost", id="consequences alone: the earliest"),
        pytest.param([], {}, 0, "the run ended and no rank said why", id="nobody said anything"),
    ],
)
def test_the_cause_is_found(reports: list[Report], exit_codes: dict[int, int], rank: int, cause: str) -> None:
    failure = find_cause(reports, exit_codes, "box")
    assert failure.rank == rank
    assert failure.cause.startswith(cause)
    assert failure.host == "box"
    assert rank not in failure.followers


def test_the_exit_code_is_that_of_the_cause() -> None:
    assert (
        find_cause([said(0, 2.0, code=5), said(1, 1.0, "ConfigError: x", code=2)], {0: 1, 1: 1}, "box").exit_code == 2
    )
    assert find_cause([lost(0, 1.0)], {0: 1, 1: -9}, "box").exit_code == 5


def test_the_others_are_told_in_a_line_each() -> None:
    failure = find_cause([said(2, 1.0), lost(0, 2.0)], {0: 1, 1: -15, 2: 1}, "box")
    assert failure.render(3).splitlines() == [
        "rank 2 of 3 on box failed: ValueError: wrong",
        "rank 0: PeerLost: lost the connection to another rank",
        "rank 1: killed by SIGTERM, exit code -15",
    ]


def test_the_same_words_of_several_ranks_are_folded_into_one_line() -> None:
    killed = find_cause([lost(0, 1.0), lost(2, 1.1), lost(3, 1.2)], {0: 1, 1: -9, 2: 1, 3: 1}, "box")
    assert killed.render(4).splitlines()[1:] == ["ranks 0, 2, 3: PeerLost: lost the connection to another rank"]
    everywhere = find_cause([said(rank, float(rank)) for rank in range(4)], dict.fromkeys(range(4), 1), "box")
    assert everywhere.render(4).splitlines() == [
        "rank 0 of 4 on box failed: ValueError: wrong",
        "ranks 1, 2, 3: the same",
    ]


def test_of_a_follower_only_the_first_line_is_told() -> None:
    failure = find_cause([said(0, 1.0), said(1, 2.0, "KeyError: x\nand more")], {0: 1, 1: 1}, "box")
    assert failure.followers == {1: "KeyError: x"}


def test_an_abort_that_cost_others_their_connection_may_be_of_ranks_in_different_layers() -> None:
    assert "different layers" in find_cause([lost(1, 1.0)], {0: -6, 1: 5}, "box").cause
    assert find_cause([], {0: -6}, "box").cause == "killed by SIGABRT, exit code -6"


def test_the_traceback_stands_below_the_headline() -> None:
    rendered = Failure(1, "box", "ValueError: wrong", 5, traceback="Traceback:\n  line\n").render(2)
    assert rendered.split("\n") == ["rank 1 of 2 on box failed: ValueError: wrong", "", "  Traceback:", "    line", ""]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "killed by SIGKILL (out of memory? see the kernel log), exit code -9"),
        (-15, "killed by SIGTERM, exit code -15"),
        (-11, "killed by SIGSEGV, exit code -11"),
        (-200, "killed by signal 200, exit code -200"),
        (0, "the process left without finishing its work (exit code 0): something called os._exit or sys.exit"),
        (3, "exit code 3"),
    ],
)
def test_an_exit_code_is_told_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure(0, "box", "ValueError: chance?", 5, "ValueError"), True),
        (Failure(0, "box", "killed by SIGKILL", 5), True),
        (Failure(0, "box", "waited", 4, "RankMissing"), True),
        (Failure(0, "box", "the disk is full", 5, "CheckpointError"), True),
        (Failure(0, "box", "train.batch_size", 2, "ConfigError"), False),
        (Failure(0, "box", "port in use", 2, "LaunchError"), False),
        (Failure(0, "box", "the loss is nan", 5, "NonFiniteLoss"), False),
    ],
)
def test_what_would_only_happen_again_is_not_tried_again(failure: Failure, expected: bool) -> None:
    assert worth_retrying(failure) is expected


# What a rank writes down


def caught(error: Exception) -> Exception:
    try:
        raise error
    except Exception as raised:
        return raised


@pytest.mark.parametrize("error", [PeerLost("x"), RankZeroFailed("x"), RankMissing("x"), RankAbsent("x")])
def test_what_follows_from_another_rank_is_a_consequence(error: Exception) -> None:
    assert report(caught(error), 1, "box").consequence


@pytest.mark.parametrize("error", [ValueError("x"), ConfigError("x"), CheckpointError("x"), NonFiniteLoss(3, 1, 0.0)])
def test_what_happened_here_is_no_consequence(error: Exception) -> None:
    assert not report(caught(error), 1, "box").consequence


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:35012",
        "Application timeout caused pair closure: Connection reset by peer",
        "NCCL communicator was aborted on rank 1.",
    ],
)
def test_torch_saying_that_somebody_went_away_is_a_consequence(text: str) -> None:
    written = report(caught(RuntimeError(text)), 1, "box")
    assert written.consequence
    assert written.message == "lost the connection to another rank (RuntimeError)"


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(104, "Connection reset by peer"),
        OSError("https://bucket/data: Connection reset by peer"),
        BrokenPipeError(32, "Broken pipe"),
    ],
)
def test_a_connection_of_the_users_own_is_not_one_to_another_rank(error: Exception) -> None:
    """A dataset that downloads: its failure is the cause, and its traceback is what the user needs."""
    written = report(caught(error), 1, "box")
    assert not written.consequence
    assert written.traceback


def test_our_own_errors_need_no_traceback_and_keep_their_exit_code() -> None:
    written = report(caught(ConfigError("train.batch_size: 3 cannot be")), 1, "box")
    assert (written.message, written.traceback, written.exit_code) == ("train.batch_size: 3 cannot be", "", 2)


def test_an_error_of_the_users_comes_with_its_type_and_traceback() -> None:
    written = report(caught(ValueError("wrong")), 1, "box")
    assert (written.message, written.kind, written.exit_code) == ("ValueError: wrong", "ValueError", 5)
    assert "test_failure.py" in written.traceback


def test_a_full_disk_is_told_with_the_remedy_and_without_a_traceback() -> None:
    written = report(caught(OSError(28, "No space left on device", "runs/metrics.jsonl")), 0, "box")
    assert written.message.startswith("could not be written: [Errno 28] No space left on device: 'runs/metrics.jsonl'")
    assert "make room and resume" in written.message
    assert (written.traceback, written.consequence) == ("", False)


def test_a_full_disk_that_names_no_file_is_told_with_the_line_that_wrote() -> None:
    assert "test_failure.py" in report(caught(OSError(28, "No space left on device")), 0, "box").traceback


def test_an_error_without_words_is_told_by_its_type() -> None:
    assert "KeyboardInterrupt" in report(KeyboardInterrupt(), 0, "box").message


def test_a_message_of_megabytes_is_cut_in_its_middle() -> None:
    """What all ranks of a host report is one value in the store, which refuses more than 16 MB."""
    found = report(caught(ValueError(f"wrong: {'x' * 9_000_000} at the end")), 1, "box")
    for text in (found.message, found.traceback):
        assert len(text) < 25_000 and text.strip().endswith("at the end") and "characters are left out here" in text
    assert found.message.startswith("ValueError: wrong: ") and found.traceback.startswith("Traceback")


class Broken:
    def __init__(self) -> None:
        self.fail()

    def fail(self) -> None:
        raise ValueError("in the user's code")


def from_our_own_frame(error: BaseException) -> BaseException:
    """As seen by who called us: without the frames of this file that led to our code."""
    entry: TracebackType | None = error.__traceback__
    while entry is not None and entry.tb_frame.f_code.co_filename == __file__:
        entry = entry.tb_next
    return error.with_traceback(entry)


def test_a_traceback_begins_with_the_users_first_frame() -> None:
    with pytest.raises(ValueError, match="in the user's code") as raised:
        construct(Broken, {}, "task")
    error = from_our_own_frame(raised.value)
    assert error.__traceback__ is not None
    assert error.__traceback__.tb_frame.f_code.co_filename.endswith("lockstep/config/objects.py")
    text = "".join(user_traceback(error))
    assert "lockstep/config/objects.py" not in text
    assert text.index("in __init__") < text.index("in fail") < text.index("ValueError: in the user's code")


def test_a_traceback_without_a_frame_of_the_users_is_shown_whole() -> None:
    with pytest.raises(ConfigError) as raised:
        construct(Broken, {"unknown": 1}, "task")
    assert "lockstep/config/objects.py" in "".join(user_traceback(from_our_own_frame(raised.value)))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError, 2),
        (TopologyError, 2),
        (LaunchError, 2),
        (RankMissing, 4),
        (PeerLost, 5),
        (RankZeroFailed, 5),
        (CheckpointError, 5),
        (NonFiniteLoss, 5),
        (WorkerFailed, 5),
    ],
)
def test_every_error_has_the_exit_code_of_the_design(error: type[LockstepError], code: int) -> None:
    assert issubclass(error, LockstepError)
    assert error.exit_code == code


def test_a_loss_that_is_no_number_is_told_with_step_rank_and_remedy() -> None:
    text = str(NonFiniteLoss(step=7, rank=1, value=float("nan")))
    assert "the loss is nan at step 7 on rank 1" in text
    assert "train.clip_norm" in text
