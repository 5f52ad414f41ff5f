"""Pages of reference that are written from the code: the command line, and the settings.

Owns the form of both pages. Never changes what it describes; a page is made at each build, so none
is kept that could grow old.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
from collections.abc import Iterator

__all__ = ["cli_page", "settings_page"]


def cli_page(parser: argparse.ArgumentParser) -> str:
    """Each command of a parser: what it does, its usage, its options, its examples."""
    text = ["# Command line", "", f"{parser.description}", ""]
    text += ["| command | what it does |", "|---|---|"]
    commands = [*_commands(parser)]
    text += [f"| [`{name}`](#{_anchor(name)}) | {_cell(about)} |" for name, about, _ in commands]
    for name, about, command in commands:
        text += ["", f"## {name} {{#{_anchor(name)}}}", "", _sentence(command.description or about)]
        usage = " ".join(command.format_usage().split()).removeprefix("usage: ")
        text += ["", "```text", usage, "```", *_options(command)]
        if command.epilog:
            text += ["", "```text", command.epilog.rstrip(), "```"]
    return "\n".join(text) + "\n"


def _commands(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Name, one line and parser of each command, depth first; a group stands for its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                below = [*_commands(command)]
                if below:
                    yield from below
                else:
                    yield command.prog, about.get(name, ""), command


def _options(command: argparse.ArgumentParser) -> list[str]:
    rows = []
    for action in command._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        names = ", ".join(action.option_strings)
        value = "" if action.nargs == 0 else _value(action)
        words = " ".join(word for word in (names, value) if word)
        help_text = (action.help or "") % {**vars(action), "prog": command.prog}
        rows.append(f"| `{_cell(words)}` | {_cell(help_text)} |")
    return ["", "| argument | meaning |", "|---|---|", *rows] if rows else []


def _value(action: argparse.Action) -> str:
    if action.metavar is not None:
        return action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper()


def _anchor(name: str) -> str:
    return name.replace(" ", "-")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def settings_page(config: type) -> str:
    """Each variable HSGD_*: its field, its default, what it takes, what it means."""
    text = [
        "# Settings",
        "",
        "Each environment variable is a field of `hsgd.config.Config`. "
        "[Settings explained](../configuration.md) says more on the choices and on memory.",
        "",
        "| variable | field | default | takes | meaning |",
        "|---|---|---|---|---|",
    ]
    meanings = _field_docs(config)
    for field in dataclasses.fields(config):
        default = int(field.default) if isinstance(field.default, bool) else field.default
        shown = "" if default is None else f"`{default}`"
        variable, expected = field.metadata["variable"], field.metadata["expected"]
        text.append(
            f"| `{variable}` | `{field.name}` | {shown} | {_cell(expected)} | "
            f"{_cell(meanings[field.name])} |"
        )
    return "\n".join(text) + "\n"


def _field_docs(config: type) -> dict[str, str]:
    """The strings that stand below the fields of a class."""
    (body,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(body, ast.ClassDef)
    return {
        node.target.id: str(after.value.value)
        for node, after in zip(body.body, body.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }
