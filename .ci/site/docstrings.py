"""Docstrings of hsgd for the site: lines that explain an argument become items of a list.

Owns this one change, made for griffe, which reads the sources for mkdocstrings. Never imports hsgd.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["ArgumentLists"]

_ARGUMENT = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*): (?=\S)")


def as_list(text: str) -> str:
    """`name: what it is` at the margin, with indented lines below it, as an item."""
    lines, in_list = [], False
    for line in text.split("\n"):
        item = _ARGUMENT.match(line)
        if item:
            lines += ([] if in_list else [""]) + [f"- `{item[1]}`: {line[item.end() :]}"]
        elif in_list and line and not line.startswith(" "):
            lines += ["", line]
        else:
            lines.append(line)
        in_list = bool(item) or (in_list and line.startswith(" "))
    return "\n".join(lines)


class ArgumentLists(griffe.Extension):
    """Rewrites each docstring when its object was read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_list(obj.docstring.value)
