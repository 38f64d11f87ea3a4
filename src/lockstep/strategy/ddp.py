"""One replica per process; gradients are averaged by torch's DistributedDataParallel."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config.strategy import Strategy as StrategySettings
from lockstep.errors import ConfigError
from lockstep.runtime.base import Runtime
from lockstep.strategy.base import Modules, Strategy
from lockstep.strategy.synced_norm import synchronise

if TYPE_CHECKING:
    from lockstep.strategy.comm_hooks import Hook, PowerSgd

logger = logging.getLogger(__name__)

# Buffers are made equal where it matters, before they are evaluated or saved. Broadcasting them in every forward pass
# would make a rank that evaluates through the wrapper alone wait for the others for ever. Torch 2.13 renamed it.
_BROADCAST_OPTION = "forward_sync_buffers"
if _BROADCAST_OPTION not in inspect.signature(DistributedDataParallel).parameters:
    _BROADCAST_OPTION = "broadcast_buffers"
_NO_BROADCAST: dict[str, Any] = {_BROADCAST_OPTION: False}


class Replica(DistributedDataParallel):
    """Torch's wrapper, which without gradients is the module that it wraps: a rank may then evaluate alone.

    Methods and attributes of the module can be used on the wrapper as well.
    """

    _warned = False

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        # A model that is frozen for a while (the discriminator, while the generator learns) has nothing to exchange.
        if torch.is_grad_enabled() and any(each.requires_grad for each in self.module.parameters()):
            try:
                return super().forward(*inputs, **keywords)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise _naming_unused(error, self._names()) from None
        if not torch.is_grad_enabled() and not self._warned:
            self._warned = True
            logger.warning(
                "the model was called through its DDP wrapper without gradients; it was passed by, so that no rank "
                "waits. Evaluate with run.module (in a Task, with the model that metrics() is given)"
            )
        return self.module(*inputs, **keywords)

    def _names(self) -> list[str]:
        """Of the parameters, in the order in which DDP counts them."""
        return [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = cast(nn.Module, super().__getattr__("module"))
            found = getattr(module, name)
        return functools.partial(self._through_forward, name) if _is_method_of(module, found) else found

    def _through_forward(self, method: str, *inputs: Any, **keywords: Any) -> Any:
        """Call another method of the module by way of DDP's forward, without which no gradient would be exchanged."""
        module = self.module
        if not torch.is_grad_enabled():
            return getattr(module, method)(*inputs, **keywords)
        forward = module.forward

        def instead(*inner: Any, **named: Any) -> Any:
            module.forward = forward  # the method may call the module itself
            return getattr(module, method)(*inner, **named)

        own = "forward" in vars(module)
        module.forward = instead
        try:
            return self(*inputs, **keywords)
        finally:
            if own:
                module.forward = forward
            else:
                vars(module).pop("forward", None)


class StaticReplica(Replica):
    """For models that use the same parameters in every step, which DDP finds out in the first: some may be unused."""

    def fix_bucket_layout(self) -> None:
        """The same buckets that _fix_bucket_layout makes, and before the first step for the same reason.

        A backward pass over zeros would be the one that DDP learns the graph from. Instead it is told that gradients
        come in the order of its parameters, which are in the reverse order of the model's.
        """
        self._set_static_graph()  # type: ignore[no-untyped-call]
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _names(self) -> list[str]:
        return super()._names()[::-1]

    def _build_params_for_reducer(self) -> Any:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], sparse[::-1]


class DdpStrategy(Strategy):
    name = "ddp"

    def __init__(self, runtime: Runtime, settings: StrategySettings, world_size: int) -> None:
        super().__init__(runtime, world_size)
        self._settings = settings
        self._replicas: list[Replica] = []
        self._own_hook: Hook | None = None
        self._hooks: list[PowerSgd | None] = []  # what the hook of each replica keeps

    def use_comm_hook(self, hook: Any) -> None:
        if not callable(hook):
            raise ConfigError(f"strategy.comm_hook: must be a function of a state and a bucket, got {hook!r}")
        self._own_hook = hook

    def convert(self, model: nn.Module) -> None:
        if self._settings.sync_batchnorm:
            synchronise(model)

    def place(self, model: nn.Module) -> nn.Module:
        model = model.to(self.runtime.device)  # first, since DDP looks at where the parameters are
        settings = self._settings
        # A static graph finds what is unused by itself, in its first step.
        finds_unused = settings.find_unused_parameters and not settings.static_graph
        on_gpu = self.runtime.device.type == "cuda"
        replica = (StaticReplica if settings.static_graph else Replica)(
            model,
            device_ids=[self.runtime.device.index] if on_gpu else None,
            output_device=settings.output_device if on_gpu else None,
            find_unused_parameters=finds_unused,
            bucket_cap_mb=settings.bucket_mb,
            gradient_as_bucket_view=settings.has_bucket_views(on_gpu),
            **_NO_BROADCAST,
        )
        if isinstance(replica, StaticReplica):
            replica.fix_bucket_layout()
        elif not finds_unused:
            _fix_bucket_layout(replica)
        if settings.comm_hook is not None:
            from lockstep.strategy.comm_hooks import register

            self._hooks.append(register(replica, settings.comm_hook, self._own_hook))
        self._replicas.append(replica)
        return replica

    def sync_gradients(self, wanted: bool) -> None:
        if not wanted and self._settings.static_graph:
            raise ConfigError(
                "strategy.static_graph: torch learns the graph from the first backward pass, which has to exchange "
                "gradients, but with accumulate it does not: set accumulate to 1, or static_graph to false"
            )
        for replica in self._replicas:
            # What DDP's own no_sync() sets; a context manager cannot span the caller's forward and backward.
            replica.require_backward_grad_sync = wanted

    @property
    def _replicas_averaged(self) -> int:
        return self.world_size

    def total_count(self, counts: Sequence[Tensor | float]) -> Tensor:
        total = super().total_count(counts)
        dist.all_reduce(total)
        return total

    def state_of_ranks(self) -> dict[str, Any] | None:
        if not any(self._hooks):
            return None
        return {"comm_hooks": [None if each is None else each.gathered() for each in self._hooks]}

    def load_state_of_ranks(self, state: Mapping[str, Any]) -> None:
        for hook, saved in zip(self._hooks, state.get("comm_hooks", []), strict=False):
            if hook is not None and saved is not None:
                hook.load(saved, self.runtime.device)

    @property
    def has_replicas(self) -> bool:
        return True

    def equalize_buffers(self, modules: Modules) -> None:
        for module in modules.values():
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)


def _fix_bucket_layout(wrapped: DistributedDataParallel) -> None:
    """Make DDP choose its final gradient buckets now, before the first step.

    DDP starts with one bucket and regroups after its first backward pass. With three ranks or more the order in
    which an element is summed depends on its place in a bucket, so the first step after a resume would round
    differently from the same step of a run that was never interrupted. After a backward pass over zeros, it can
    regroup here in both cases. Left to the first forward pass, ranks would wait for each other in the midst of it.
    """
    parameters = [p for p in wrapped.module.parameters() if p.requires_grad]
    sparse = _with_sparse_gradients(wrapped.module)
    wrapped.reducer.prepare_for_backward([])
    with torch.enable_grad():
        # Gradients become ready in the reverse of this order, as they do in a network that is used front to back.
        zeros = [_zero_of(parameter, id(parameter) in sparse) for parameter in parameters]
        torch.stack(zeros).sum().backward()  # type: ignore[no-untyped-call]
    wrapped.reducer._rebuild_buckets()
    for parameter in parameters:
        parameter.grad = None


def _with_sparse_gradients(module: nn.Module) -> set[int]:
    tables = (nn.Embedding, nn.EmbeddingBag)
    return {id(each.weight) for each in module.modules() if isinstance(each, tables) and each.sparse}


def _zero_of(parameter: Tensor, sparse: bool) -> Tensor:
    """A zero that depends on a parameter, and gives it the kind of gradient that DDP expects of it."""
    if not sparse:
        return (parameter * 0).sum().float()
    first = torch.zeros(1, dtype=torch.int64, device=parameter.device)
    return (F.embedding(first, parameter, sparse=True) * 0).sum().float()


def _is_method_of(module: nn.Module, found: Any) -> bool:
    """Whether it is a method that computes; those that every module has are called on the module itself."""
    return inspect.ismethod(found) and found.__self__ is module and not hasattr(nn.Module, found.__name__)


def _naming_unused(error: RuntimeError, names: list[str]) -> Exception:
    """DDP's complaint about parameters that got no gradient, with their names in place of their numbers."""
    text = str(error)
    found = re.search(r"did not receive grad for rank (\d+): ([\d ]+)", text)
    if "Expected to have finished reduction" not in text or found is None:
        return error
    unused = [names[int(number)] for number in found[2].split() if int(number) < len(names)]
    return ConfigError(
        f"{', '.join(unused)}: no gradient on rank {found[1]} in the step before, so that the ranks cannot average it. "
        "Use these parameters in the loss, take them out of training with requires_grad_(False) before run.setup, or "
        "set strategy.find_unused_parameters: true, which looks for them in every step"
    )
