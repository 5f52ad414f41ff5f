"""Completion of the `hsgd` command in bash, zsh and fish, generated from its parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

__all__ = ["SHELLS", "script"]

_BASH = """# hsgd completion bash >> ~/.bashrc
_hsgd() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" option="${{COMP_WORDS[COMP_CWORD - 1]}}"
    local sign="" prefix="" path="" index
    COMPREPLY=()
    # Bash splits "--option=value" into three words, zsh does not.
    case "${{option}} ${{word}}" in
        *" =") sign="=" word="" ;;
        "= "*) sign="=" option="${{COMP_WORDS[COMP_CWORD - 2]}}" ;;
        *" --"*=*) sign="=" option="${{word%%=*}}" prefix="${{word%%=*}}=" word="${{word#*=}}" ;;
    esac
    for ((index = 1; index < COMP_CWORD; index++)); do
        case "${{path}} ${{COMP_WORDS[index]}}" in
            {paths}) path="${{path}} ${{COMP_WORDS[index]}}" ;;
            *) break ;;
        esac
    done
    case "${{path}}" in
        {starters}) for ((; index < COMP_CWORD; index++)); do
            case "${{path}} ${{COMP_WORDS[index]}}" in
                {valued}) [[ "${{COMP_WORDS[index + 1]}}" == "=" ]]; ((index += 2 - $?)) ;;
                "${{path}} --") return ;;
                "${{path}} -"*) ;;
                *) return ;;
            esac
        done ;;
    esac
    case "${{path}} ${{option}}" in
{values}
        {valued}) return ;;
    esac
    [[ -z "${{sign}}" ]] || return
    case "${{path}}" in
{cases}
    esac
}}
complete -o bashdefault -o default -F _hsgd hsgd
"""
_CASE = """        "{path}")
            COMPREPLY=($(compgen -P "${{prefix}}" -W "{words}" -- "${{word}}")){then} ;;"""
_ZSH = "# hsgd completion zsh >> ~/.zshrc\nautoload -U +X bashcompinit && bashcompinit\n"
_FISH = "# hsgd completion fish > ~/.config/fish/completions/hsgd.fish\n"
SHELLS = ("bash", "zsh", "fish")


@dataclass
class _Command:
    """Words that may follow a command, such as " data convert".

    Attributes:
        words: commands below it, long options, and choices of its arguments.
        values: for each option with a value, its choices.
        starts_program: the rest is the command line of a job.
    """

    path: str
    words: list[str] = field(default_factory=list)
    values: dict[str, list[str]] = field(default_factory=dict)
    starts_program: bool = False


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the text to load into a shell of SHELLS; local."""
    commands = [*_commands(parser, "")]
    if shell == "fish":
        return _FISH + "\n".join(line for command in commands for line in _fish(command)) + "\n"
    valued = {f"{c.path} {name}": found for c in commands for name, found in c.values.items()}
    text = _BASH.format(
        paths=_patterns(c.path for c in commands if c.path),
        starters=_patterns(c.path for c in commands if c.starts_program),
        valued=_patterns(valued),
        values="\n".join(
            _CASE.format(path=name, words=" ".join(found), then="; return")
            for name, found in valued.items()
            if found
        ),
        cases="\n".join(
            _CASE.format(path=c.path, words=" ".join(c.words), then="") for c in commands
        ),
    )
    return text if shell == "bash" else _ZSH + text.partition("\n")[2]


def _patterns(texts: Iterable[str]) -> str:
    return "|".join(f'"{text}"' for text in texts)


def _commands(parser: argparse.ArgumentParser, path: str) -> Iterator[_Command]:
    found = _Command(path)
    below: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = action.choices
            found.words += below
        elif action.help != argparse.SUPPRESS:
            choices = [str(choice) for choice in action.choices or ()]
            found.words += [name for name in action.option_strings if len(name) > 2]
            if not action.option_strings:
                found.words += choices
                found.starts_program |= action.nargs == argparse.REMAINDER
            elif action.nargs != 0:
                found.values |= dict.fromkeys(action.option_strings, choices)
    yield found
    for name, command in below.items():
        yield from _commands(command, f"{path} {name}")


def _fish(command: _Command) -> Iterator[str]:
    after = command.path.split()
    seen = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in after)
    test = seen or "__fish_use_subcommand"
    for word in command.words:
        option = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
        if choices := command.values.get(word):
            option += f" -x -a '{' '.join(choices)}'"
        elif word in command.values:
            option += " -r"
        yield f"complete -c hsgd -n '{test}' {option}"
