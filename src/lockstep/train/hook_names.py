"""Whether something is a hook: methods that look like ours and are not would never be called, without a word."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from lockstep.errors import ConfigError
from lockstep.train.hooks import Hook

MOMENTS = tuple(name for name in vars(Hook) if not name.startswith("_"))
STATE = ("state_dict", "load_state_dict")
# What other frameworks call them.
ALIASES = {
    "on_fit_start": "before_training",
    "on_train_start": "before_training",
    "on_train_begin": "before_training",
    "on_train_batch_end": "after_step",
    "on_batch_end": "after_step",
    "on_step_end": "after_step",
    "on_optimizer_step": "after_step",
    "on_validation_end": "after_validation",
    "on_validation_epoch_end": "after_validation",
    "on_evaluate": "after_validation",
    "on_train_epoch_end": "after_epoch",
    "on_epoch_end": "after_epoch",
    "on_fit_end": "after_training",
    "on_train_end": "after_training",
    "on_save_checkpoint": "state_dict",
    "on_load_checkpoint": "load_state_dict",
}
_SIMILAR = 0.75


def check_hook(hook: Any, path: str) -> None:
    """Refuse what is no hook, by the place where it was named; `hook` is an object or its class."""
    cls = hook if inspect.isclass(hook) else type(hook)
    own = _methods(cls)
    if not own & {*MOMENTS, *STATE}:
        has = f"it has {', '.join(sorted(own))}" if own else "it has no method"
        hints = [right for name in sorted(own) if (right := _meant(name, set(MOMENTS)))]
        hint = f", did you mean {hints[0]}?" if hints else ""
        raise ConfigError(f"{path}: {cls.__name__} is no hook: {has}, and a hook has one of {', '.join(MOMENTS)}{hint}")
    absent = {*MOMENTS, *STATE} - own
    for name in sorted(own - {*MOMENTS, *STATE}):
        right = _meant(name, absent)
        if right or name.startswith(("before_", "after_")):
            told = f"did you mean {right}?" if right else f"a hook has {', '.join(MOMENTS)}"
            raise ConfigError(f"{path}: {cls.__name__} defines {name}, which Lockstep does not call; {told}")
    missing = [name for name in STATE if name in absent]
    if len(missing) == 1:
        there = next(name for name in STATE if name in own)
        raise ConfigError(f"{path}: {cls.__name__} defines {there}, but not {missing[0]}: a state needs both")
    for name in sorted(own & set(MOMENTS)):
        _check_signature(cls, name, path)


def defines(hook: Any, name: str) -> bool:
    return name in _methods(type(hook))


def returns_nothing(hook: Any, name: str) -> bool:
    """Whether a method says of itself, by `-> None`, that it gives no reason to stop."""
    return getattr(hook, name).__annotations__.get("return", "") in (None, "None")


def may_return_reason(hook: Any, name: str) -> bool:
    """Whether a method says of itself, by `-> str | None`, that it may give one."""
    return "return" in getattr(hook, name).__annotations__ and not returns_nothing(hook, name)


def _methods(cls: type) -> set[str]:
    """The public methods of a class, and of those that it derives from, up to ours."""
    known = [each for each in cls.__mro__ if each not in (Hook, object)]
    return {
        name
        for each in known
        for name, value in vars(each).items()
        if not name.startswith("_") and inspect.isroutine(value)
    }


def _meant(name: str, absent: set[str]) -> str | None:
    alias = ALIASES.get(name)
    if alias is not None:
        return alias if alias in absent else None
    return next(iter(difflib.get_close_matches(name, sorted(absent), n=1, cutoff=_SIMILAR)), None)


def _check_signature(cls: type, name: str, path: str) -> None:
    """A method that cannot take what it is called with would fail hours later."""
    expected = inspect.signature(getattr(Hook, name))
    itself, *given = expected.parameters
    bound = not inspect.isfunction(inspect.getattr_static(cls, name))  # a class method, or a static one
    try:
        inspect.signature(getattr(cls, name)).bind(*given if bound else (itself, *given))
    except TypeError:
        raise ConfigError(
            f"{path}: {cls.__name__}.{name}{inspect.signature(getattr(cls, name))} cannot be called with "
            f"{', '.join(given)}: define {name}{expected}"
        ) from None
    except ValueError:  # no signature to be had
        return
