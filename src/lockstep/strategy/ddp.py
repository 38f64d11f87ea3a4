"""One replica per process; gradients are averaged by torch's DistributedDataParallel."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.config.strategy import CommHook
from lockstep.config.strategy import Strategy as StrategySettings
from lockstep.errors import ConfigError
from lockstep.runtime.base import Runtime
from lockstep.strategy import collectives
from lockstep.strategy.base import Strategy
from lockstep.strategy.collectives import synchronise
from lockstep.strategy.optimizer_step import meets, step_parts

logger = logging.getLogger(__name__)

# A communication hook of DDP: called with a state and a bucket, returns a future of the exchanged gradients.
Hook = Callable[[Any, Any], Any]

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
    passes = 0  # backward passes since an optimizer stepped
    _awaited = False  # whether torch averages what the next backward pass computes
    _reached = False  # whether a backward pass has come to the first parameter, the last to get its gradient
    _before: list[tuple[Tensor | None, int]] | None = None  # gradients before a pass that torch does not average
    has_comm_hook = False
    _trained: list[bool]  # which parameters are, as torch knows them
    _changed = False  # whether a batch was computed with others

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        # A model that is frozen for a while (the discriminator, while the generator learns) has nothing to exchange.
        trained = [each.requires_grad for each in self.module.parameters()] if torch.is_grad_enabled() else []
        if any(trained) and trained != self._trained:
            if self.has_comm_hook:
                raise ConfigError(
                    "strategy.comm_hook: exchanges gradients of the parameters that were trained at run.setup, and "
                    "others are by now (requires_grad_). Leave the hook out, or freeze before run.setup"
                )
            self._changed = True
            if self._awaited:  # of a forward pass without a backward pass, whose gradients torch still waits for
                self._awaited = False
                self.reducer._reset_state()
                self._fix_buckets()
        elif any(trained):
            self._awaited = True
            try:
                return super().forward(*inputs, **keywords)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise _naming_unused(error, self._names(), self.passes) from None
        if not torch.is_grad_enabled() and not self._warned:
            self._warned = True
            logger.warning(
                "the model was called through its DDP wrapper without gradients; it was passed by, so that no rank "
                "waits. Evaluate with run.module (in a Task, with the model that metrics() is given)"
            )
        return self.module(*inputs, **keywords)

    def fix_bucket_layout(self) -> None:
        """Makes DDP choose its final gradient buckets now, before the first step.

        DDP starts with one bucket and regroups after its first backward pass. With three ranks or more the order in
        which an element is summed depends on its place in a bucket, so the first step after a resume would round
        differently from the same step of a run that was never interrupted. DDP assumes here that gradients come in the
        order of its parameters, which are in the reverse order of the model's.
        """
        self._trained = [each.requires_grad for each in self.module.parameters()]
        self._fix_buckets()
        next(each for each in self.module.parameters() if each.requires_grad).register_post_accumulate_grad_hook(
            self._reach
        )

    def _fix_buckets(self) -> None:
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _reach(self, parameter: Tensor) -> None:
        self._reached = True

    def average_every_pass(self) -> None:
        """Averages all gradients after any backward pass, also of one that reaches only some of the parameters."""
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._reach)

    def before_backward(self) -> None:
        self._before = None if self._awaited else _versions(self.module)

    def computed(self, last: bool) -> None:
        """Averages what torch does not: of several backward passes after a forward pass, it averages the first, and
        nothing of parameters that were frozen at first, or without those that are by now.

        All gradients are averaged again. That changes nothing in what was averaged before.
        """
        if self._before is not None and not self._reached:  # it may have reached a part of the model alone
            now = _versions(self.module)
            self._reached = any(
                grad is not before or version != version_before
                for (grad, version), (before, version_before) in zip(now, self._before, strict=True)
            )
        if last and (self._changed or (self._reached and not self._awaited)):
            _average(list(self.module.parameters()))
            self._changed = False
        self.passes += self._reached
        self._awaited, self._reached = self._awaited and not self._reached, False

    def _names(self) -> list[tuple[int, str]]:
        """Returns the parameters in the order of the model, with the numbers that DDP has for them."""
        names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        last = len(names) - 1
        return [(at if self.find_unused_parameters else last - at, name) for at, name in enumerate(names)]

    def _build_params_for_reducer(self) -> Any:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return (parameters, sparse) if self.find_unused_parameters else (parameters[::-1], sparse[::-1])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = cast(nn.Module, super().__getattr__("module"))
            found = getattr(module, name)
        return functools.partial(self._through_forward, name) if _is_method_of(module, found) else found

    def _through_forward(self, method: str, *inputs: Any, **keywords: Any) -> Any:
        """Calls another method of the module through DDP's forward, without which no gradient would be exchanged."""
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


class DdpStrategy(Strategy):
    name = "ddp"

    def __init__(self, runtime: Runtime, settings: StrategySettings, world_size: int) -> None:
        super().__init__(runtime, world_size)
        self.has_replicas, self._replicas_averaged = True, world_size
        self._settings = settings
        self._replicas: list[Replica] = []
        self._frozen: list[nn.Module] = []  # at first: they may be trained later, and torch averages nothing of them
        self._user_hook: Hook | None = None

    def use_comm_hook(self, hook: Any) -> None:
        if not callable(hook):
            raise ConfigError(f"strategy.comm_hook: must be a function of a state and a bucket, got {hook!r}")
        self._user_hook = hook

    def convert(self, model: nn.Module) -> None:
        if self._settings.sync_batchnorm:
            synchronise(model)

    def place(self, model: nn.Module) -> nn.Module:
        model = model.to(self.runtime.device)  # first, since DDP looks at where the parameters are
        tensors = [*model.parameters(), *model.buffers()]
        if tensors:
            _verify_param_shape_across_processes(_get_default_group(), tensors)
        self.runtime.broadcast(tensors)
        if not any(each.requires_grad for each in model.parameters()):  # nothing to exchange, and DDP refuses it
            self._frozen.append(model)
            return model
        settings = self._settings
        # A static graph finds what is unused by itself, in its first step.
        finds_unused = settings.find_unused_parameters and not settings.static_graph
        on_gpu = self.runtime.device.type == "cuda"
        replica = Replica(
            model,
            device_ids=[self.runtime.device.index] if on_gpu else None,
            output_device=settings.output_device if on_gpu else None,
            init_sync=False,
            find_unused_parameters=finds_unused,
            bucket_cap_mb=settings.bucket_mb,
            gradient_as_bucket_view=settings.has_bucket_views(on_gpu),
            **_NO_BROADCAST,
        )
        if settings.static_graph:
            replica._set_static_graph()  # type: ignore[no-untyped-call]
        replica.fix_bucket_layout()
        if settings.comm_hook is not None:
            hook = self._user_hook or _comm_hook(settings.comm_hook)
            # Without annotations, which DDP compares with types that a module may name as text. What it refuses besides
            # is bfloat16 without NCCL, which gloo has by now.
            replica.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
            replica.has_comm_hook = True
        self._replicas.append(replica)
        return replica

    def compute_on_bare_module(self, model: nn.Module) -> None:
        if isinstance(model, Replica):
            model.average_every_pass()

    def all_gather(self, tensor: Tensor) -> Tensor:
        return collectives.all_gather(tensor, dist.get_rank(), is_leader=True, copies=1)

    def explain(self, error: RuntimeError) -> Exception | None:
        """Explains DDP's error about a parameter that gets a gradient twice after one forward pass."""
        if "mark a variable ready only once" not in str(error):
            return None
        return ConfigError(
            "run.backward: parameters got a gradient twice after one forward pass, before all others had one, so that "
            "the ranks cannot average them. Add the losses up and call run.backward once, call the model once for each "
            "run.backward, or set strategy.find_unused_parameters: true"
        )

    def sync_gradients(self, wanted: bool) -> None:
        if not wanted and self._settings.static_graph:
            raise ConfigError(
                "strategy.static_graph: torch learns the graph from the first backward pass, which has to exchange "
                "gradients, but with accumulate it does not: set accumulate to 1, or static_graph to false"
            )
        for replica in self._replicas:
            # What DDP's own no_sync() sets; a context manager cannot span the caller's forward and backward.
            replica.require_backward_grad_sync = wanted

    def before_backward(self) -> None:
        for replica in self._replicas:
            replica.before_backward()

    def computed(self, last: bool) -> None:
        super().computed(last)
        for replica in self._replicas:
            replica.computed(last)
        for model in self._frozen if last else ():
            if any(each.requires_grad for each in model.parameters()):
                _average(list(model.parameters()))

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        if closure is None and meets(optimizer):
            step_parts(optimizer)
        else:
            super().step(optimizer, closure)

    def stepped(self) -> None:
        super().stepped()
        for replica in self._replicas:
            replica.passes = 0

    def total_count(self, counts: Sequence[Tensor | float]) -> Tensor:
        total = super().total_count(counts)
        dist.all_reduce(total)
        return total


def _versions(module: nn.Module) -> list[tuple[Tensor | None, int]]:
    """Returns the gradients, and what changes with every write to one."""
    gradients = [each.grad for each in module.parameters()]
    return [(each, 0 if each is None else each._version) for each in gradients]


def _average(parameters: Sequence[nn.Parameter]) -> None:
    """Averages gradients of parameters that any rank has reached."""
    flags = [each.grad is not None for each in parameters]
    reached = torch.tensor(flags, dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(reached)
    for parameter, ranks in zip(parameters, reached.tolist(), strict=True):
        if ranks and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _comm_hook(settings: CommHook) -> Hook:
    """Returns torch's hook of a type. The error feedback of powerSGD is not saved: a resume begins without it."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    if settings.type == "bf16_compress":
        return default_hooks.bf16_compress_hook
    if settings.type == "fp16_compress":
        return default_hooks.fp16_compress_hook
    state = PowerSGDState(
        process_group=None, matrix_approximation_rank=settings.rank, start_powerSGD_iter=settings.start
    )

    def exchange(_: None, bucket: Any) -> Any:
        found = powerSGD_hook(state, bucket)
        if dist.get_backend() != "nccl":
            # It exchanges three times per bucket, from the threads of the backend: of two buckets at once, each rank
            # might begin with another.
            found.wait()
        return found

    return exchange


def _is_method_of(module: nn.Module, found: Any) -> bool:
    """Whether it is a method that computes; those that every module has are called on the module itself."""
    return inspect.ismethod(found) and found.__self__ is module and not hasattr(nn.Module, found.__name__)


def _naming_unused(error: RuntimeError, names: list[tuple[int, str]], passes: int) -> Exception:
    """Returns DDP's error about parameters that got no gradient, with their names in place of their numbers."""
    text = str(error)
    found = re.search(r"did not receive grad for rank (\d+): ([\d ]+)", text)
    if "Expected to have finished reduction" not in text or found is None:
        return error
    numbers = {int(number) for number in found[2].split()}
    unused = ", ".join(name for number, name in names if number in numbers)
    if passes:
        return ConfigError(
            f"{unused}: no gradient on rank {found[1]} in backward pass {passes} of this step, so that the ranks "
            "cannot average it. Add up the losses of a step and call run.backward once, or set "
            "strategy.find_unused_parameters: true, which looks for such parameters in every pass"
        )
    return ConfigError(
        f"{unused}: no gradient on rank {found[1]} in the step before, so that the ranks cannot average it. "
        "Use these parameters in the loss, take them out of training with requires_grad_(False) before run.setup, or "
        "set strategy.find_unused_parameters: true, which looks for them in every step"
    )
