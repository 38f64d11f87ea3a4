"""`train.deterministic`: the same numbers whenever the same run is repeated on the same kind of device."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import torch

from lockstep.config.schema import RunSettings
from lockstep.errors import ConfigError

# Read by cuBLAS when it is first used, and by torch.compile, which then chooses no kernel by how long it takes.
_VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}


@contextlib.contextmanager
def arithmetic(settings: RunSettings, family: str) -> Iterator[None]:
    """Computes with as many CPU threads as `launch.threads` says, and deterministically if asked to."""
    before, threads = torch.get_num_threads(), settings.launch.threads if family != "xla" else None
    torch.set_num_threads(threads or before)
    try:
        with deterministic(family) if settings.train.is_deterministic else contextlib.nullcontext():
            yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def deterministic(family: str) -> Iterator[None]:
    """Lets torch use deterministic algorithms only, inside the block."""
    before = torch.are_deterministic_algorithms_enabled()
    cudnn, fill = torch.backends.cudnn, torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    was = cudnn.benchmark, cudnn.deterministic
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update({name: value for name, value in _VARIABLES.items() if name not in os.environ})
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        with _attention() if family == "cuda" else contextlib.nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        cudnn.benchmark, cudnn.deterministic = was
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def start_cublas() -> None:
    """Has cuBLAS and torch read their variable now, on this process's GPU, and takes it away: torch parses it again for
    every matrix product, for 0.2 ms each.

    This thread and autograd's each make their first product here. From then on torch gives cuBLAS a workspace of its
    usual size, which is a fixed one too.
    """
    ones = torch.ones(8, 8, device="cuda", requires_grad=True)
    (ones @ ones).sum().backward()  # type: ignore[no-untyped-call]
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@contextlib.contextmanager
def _attention() -> Iterator[None]:
    """Leaves the attention kernels whose backward pass is deterministic: flash, and plain matrix products."""
    cuda = torch.backends.cuda
    before = cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    cuda.enable_mem_efficient_sdp(False)
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_mem_efficient_sdp(before[0])
        cuda.enable_cudnn_sdp(before[1])


def explained(error: BaseException) -> ConfigError | None:
    """Returns what torch's error about an operation without a deterministic form means to the user."""
    found = re.search(r"(\S+) does not have a deterministic implementation", str(error))
    if found is None or not isinstance(error, RuntimeError):
        return None
    return ConfigError(
        f"train.deterministic: {found[1]} has no deterministic form on this device. Use another operation in its "
        "place (the traceback in the rank's log has the line), or leave train.deterministic and train.exact out"
    )
