"""Builds a RunConfig from YAML and overrides. Errors name the place, the value and the nearest valid name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from lockstep.config.objects import KeyPath, with_task_located
from lockstep.config.plain import did_you_mean, nearest, read_text
from lockstep.config.schema import After, Profile, RunConfig, RunSettings
from lockstep.config.secrets import LEFT_OUT, redacted, secrets_in, without_value
from lockstep.config.strategy import Strategy, resolve_meshes, spans_processes
from lockstep.config.yaml_text import DEEPEST, parse_nodes
from lockstep.config.yaml_text import parse_yaml as parse_yaml
from lockstep.config.yaml_text import to_yaml as to_yaml
from lockstep.errors import ConfigError
from lockstep.shown import brief, in_a_line

Settings = TypeVar("Settings", bound=BaseModel)

# Sections for which a bare value stands for one of their keys.
SHORT_FORMS = {**dict.fromkeys(("task", "optimizer", "scheduler", "strategy", "launch"), "type"), "init_from": "path"}
# Sections whose other keys are arguments of their type.
COMPONENTS = ("task", "optimizer", "scheduler")


def load(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads a config file, applies `key.path=value` overrides and validates the result."""
    raw, places = read(path)
    _override(raw, places, overrides)
    return _loaded(raw, places, path.resolve().parent, str(path))


def with_values(config: RunConfig, values: Mapping[str, Any], overrides: Iterable[str] = ()) -> RunConfig:
    """Returns a config with other values at some paths, and with `key.path=value` overrides."""
    raw, places = RunSettings.plain(config), dict[KeyPath, str]()
    _override(raw, places, overrides)
    for path, value in values.items():
        _set(raw, places, tuple(path.split(".")), value, f"{path}={value!r}")
    return validate(RunConfig, raw, places, "config").with_after(config.after)


def load_python(config: Path | Mapping[str, Any], values: Mapping[str, Any], caller: str) -> RunConfig:
    """Builds a config from a file or plain data, and values by dotted names.

    A mapping is merged into the section; for a component (task, optimizer, scheduler), a mapping with a `type` replaces
    it. A task's file is relative to the config's, or to the current folder.
    """
    if isinstance(config, Path):
        raw, places = read(config)
        folder, source = config.resolve().parent, str(config)
    else:
        raw, places, folder, source = _unboxed(config), {}, Path.cwd(), caller
    for keys, value in _by_path(_unboxed(values)):
        _set(raw, places, keys, value, f"{caller}: {_dotted(keys)}={value!r}")
    # As ranks get it from config.yaml: a tuple is a list, also where this process trains.
    return _loaded(validate(RunConfig, raw, places, source).plain(), places, folder, source)


def _unboxed(value: Any) -> Any:
    """Returns values of Python with plain numbers for those of numpy and torch."""
    if isinstance(value, Mapping):
        return {name: _unboxed(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_unboxed(each) for each in value]
    return value.item() if getattr(value, "shape", None) == () else value


def _loaded(raw: Mapping[str, Any], places: Mapping[KeyPath, str], folder: Path, source: str) -> RunConfig:
    config = validate(RunConfig, raw, places, source)
    return with_weights_located(with_task_located(config, folder, places, source), folder, places)


def read(path: Path) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Returns the plain data of a YAML file, and the place of every key."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no such file. `lockstep init` writes a config and a task to start from"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    raw, lines = _parse(text, path)
    return raw, {key: f"{path}:{line}" for key, line in lines.items()}


def from_plain(raw: Mapping[str, Any], source: str) -> RunConfig:
    """Reads what `RunConfig.plain` returned."""
    config = validate(RunConfig, {key: value for key, value in raw.items() if key != "after"}, {}, source)
    return config.with_after(validate(After, raw["after"], {}, source)) if "after" in raw else config


def validate(model: type[Settings], raw: Mapping[str, Any], places: Mapping[KeyPath, str], source: str) -> Settings:
    """Builds the settings, or raises one ConfigError with everything that is wrong."""
    try:
        return model.model_validate(raw)
    except ValidationError as problems:
        lines = [_describe(problem, raw, model, places, source) for problem in problems.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def uneven_shares(batch_size: int, dp_size: int, name: str = "train.batch_size") -> str | None:
    """Returns what to report if the ranks get different numbers of examples."""
    few, more = divmod(batch_size, dp_size)
    if not more:
        return None
    effect = (
        f"ranks get {few} or {few + 1} examples of every batch"
        if few
        else f"{dp_size - more} of them get no example of a batch, and compute one that counts for nothing"
    )
    return f"{name} {batch_size} on {dp_size} processes: {effect}; the mean is still over all {batch_size}"


def check_strategy(strategy: Strategy, runtime: str, world_size: int) -> None:
    """Checks the strategy against the runtime and the number of processes."""
    if strategy.type == "single" and world_size > 1:
        raise ConfigError(
            f"strategy: single trains on one process, but there are {world_size}: each would train its own model. "
            "Set processes: 1, or strategy: ddp"
        )
    for_torch = [*strategy.given_for_ddp, *(["sync_batchnorm"] if strategy.sync_batchnorm else [])]
    if for_torch and runtime == "xla":
        raise ConfigError(
            f"strategy.{for_torch[0]}: is for torch's DistributedDataParallel, but with runtime: xla "
            "gradients are averaged in the program, or by the hosts: leave it out"
        )
    if spans_processes(strategy, runtime):
        resolve_meshes(strategy, world_size, "processes")


def check_profile_ranks(profile: Profile | None, world_size: int) -> None:
    beyond = [rank for rank in (profile.ranks if profile else None) or () if rank >= world_size]
    if beyond:
        raise ConfigError(
            f"profile.ranks: there is no rank {beyond[0]}; of {world_size} "
            f"process{'es' if world_size > 1 else ''} the last is rank {world_size - 1}"
        )


def _parse(text: str, path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    lines: dict[KeyPath, int] = {}
    try:
        raw = parse_nodes(text, lambda root: _collect_lines(root, (), lines, path))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        if "\\t" in problem:
            problem = "a tab is used for indentation; YAML allows only spaces there"
        raise ConfigError(f"{where}: not valid YAML: {problem}") from None
    if raw is None:
        raise ConfigError(f"{path}: the file is empty. It needs at least a task, for example\n  task: file.py:MyTask")
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}:1: the config must be a mapping of keys to values, not {type(raw).__name__}")
    return raw, lines


def _collect_lines(node: yaml.Node | None, at: KeyPath, lines: dict[KeyPath, int], path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = (*at, str(key.value))
            if below in lines:
                raise ConfigError(
                    f"{path}:{key.start_mark.line + 1}: {_dotted(below)}: given twice (first in line {lines[below]})"
                )
            lines[below] = key.start_mark.line + 1
            _collect_lines(value, below, lines, path)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*at, index)] = value.start_mark.line + 1
            _collect_lines(value, (*at, index), lines, path)


def _override(raw: dict[str, Any], places: dict[KeyPath, str], overrides: Iterable[str]) -> None:
    for override in overrides:
        name, equals, text = override.partition("=")
        keys, place = tuple(name.strip().split(".")), f"--set {brief(without_value(override))}"
        if not equals or not all(keys):
            raise ConfigError(f"{place}: write key.path=value, for example --set train.batch_size=64")
        if not text.strip():
            raise ConfigError(f"{place}: there is no value: write null for none, or '' for an empty text")
        if len(keys) > DEEPEST:
            raise ConfigError(f"{place}: nested deeper than {DEEPEST} levels")
        try:
            value = parse_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{place}: not valid YAML: {error}") from None
        _set(raw, places, keys, value, place)


def _set(raw: dict[str, Any], places: dict[KeyPath, str], keys: tuple[str, ...], value: Any, place: str) -> None:
    """Puts a value at a path, and notes where the value comes from."""
    node: Any = raw
    for depth, key in enumerate(keys[:-1]):
        below = node.get(key)
        if isinstance(below, str) and depth == 0 and key in SHORT_FORMS:
            below = {SHORT_FORMS[key]: below}
        if below is None:
            below = {}
        if not isinstance(below, dict):
            raise ConfigError(f"{place}: {_dotted(keys[: depth + 1])} is {below!r}, which has no keys below")
        node[key] = dict(below)
        node = node[key]
    node[keys[-1]] = value
    for known in [each for each in places if each[: len(keys)] == keys]:
        del places[known]
    for n in range(1, len(keys) + 1):
        places.setdefault(keys[:n], place)


def _by_path(values: Mapping[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every value with its path."""
    for name, value in values.items():
        keys = (*at, name) if at else tuple(name.split("."))  # further down a dot may belong to a name
        whole = len(keys) == 1 and name in COMPONENTS and "type" in value if isinstance(value, Mapping) else True
        if whole or not value:
            yield keys, value
        else:
            yield from _by_path(value, keys)


def _describe(
    problem: Any, raw: Mapping[str, Any], model: type[BaseModel], places: Mapping[KeyPath, str], source: str
) -> str:
    keys: KeyPath = _without_union_tags(problem["loc"], raw)
    place = next((places[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in places), source)
    name = _dotted(keys) or "config"
    value = problem["input"]
    kind, message = problem["type"], problem["msg"]
    if kind == "value_error":  # may be about several values together, some of them from the command line
        below = {each: None for key, each in places.items() if key[: len(keys)] == keys and each.startswith("--set ")}
        place = ", ".join([place, *(each for each in below if each != place)])
    if kind == "extra_forbidden":
        advice = did_you_mean(str(keys[-1]), _names_at(model, keys[:-1]))
        shown = LEFT_OUT if any(secrets_in({str(keys[-1]): value})) else redacted(value)
        return f"{place}: {name}: unknown key, {advice} (value {shown!r})"
    if kind == "missing":
        section = _dotted(keys[:-1])
        alone = section and re.search(rf"(^| ){re.escape(section)}\.[^ ]*=", place)  # one value made the section
        return f"{place}: {name}: missing" + (
            f": the config has no {section} section. Set {name}, too" if alone else ""
        )
    message = message.removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if kind == "literal_error":
        expected = problem["ctx"]["expected"].replace("'", "")
        near = nearest(str(value), expected.replace(" or ", ", ").split(", "))
        message = f"must be one of {expected}" + (f"; did you mean {near}?" if near else "")
    shown = f", got {value!r}" if isinstance(value, (str, int, float, bool, list, type(None))) else ""
    return f"{place}: {name}: {message}{shown}"


def _without_union_tags(loc: Iterable[str | int], raw: Any) -> KeyPath:
    """Drops the union members that pydantic puts into a path."""
    keys: list[str | int] = []
    for part in loc:
        # A user's key may look like a tag.
        if str(part).startswith("(") and not (isinstance(raw, Mapping) and part in raw):
            continue
        if isinstance(raw, Mapping):
            keys.append(part)
            raw = raw.get(part)
        elif isinstance(raw, (list, tuple)) and isinstance(part, int):
            keys.append(part)
            raw = raw[part] if part < len(raw) else None
    return tuple(keys)


def _names_at(model: type[BaseModel], keys: KeyPath) -> list[str]:
    schema = model.model_json_schema(by_alias=True)
    node: dict[str, Any] = schema
    for key in keys:
        node = node.get("items", {}) if isinstance(key, int) else node.get("properties", {}).get(key, {})
        outer = [*node.get("anyOf", []), *node.get("oneOf", [])]
        options = [inner for option in outer for inner in option.get("oneOf", [option])]
        node = next((option for option in options if "$ref" in option), node)
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return list(node.get("properties", {}))


def _dotted(keys: KeyPath) -> str:
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return in_a_line(text)


def with_weights_located(config: RunConfig, folder: Path, places: Mapping[KeyPath, str]) -> RunConfig:
    """Makes `init_from.path` absolute: relative to the config's folder, or on the command line to the current one.

    Its existence is not checked: it may be on other hosts, and a resume does not need it.
    """
    init_from = config.init_from
    if init_from is None or "://" in init_from.path:
        return config
    place = places.get(("init_from", "path"), places.get(("init_from",), ""))
    base = Path.cwd() if place.startswith("--set") else folder
    path = str((base / init_from.path).absolute())
    return config.model_copy(update={"init_from": init_from.model_copy(update={"path": path})})


_OF_OPTIMIZERS = {"lr": "lr", "learning_rate": "lr", "weight_decay": "weight_decay", "momentum": "momentum"}
_MOST = 3


def paths_called(name: str) -> list[str]:
    """Returns the paths that end with a name, those of `train` first: `epochs` is `train.epochs`."""
    name = name.replace("-", "_")
    if name in _OF_OPTIMIZERS:
        return [f"optimizer.{_OF_OPTIMIZERS[name]}"]
    found = [path for path in _paths(RunConfig, "") if path.rpartition(".")[2] == name]
    return sorted(found, key=lambda path: (not path.startswith("train."), path.count("."), path))[:_MOST]


def _paths(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path
        for each in (field.annotation, *get_args(field.annotation)):
            if isinstance(each, type) and issubclass(each, BaseModel) and each is not model:
                yield from _paths(each, f"{path}.")
