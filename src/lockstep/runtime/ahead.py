"""Copies to a GPU on a stream of their own, beside what the GPU computes meanwhile."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.runtime.moving import map_tensors, moved


class Arriving:
    """A batch on its way to a GPU. `arrive` gives it to the stream that computes, without the host waiting for it."""

    def __init__(self, batch: Any, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._copies: list[torch.Tensor] = []
        with torch.cuda.stream(stream):
            self._batch = map_tensors(self._begin, batch)
            self._event = stream.record_event()

    def _begin(self, tensor: torch.Tensor) -> torch.Tensor:
        # What is no plain tensor may keep others that nobody here knows of, and whose memory would be given away while
        # the GPU still reads it: such go the usual way, on arrival.
        if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return tensor
        copy = tensor.to(self._device, non_blocking=True)
        self._copies.append(copy)
        return copy

    def arrive(self) -> Any:
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(self._event)
        for copy in self._copies:
            # It was made on another stream, to which its memory goes back only once this one is done with it.
            copy.record_stream(computing)
        return moved(self._batch, self._device)
