"""Samples: what is taken for an image, a text or a table, where it is kept, and who is sent it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # torch's first optimizer imports it, and it sets an environment variable
from own_loggers import Memory
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.record import samples

Runs = Callable[..., Run]
RNG = np.random.default_rng(0)
DATA = TensorDataset(torch.arange(20.0).reshape(20, 1))


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    Memory.forget()


def pixels(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def with_album(**more: Any) -> dict[str, Any]:
    return {"log": {"every": "1 step", "timeout": 5.0, "mine": {"type": "own_loggers:Album"}, **more}}


# Images


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (5, 7), (40, 2)])
def test_a_png_is_read_by_others_as_it_was_written(channels: int, height: int, width: int) -> None:
    given = pixels(height, width, channels)
    read = np.asarray(Image.open(io.BytesIO(samples.encoded_png(given))))
    assert np.array_equal(read.reshape(height, width, channels), given)


RED = np.zeros((5, 6, 3), np.uint8)
RED[..., 0] = 255
IMAGES = {
    "array, channels last": RED,
    "array, channels first": RED.transpose(2, 0, 1),
    "tensor, channels first": torch.from_numpy(RED).permute(2, 0, 1),
    "tensor, channels last": torch.from_numpy(RED),
    "floats": torch.from_numpy(RED).permute(2, 0, 1) / 255,
    "bfloat16 with gradients": (torch.from_numpy(RED).permute(2, 0, 1) / 255).bfloat16().requires_grad_(),
    "double array": RED / 255.0,
    "rounded": RED / 255.0 * 1.0000001 - 1e-8,
    "of PIL's": Image.fromarray(RED),
    "of PIL's, by a palette": Image.fromarray(RED).convert("P"),
}


@pytest.mark.parametrize("given", IMAGES.values(), ids=IMAGES)
def test_every_kind_of_image_is_the_same_picture(given: Any) -> None:
    assert np.array_equal(samples.image(given, "x"), RED)


def test_gray_images_and_masks() -> None:
    gray = pixels(4, 6)
    assert np.array_equal(samples.image(gray, "x"), gray[:, :, None])
    assert np.array_equal(samples.image(torch.from_numpy(gray)[None], "x"), gray[:, :, None])
    assert np.array_equal(samples.image(gray > 100, "x")[:, :, 0], (gray > 100) * np.uint8(255))


def test_where_both_ends_may_be_channels_a_tensor_has_them_first_and_an_array_last() -> None:
    given = pixels(3, 5, 3)
    assert np.array_equal(samples.image(given, "x"), given)
    assert np.array_equal(samples.image(torch.from_numpy(given), "x"), given.transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.zeros(2, 3, 4, 4), r"got shape \[2, 3, 4, 4\]; log one image at a time, or .*make_grid"),
        (torch.zeros(7), r"got shape \[7\]"),
        (torch.zeros(3, 0, 4), r"got shape \[3, 0, 4\]"),
        (torch.zeros(5, 4, 6), r"1, 3 or 4 channels, first or last; got shape \[5, 4, 6\]"),
        (torch.full((3, 4, 4), 255.0), "go from 0 to 1, got 255 to 255: undo the normalization"),
        (torch.full((3, 4, 4), -0.5), "got -0.5 to -0.5"),
        (torch.full((3, 4, 4), torch.nan), "got nan to nan"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), r"uint8, or floats from 0 to 1; got int64"),
        ([[1, 2]], "a tensor, a numpy array or an image of PIL's, got list"),
        ("cat.png", "got str"),
    ],
)
def test_what_is_no_image_is_refused_with_what_was_given(new_run: Runs, given: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"run\.log_image\('x'\) at step 0: .*{expected}"):
        new_run().log_image("x", given)


def test_what_is_no_text_or_table_is_refused(new_run: Runs) -> None:
    run = new_run()
    with pytest.raises(ConfigError, match=r"a text is a str, got Tensor of shape .* decode tokens first"):
        run.log_text("x", torch.zeros(3))  # type: ignore[arg-type]
    for columns, rows, expected in [
        ("ab", [], "columns is a list of names, got 'ab'"),
        ([], [], "columns is a list of names"),
        (["a", "a"], [], "has a name twice"),
        (["a", "b"], [[1, 2], [3]], r"row 1 is not a list of 2 cells \(a, b\), got \[3\]"),
        (["a"], [[torch.zeros(2)]], r"row 0, column a: a cell is .* got Tensor of shape \[2\]"),
        (["a"], [[object()]], "got object"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            run.log_table("x", columns, rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "../x", "/x", "a//b", ".hidden", "a/../b", "a\nb", "x" * 300, 3])
def test_a_name_that_no_file_may_have_is_refused(new_run: Runs, name: Any) -> None:
    with pytest.raises(ConfigError, match="becomes the name of a file; got"):
        new_run().log_text(name, "x")


# Kept and sent


def test_samples_are_kept_in_the_runs_folder_and_sent_to_who_can_show_them(new_run: Runs, tmp_path: Path) -> None:
    run = new_run(**with_album())
    run.log_image("val/first picture", RED)
    run.log_text("story", "once upon a time ☃")
    run.log_table("answers", ["question", "right", "score"], [["1+1", True, torch.tensor(0.5)], ["?", None, np.nan]])
    run._engine.finish()
    there = tmp_path / "samples" / "step-00000000"
    assert np.array_equal(np.asarray(Image.open(there / "val" / "first picture.png")), RED)
    assert (there / "story.txt").read_text(encoding="utf-8") == "once upon a time ☃"
    table = json.loads((there / "answers.json").read_text())
    assert table == {"columns": ["question", "right", "score"], "rows": [["1+1", True, 0.5], ["?", None, None]]}
    sent = [call[1:4] for call in Memory.calls if call[0] == "sample"]
    assert sent == [(0, "image", "val/first picture"), (0, "text", "story"), (0, "table", "answers")]


def test_tensorboard_takes_all_of_them(new_run: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = new_run(log={"tensorboard": True, "timeout": 60.0})
    for channels in (1, 3, 4):
        run.log_image(f"of {channels}", pixels(4, 6, channels))
    run.log_text("story", "once")
    run.log_table("answers", ["question", "answer"], [["a|b", 2]])
    run._engine.finish()
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["images"]) == {"of 1", "of 3", "of 4"}
    assert {each.partition("/")[0] for each in events.Tags()["tensors"]} == {"story", "answers", "config"}


def test_a_logger_that_takes_none_is_told_of_once(new_run: Runs, caplog: pytest.LogCaptureFixture) -> None:
    run = new_run(log={"mine": {"type": "own_loggers:Memory"}})
    run.log_text("a", "x")
    run.log_text("b", "x")
    told = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert told == ["log.mine: takes no samples (it has no log_sample): they are in the run's folder alone"]


def train(run: Run, stop_at: int | None = None) -> None:
    """A sample in every second step, in the midst of a batch of two micro-batches; one after every epoch."""
    model = nn.Linear(1, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    run.restore()
    for epoch in run.epochs(2):
        for (batch,) in run.batches(DATA, 4, accumulate=2):
            loss = run.model(batch).square().mean()
            if run.progress.step % 2:
                run.log_text("inside", f"loss {loss.item()}")
            run.backward(loss)
            if run.step() and run.progress.step == 3:
                run.checkpoint()
            if run.progress.step == stop_at:
                return
        run.log_text("after", f"epoch {epoch}")
    run._engine.finish()


def kept(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in sorted(folder.rglob("*.txt"))}


def test_from_within_a_step_and_between_two_and_not_twice_after_a_resume(new_run: Runs, tmp_path: Path) -> None:
    train(new_run(**with_album()))
    expected, sent = kept(tmp_path / "samples"), [call[1:] for call in Memory.calls if call[0] == "sample"]
    inside, after = (
        {f"step-{step:08d}/inside.txt" for step in (2, 4, 6, 8, 10)},
        {"step-00000005/after.txt", "step-00000010/after.txt"},
    )
    assert expected.keys() == inside | after
    assert len(sent) == len(expected)  # one of every step, not one of every micro-batch
    for each in ("samples", "checkpoints", "metrics.jsonl", "loggers"):
        (tmp_path / each).rename(tmp_path / f"{each}-before")
    Memory.forget()
    killed = new_run(**with_album())
    train(killed, stop_at=7)
    killed._engine.aggregator.close("as if killed")
    (tmp_path / "samples" / "step-00000007").mkdir()  # of a step that is not made any more
    train(new_run(**with_album()))
    assert kept(tmp_path / "samples") == expected
    assert not (tmp_path / "samples" / "step-00000007").exists()
    assert [call[1:] for call in Memory.calls if call[0] == "sample"] == sent
