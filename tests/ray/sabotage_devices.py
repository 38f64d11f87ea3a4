"""A task whose import makes every worker on this machine believe that it is alone, on one and the same device."""

from lockstep.runtime.cpu import CpuRuntime


class Task:
    pass


CpuRuntime.identity = lambda self: "device-7"  # type: ignore[method-assign]
CpuRuntime.world_size = lambda self: 1  # type: ignore[method-assign]
