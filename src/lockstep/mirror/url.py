"""The URL of a folder in object storage: what it may be, and what it is called in messages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lockstep.config.plain import in_home
from lockstep.errors import ConfigError

# What there is a file system of fsspec's for, and the extra that installs it.
SCHEMES = {"s3": "s3", "gs": "gcs", "file": ""}
_ALIASES = {"s3a": "s3", "gcs": "gs"}


@dataclass(frozen=True)
class Url:
    """`scheme://bucket/prefix`, without a slash at its end and without credentials."""

    scheme: str
    path: str  # bucket and prefix, as fsspec takes them

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    @property
    def bucket(self) -> str:
        """Returns what has to exist before anything is written."""
        return f"{self.scheme}://{self.path.split('/')[0]}" if self.scheme != "file" else str(self)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        return Url(self.scheme, self.path.rpartition("/")[0])

    def __truediv__(self, name: str) -> Url:
        return Url(self.scheme, f"{self.path}/{name}")


def is_url(text: str) -> bool:
    return "://" in text


def place(given: str | Path, setting: str) -> Path | Url:
    """Returns a folder or a URL; `setting` is what named it."""
    text = str(given)
    if is_url(text):
        return parse(text, setting)
    scheme, colon, _ = text.partition(":/")
    if isinstance(given, Path) and colon and _ALIASES.get(scheme, scheme) in SCHEMES and not given.is_absolute():
        raise ConfigError(f"{setting} {text}: a Path cannot hold a URL: give it as text, {scheme}://...")
    try:
        return Path(in_home(text))
    except ValueError as error:
        raise ConfigError(f"{setting} {text}: {error}") from None


def parse(text: str, setting: str) -> Url:
    """Returns the URL of a run's folder; raises ConfigError, which never repeats credentials."""
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ConfigError(f"{setting}: not a URL: {error}") from None
    scheme = _ALIASES.get(parts.scheme, parts.scheme)
    if "@" in parts.netloc:
        raise ConfigError(
            f"{setting} {parts.scheme}://***@{parts.netloc.rpartition('@')[2]}{parts.path}: credentials do not belong "
            "into a URL, which ends up in logs and in the run's folder. Leave them out, and give them by the "
            "environment or by the provider's own configuration (AWS_ACCESS_KEY_ID, ~/.aws, gcloud auth)"
        )
    if scheme not in SCHEMES:
        known = ", ".join(f"{each}://" for each in SCHEMES)
        raise ConfigError(f"{setting} {text}: {scheme}:// is not supported. {known} work")
    path = f"{parts.netloc}{parts.path}".rstrip("/")
    if not path or (scheme != "file" and not parts.netloc):
        raise ConfigError(f"{setting} {text}: names no bucket: {scheme}://BUCKET/PREFIX")
    if scheme == "file" and not path.startswith("/"):
        raise ConfigError(f"{setting} {text}: file:// takes an absolute path, file:///FOLDER")
    names = path.lstrip("/").split("/")
    if any(name in ("", ".", "..") for name in names) or not path.isprintable() or parts.query or parts.fragment:
        raise ConfigError(f"{setting} {text!r}: give a bucket and a prefix, without empty parts, . and .., ? and #")
    return Url(scheme, path)
