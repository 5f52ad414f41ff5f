"""Completion of the `hsgd` command in bash, zsh and fish, written from its parser.

Owns the three scripts. Never completes what follows the program of a job, but by file names.
"""

from __future__ import annotations

import argparse

__all__ = ["SHELLS", "script"]

_BASH = """# hsgd completion bash >> ~/.bashrc
_hsgd() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" path="" index
    for ((index = 1; index < COMP_CWORD; index++)); do
        case "${{path}} ${{COMP_WORDS[index]}}" in
            {paths}) path="${{path}} ${{COMP_WORDS[index]}}" ;;
            *) break ;;
        esac
    done
    case "${{path}}" in
{cases}
    esac
}}
complete -o bashdefault -o default -F _hsgd hsgd
"""
_CASE = """        "{path}") COMPREPLY=($(compgen -W "{words}" -- "${{word}}")) ;;"""
_ZSH = "# hsgd completion zsh >> ~/.zshrc\nautoload -U +X bashcompinit && bashcompinit\n"
_FISH = "# hsgd completion fish > ~/.config/fish/completions/hsgd.fish\n"
SHELLS = ("bash", "zsh", "fish")


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The text to load into a shell of SHELLS; local."""
    tree = dict(_tree(parser, ""))
    if shell == "fish":
        return _FISH + "\n".join(_fish(tree)) + "\n"
    cases = [_CASE.format(path=path, words=" ".join(words)) for path, words in tree.items()]
    paths = "|".join(f'"{path}"' for path in tree if path)
    text = _BASH.format(paths=paths, cases="\n".join(cases))
    return text if shell == "bash" else _ZSH + text.partition("\n")[2]


def _tree(parser: argparse.ArgumentParser, path: str) -> list[tuple[str, list[str]]]:
    """Words that may follow each command, " data convert" for instance."""
    words: list[str] = []
    below: list[tuple[str, list[str]]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words += action.choices
            for name, command in action.choices.items():
                below += _tree(command, f"{path} {name}")
        elif action.help != argparse.SUPPRESS:
            words += [name for name in action.option_strings if len(name) > 2]
            if not action.option_strings and action.choices is not None:
                words += map(str, action.choices)
    return [(path, words), *below]


def _fish(tree: dict[str, list[str]]) -> list[str]:
    lines = []
    for path, words in tree.items():
        after = path.split()
        seen = " ".join(f"; and __fish_seen_subcommand_from {name}" for name in after)
        test = seen.removeprefix("; and ") if after else "__fish_use_subcommand"
        for word in words:
            option = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c hsgd -n '{test}' {option}")
    return lines
