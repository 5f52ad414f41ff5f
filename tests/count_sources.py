"""Sizes of the sources at one commit or several, side by side: python tests/count_sources.py A B.

Owns what is counted: files per folder, lines, the longest file, fields of the largest C++ class,
arrows between folders (includes in hsgd/csrc, imports between packages). Only reads git.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import PurePosixPath

__all__: list[str] = []

CODE = {".py", ".pyi", ".cpp", ".hpp", ".h", ".c"}
PARTS = {"product": ("hsgd/", "io/"), "tests": ("tests/",), "benchmarks": ("benchmarks/",)}


def sources_of(commit: str) -> dict[str, str]:
    """The text of each source file at a commit, by name."""
    names = git("ls-tree", "-r", "--name-only", commit).splitlines()
    wanted = [name for name in names if PurePosixPath(name).suffix in CODE]
    wanted = [name for name in wanted if name.startswith(sum(PARTS.values(), ()))]
    batch = "".join(f"{commit}:{name}\n" for name in wanted)
    found = subprocess.run(
        ["git", "cat-file", "--batch"], input=batch.encode(), capture_output=True, check=True
    ).stdout
    texts, at = {}, 0
    for name in wanted:
        end = found.index(b"\n", at)
        size = int(found[at:end].split()[-1])
        texts[name] = found[end + 1 : end + 1 + size].decode()
        at = end + 1 + size + 1
    return texts


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def folder_of(name: str) -> str:
    return str(PurePosixPath(name).parent)


def lines_of(part: str) -> Callable[[dict[str, str]], object]:
    return lambda texts: sum(
        text.count("\n") for name, text in texts.items() if name.startswith(PARTS[part])
    )


def fullest_folder(texts: dict[str, str]) -> str:
    folder, files = Counter(map(folder_of, texts)).most_common(1)[0]
    return f"{files} in {folder}"


def longest_file(texts: dict[str, str]) -> str:
    product = {name: text for name, text in texts.items() if name.startswith(PARTS["product"])}
    name = max(product, key=lambda name: product[name].count("\n"))
    return f"{product[name].count(chr(10))} in {PurePosixPath(name).name}"


def largest_class(texts: dict[str, str]) -> str:
    """Members with a trailing underscore, of C++ classes in headers."""
    fields = Counter[str]()
    for name, text in texts.items():
        if not name.endswith(".hpp"):
            continue
        owner = ""
        for line in text.splitlines():
            if found := re.match(r"class (?:HSGD_API )?(\w+)[^;]*\{", line):
                owner = found[1]
            elif line == "};":
                owner = ""
            elif owner and re.match(r"  [^/(]*\b\w+_(?:\{[^;]*\}| = [^;]*)?;", line):
                fields[owner] += 1
    owner, count = fields.most_common(1)[0]
    return f"{count} in {owner}"


def arrows(texts: dict[str, str]) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Pairs of folders: includes of C++, imports of Python."""
    includes, imports = set(), set()
    modules = {name[:-3].replace("/", "."): folder_of(name) for name in texts if name[-3:] == ".py"}
    for name, text in texts.items():
        if not name.startswith(PARTS["product"]):
            continue
        here = folder_of(name)
        if name.startswith("hsgd/csrc/"):
            for header in re.findall(r'#include "([^"]+)"', text):
                there = f"hsgd/csrc/{folder_of(header)}" if "/" in header else "hsgd/csrc"
                includes |= {(here, there)} - {(here, here)}
        elif name.endswith(".py"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    there = modules.get(node.module.replace("hsgd.io", "io"))
                    imports |= {(here, there)} - {(here, here)} if there else set()
    return includes, imports


ROWS: dict[str, Callable[[dict[str, str]], object]] = {
    "lines of product": lines_of("product"),
    "lines of tests": lines_of("tests"),
    "lines of benchmarks": lines_of("benchmarks"),
    "files": len,
    "folders": lambda texts: len(set(map(folder_of, texts))),
    "fullest folder": fullest_folder,
    "longest file of product": longest_file,
    "most fields of a class": largest_class,
    "include arrows": lambda texts: len(arrows(texts)[0]),
    "import arrows": lambda texts: len(arrows(texts)[1]),
}


def main(commits: list[str]) -> None:
    found = [sources_of(commit) for commit in commits]
    table = [["", *commits], *([name, *(str(row(f)) for f in found)] for name, row in ROWS.items())]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main(sys.argv[1:] or ["HEAD"])
