"""Makes foreign text safe for a terminal: exceptions, names of metrics and files, values of a config.

A terminal obeys control characters, so they are written out (`\\x1b` for escape), and very long text is cut. The logs
keep it as it was.
"""

from __future__ import annotations

import unicodedata

# Longer text is shown with its beginning and its end: the headline, and the last line of a traceback.
LONGEST, _BEGINNING, _END = 6000, 4000, 1500


def visible(text: str) -> str:
    """Writes out every control character except newlines and tabs."""
    if text.isprintable():
        return text
    return "".join(map(_visible, text.replace("\r\n", "\n")))


def in_a_line(text: str) -> str:
    """Writes out newlines and tabs, too: for a name, or a message that came over the network."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def shown(text: str) -> str:
    """Returns visible text, cut in its middle where it is very long."""
    text = visible(text)
    return text if len(text) <= LONGEST else cut(text, _BEGINNING, _END)


def cut(text: str, beginning: int, end: int) -> str:
    """Returns the beginning and the end of a text with more characters than these."""
    left_out = len(text) - beginning - end
    return (
        text if left_out <= 0 else f"{text[:beginning]}\n... {left_out} characters are left out here ...\n{text[-end:]}"
    )


def brief(text: str, longest: int = 200) -> str:
    """Shortens a value that is quoted in a sentence."""
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


def described(value: object) -> str:
    """Says what was given in place of something else."""
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object of it"
    plain = value is None or isinstance(value, (str, int, float))
    return brief(repr(value), 60) if plain else f"a {type(value).__name__}"


def size(count: float) -> str:
    """Formats a number of bytes: `1.5 MB`."""
    number, prefix = scaled(count / 1000, 1000, "kMGT")
    return f"{count:.0f} B" if count < 1000 else f"{number:.1f} {prefix}B"


def binary_size(count: float) -> str:
    """Formats a number of bytes as memory is counted: `1.50 GiB`."""
    number, prefix = scaled(count / 1024, 1024, "KMGT")
    return f"{count:.0f} B" if count < 1024 else f"{number:.{2 if number < 100 else 1}f} {prefix}iB"


def scaled(number: float, base: int, prefixes: str) -> tuple[float, str]:
    """Returns a number in the unit that fits it, and the prefix of that unit, of which the first is the smallest."""
    for prefix in prefixes[:-1]:
        if number < base:
            return number, prefix
        number /= base
    return number, prefixes[-1]


def _visible(character: str) -> str:
    if character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()
