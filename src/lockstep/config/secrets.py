"""Finds and redacts keys and passwords, by the names of settings.

A config is copied into the run's folder, shown by commands and sent to loggers. Keys belong into the environment, which
is never written anywhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

LEFT_OUT = "(left out)"

_ALWAYS = ("password", "passwd", "passphrase", "secret", "credential", "credentials", "apikey")
# A `label_key` and a `pad_token` are no secrets; what comes before the last word tells.
_KEYS = ("api", "access", "secret", "private", "auth", "account", "encryption", "signing", "ssh")
_TOKENS = (
    "api", "access", "auth", "bearer", "refresh", "session", "secret", "security", "identity", "write", "hf", "hub",
    "huggingface", "wandb", "mlflow", "tracking", "trackio", "github", "gitlab",
)  # fmt: skip
_SHORTEST = 8  # of a value of the environment that is looked for in others: a shorter one is found everywhere
# Text of a megabyte may come from a stranger, so neither pattern may look at a character twice.
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s:]*+:[^/@\s]*(?=@)")
_QUERY = re.compile(rf"(?<=[?&;])([^=&;?#\s]++)=(?!{re.escape(LEFT_OUT)})([^&;#\s]+)")
_SIGNED = (["signature"], ["sig"])  # of a signed URL, which is a key to what it names


def is_secret(name: str) -> bool:
    """Whether a setting of this name is a key or a password."""
    words = _words(name)
    if not words:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] in _ALWAYS:
        return True
    return (words[-1] == "key" and before in _KEYS) or (words[-1] == "token" and before in ("", *_TOKENS))


def secrets_in(section: Any, at: str = "") -> Iterator[str]:
    """Yields the paths of secrets in the settings of a logger, where every `key` and `token` is one."""
    if isinstance(section, Mapping):
        for name, value in section.items():
            path = f"{at}.{name}" if at else str(name)
            if value is not None and (is_secret(str(name)) or _words(str(name))[-1:] in (["key"], ["token"])):
                yield path
            else:
                yield from secrets_in(value, path)
    elif isinstance(section, (list, tuple)):
        for index, value in enumerate(section):
            yield from secrets_in(value, f"{at}[{index}]")
    elif isinstance(section, str) and _without_credentials(section) != section:
        yield at


def redacted(value: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """Returns plain data with secrets left out: by name, in URLs, or equal to those in the environment."""
    known = [each for name, each in environment.items() if is_secret(name) and len(each) >= _SHORTEST]
    return _redacted(value, known)


def without_value(assignment: str) -> str:
    """Hides the value of an assignment like `log.mine.api_key=...`."""
    name, equals, value = assignment.partition("=")
    hidden = any(secrets_in({name.strip().rpartition(".")[2]: value})) and "log." in name
    return f"{name}{equals}{LEFT_OUT}" if equals and hidden else assignment


def _redacted(value: Any, known: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {name: LEFT_OUT if _holds_one(name, each) else _redacted(each, known) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(each, known) for each in value]
    if not isinstance(value, str):
        return value
    for each in known:
        value = value.replace(each, LEFT_OUT)
    return _without_credentials(value)


def _without_credentials(text: str) -> str:
    """Hides the user and password of URLs, and values of their queries by name."""
    return _QUERY.sub(_hidden, _CREDENTIALS.sub(LEFT_OUT, text))


def _hidden(found: re.Match[str]) -> str:
    name = unquote(found[1])
    return f"{found[1]}={LEFT_OUT}" if is_secret(name) or _words(name)[-1:] in _SIGNED else found[0]


def _holds_one(name: Any, value: Any) -> bool:
    """A number may be a password but not a token."""
    if not isinstance(name, str) or not is_secret(name) or not value:
        return False
    return isinstance(value, str) or (type(value) is int and _words(name)[-1] in _ALWAYS)


def _words(name: str) -> list[str]:
    return [each.lower() for each in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)]
