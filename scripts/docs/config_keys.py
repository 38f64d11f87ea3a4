"""The page of the config: what every key takes, from the schema, under its name; a table and a heading per section."""

from __future__ import annotations

import re
from typing import Any

from lockstep.config.schema import RunConfig

TABLE = re.compile(r"^\| key \|.*\n\| ---.*\n((?:\|.*\n)+)", re.M)
ROW = re.compile(r"^\| `([\w.\[\]]+)` \|(.*)$", re.M)
HEAD = "| key | default | meaning |\n| --- | --- | --- |\n"
FAR = 10**8  # limits that nobody comes near are left to the message
KINDS = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "mapping"}


def with_types(page: str) -> str:
    """The page with its one table cut into those of the sections, so that each can be found, and linked to."""
    schema = RunConfig.model_json_schema(by_alias=True)

    def tables(match: re.Match[str]) -> str:
        sections: dict[str, list[str]] = {}
        for key, rest in ROW.findall(match.group(1)):
            name = key.replace("[]", "")
            section, dot, _ = name.partition(".")
            taken = _told(key_at(schema, name.split(".")), schema)
            row = f'| `{key}`{{#{name}}}<br><span class="takes">{taken}</span> |{rest}\n'
            sections.setdefault(section if dot else "top level", []).append(row)
        return "\n".join(f"## {name}\n\n{HEAD}{''.join(rows)}" for name, rows in sections.items())

    return TABLE.sub(tables, page)


def key_at(schema: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """What the schema says of a key."""
    nodes = [schema]
    for name in names:
        below = [
            each["properties"][name] for node in nodes for each in _mappings(node, schema) if name in each["properties"]
        ]
        if not below:
            raise LookupError(f"docs/config.md: the schema has no key {'.'.join(names)}")
        nodes = below
    return nodes[0]


def _mappings(node: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Every mapping with keys of its own that may stand here."""
    if "$ref" in node:
        return _mappings(schema["$defs"][node["$ref"].rpartition("/")[2]], schema)
    below = [*node.get("anyOf", []), *node.get("oneOf", []), *([node["items"]] if "items" in node else [])]
    return ([node] if "properties" in node else []) + [each for option in below for each in _mappings(option, schema)]


def _told(node: dict[str, Any], schema: dict[str, Any]) -> str:
    options = [each for kind in ("anyOf", "oneOf") for each in node.get(kind, [])]
    if options:
        told = [_told(each, schema) for each in options]
        return " or ".join(dict.fromkeys(told))
    if "$ref" in node:
        referred = schema["$defs"][node["$ref"].rpartition("/")[2]]
        return "mapping" if "properties" in referred else _told(referred, schema)
    if "enum" in node:
        return ", ".join(_shown(each) for each in node["enum"])
    if "const" in node:
        return _shown(node["const"])
    if "steps?" in node.get("pattern", ""):
        return "interval"
    if node.get("type") == "null":
        return "null"
    if node.get("type") == "array":
        item = _told(node["items"], schema) if "items" in node else "anything"
        return f"list of {item}"
    return KINDS.get(node.get("type", ""), "anything") + _limits(node)


def _limits(node: dict[str, Any]) -> str:
    words = {"exclusiveMinimum": "&gt; {}", "minimum": "≥ {}", "exclusiveMaximum": "&lt; {}", "maximum": "≤ {}"}
    told = [text.format(f"{node[name]:,}") for name, text in words.items() if name in node and node[name] < FAR]
    return f" {' and '.join(told)}" if told else ""


def _shown(value: Any) -> str:
    return f"`{value}`"
