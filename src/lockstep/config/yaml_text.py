"""YAML with limits, and with the types that people expect.

A few lines of YAML can stand for billions of values (aliases of aliases), be nested arbitrarily deep, or hold a number
of a million digits. All of that raises yaml.YAMLError.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

from lockstep.config.plain import LONGEST_CONFIG

DEEPEST = 50
MOST_VALUES = 100_000
MOST_BITS = 1024  # of a whole number, which is about 300 digits


class SafeLoader(yaml.SafeLoader):
    """YAML 1.2 types: `on` is a string, `1e-3` a number and `1:30:00` a string."""

    _level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuses deep nesting early: PyYAML would take seconds before it fails."""
        if self._level >= DEEPEST:
            raise yaml.composer.ComposerError(
                None,
                None,
                f"it is nested deeper than {DEEPEST} levels",
                self.peek_event().start_mark,  # type: ignore[no-untyped-call]
            )
        self._level += 1
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def construct_yaml_int(self, node: Any) -> int:
        value = super().construct_yaml_int(node)
        if value.bit_length() > MOST_BITS:
            raise _refused(node, f"a whole number of more than {MOST_BITS} bits")
        return value

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError, TypeError, OverflowError):  # of what does not fit its !!tag
            raise _refused(node, f"this cannot be read as {node.tag.rpartition(':')[2]}") from None


SafeLoader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag.removeprefix("tag:yaml.org,2002:") not in ("bool", "int", "float", "timestamp")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
SafeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
SafeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|0|[1-9][0-9_]*)$"),
    list("-+0123456789"),
)
SafeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)
SafeLoader.add_constructor("tag:yaml.org,2002:int", SafeLoader.construct_yaml_int)


class SafeDumper(yaml.SafeDumper):
    """Quotes what SafeLoader would otherwise take for something else."""


SafeDumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *SafeLoader.yaml_implicit_resolvers.get(first, [])]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *SafeLoader.yaml_implicit_resolvers}
}


def to_yaml(value: Any) -> str:
    """Returns text that `parse_yaml` reads back unchanged."""
    return yaml.dump(value, Dumper=SafeDumper, sort_keys=False)


def parse_yaml(text: str) -> Any:
    """Returns plain data from YAML text; tags that would create objects are refused."""
    return parse_nodes(text, lambda root: None)


def parse_nodes(text: str, look: Callable[[yaml.Node], None]) -> Any:
    """Does the same after calling `look` with the root node, which knows its lines."""
    if len(text) > LONGEST_CONFIG:
        raise yaml.YAMLError(f"it has more than {LONGEST_CONFIG} characters")
    try:
        loader = SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_extent(node)
        look(node)  # before the data is made: keys that are merged in (<<) then have no place of their own
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError(f"it is nested deeper than {DEEPEST} levels") from None
    except UnicodeError as error:
        raise yaml.YAMLError(f"not text: {error}") from None


def _check_extent(root: yaml.Node) -> None:
    """Refuses too many values or levels, with every alias expanded."""
    known: dict[int, tuple[int, int]] = {}
    inside: set[int] = set()

    def extent(node: yaml.Node) -> tuple[int, int]:
        if id(node) in inside:
            raise _refused(node, "an alias (*name) stands inside of what it names")
        if id(node) not in known:
            inside.add(id(node))
            below = [extent(each) for each in _children(node)]
            inside.remove(id(node))
            known[id(node)] = 1 + sum(each[0] for each in below), 1 + max((each[1] for each in below), default=0)
        values, levels = known[id(node)]
        if values > MOST_VALUES:
            raise _refused(node, f"it stands for more than {MOST_VALUES} values, aliases (*name) included")
        if levels > DEEPEST:
            raise _refused(node, f"it is nested deeper than {DEEPEST} levels")
        return values, levels

    extent(root)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _refused(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
