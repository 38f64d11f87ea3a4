"""What tests of this folder do in a process of their own: `python bodies.py NAME` prints what it returned as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.config.schema import RunSettings
from lockstep.errors import LockstepError


def launched(main: Any, **settings: Any) -> list[Any]:
    folder = tempfile.mkdtemp()
    return lockstep.launch(main, out=folder, runtime="xla", xla={"device": "CPU"}, **settings)


def what_auto_is() -> Any:
    import os

    from lockstep import runtime

    return [runtime.resolve(RunSettings())[0], os.environ["PJRT_DEVICE"]]


def devices_of_a_mesh() -> Any:
    def main(run: Any) -> Any:
        import torch_xla

        model = nn.Linear(8, 8)
        run.setup(model, torch.optim.SGD(model.parameters(), 0.1), shard={"weight": ["model", None]})
        spec = torch_xla._XLAC._get_xla_sharding_spec
        return {
            "addressable": run.devices.addressable_device_count, "global": run.devices.global_device_count,
            "process": [run.devices.process_index, run.devices.process_count], "mesh": dict(run.devices.mesh.shape()),
            "wide": dict(run.devices.meshes["wide"].shape()),
            "weight": bool(spec(model.weight)), "bias": bool(spec(model.bias)),
        }  # fmt: skip

    mesh = {"data": 2, "model": -1}
    strategy = {"type": "spmd", "mesh": mesh, "meshes": {"wide": {**mesh, "height": 1, "width": 1}}}
    return launched(main, processes=1, devices=4, strategy=strategy)[0]


def _talking(run: Any) -> Any:
    torch.manual_seed(run.rank)
    model = nn.Linear(2, 2).to(run.device)
    run.devices.broadcast_parameters(model)
    exchanged = [each.decode() for each in run.devices.rendezvous("names", f"rank {run.rank}".encode())]
    run.barrier("a host barrier")
    return {
        "weights": model.weight.cpu().tolist(), "exchanged": exchanged,
        "devices": [run.devices.addressable_device_count, run.devices.global_device_count],
        "identity": run._engine.runtime.identity(),
        "device": str(run.device),
    }  # fmt: skip


def two_processes() -> Any:
    found = launched(_talking, processes=2, strategy="ddp")
    return {
        **{name: [each[name] for each in found] for name in ("weights", "exchanged", "devices")},
        "identities": [each["identity"] for each in found], "used": [each["device"] for each in found],
    }  # fmt: skip


def spmd_after_a_device_was_used() -> Any:
    import torch_xla

    torch.zeros(1, device=torch_xla.device())
    return launched(_talking, processes=1, devices=2, strategy="spmd")


def _with_silent_collectives(run: Any) -> None:
    raise AssertionError("the roll call must not let anybody get here")


def silent_collective() -> Any:
    launched(_with_silent_collectives, processes=2, strategy="ddp")


def random_numbers() -> Any:
    def main(run: Any) -> Any:
        runtime = run._engine.runtime
        found = {}
        for name, seed in (("first", 1), ("again", 1), ("other seed", 2)):
            runtime.seed(seed)
            found[name] = torch.rand(3, device=run.device).cpu().tolist()
        state = runtime.rng_state()
        found["after"] = torch.rand(3, device=run.device).cpu().tolist()
        runtime.set_rng_state(state)
        found["after restoring"] = torch.rand(3, device=run.device).cpu().tolist()
        return found

    return launched(main, processes=1)[0]


def recomputed_program() -> Any:
    """Matrix products and barriers in the program of a forward and backward pass, with three blocks and without."""
    from tasks import Stacked

    def main(run: Any) -> Any:
        import torch_xla

        found: dict[str, Any] = {"barriers": {}, "products": {}}
        for name, activation_checkpointing in (("usual", None), ("recomputed", "blocks")):
            model = Stacked(layers=3).model()
            wrapped, _ = run.setup(
                model,
                torch.optim.SGD(model.parameters(), 0.1),
                name=name,
                activation_checkpointing=activation_checkpointing,
            )
            run._engine.runtime.end_of_program()
            wrapped(torch.ones(4, 8, device=run.device)).sum().backward()
            text = torch_xla._XLAC._get_xla_tensors_hlo([each.grad for each in model.parameters()])
            found["barriers"][name] = text.count(" opt-barrier(")
            found["products"][name] = text.count(" dot(")
        return found

    return launched(main, processes=1)[0]


if sys.argv[1:2] == ["silent_collective"] or "silent" in str(sys.argv):
    from lockstep.runtime.xla import XlaRuntime

    XlaRuntime.spans_processes = property(lambda self: True)  # type: ignore[assignment, method-assign]

if __name__ == "__main__":
    try:
        print(json.dumps(globals()[sys.argv[1]]()))
    except LockstepError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
