"""What `make docs` adds to the pages of docs/: generated pages, and links to files of the sources.

Owns the list of generated pages, and the check of links that lead out of docs/: one to a file that
is not there is a warning, which ends the build. Never writes into docs/.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import benchmark_page
import reference

__all__ = ["on_files", "on_page_content", "on_page_markdown"]

ROOT = Path(__file__).resolve().parents[2]
# Files at the top of the sources that are pages of the site.
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(#[^)]*)?\)")
_NOTEBOOK_LINK = re.compile(r'href="((?:\.\./)+[^"#]+)\.md(#[^"]*)?"')
_log = logging.getLogger("mkdocs.plugins.hsgd")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are made from the code, from JSON, and from the top of the sources."""
    from hsgd.config import Config
    from hsgd.tools.cli import make_parser

    runs = sorted((ROOT / "docs/benchmarks").glob("*.json"))
    made = {
        "reference/cli.md": reference.cli_page(make_parser(["data"])),
        "reference/settings.md": reference.settings_page(Config),
        "benchmarks.md": benchmark_page.page(runs),
        **{page: _within_docs((ROOT / name).read_text()) for name, page in PAGES.items()},
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def _within_docs(text: str) -> str:
    """A page of the top of the sources, whose links lead into docs/."""
    return text.replace("](docs/", "](")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links to files of the sources into their names, or into links to their pages."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def replace(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return link[0]
        if not target.exists():
            _log.warning("%s: there is no %s", page.file.src_uri, link[2])
        name = str(target.relative_to(ROOT)) if target.is_relative_to(ROOT) else link[2]
        if name in PAGES:
            up = "../" * page.file.src_uri.count("/")
            return f"[{link[1]}]({up}{PAGES[name]}{link[3] or ''})"
        return f"`{name}`" if link[1] == name else f"{link[1]} (`{name}`)"

    return _LINK.sub(replace, markdown)


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Turn links of notebooks to files of docs/ into links to their pages."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def replace(link: re.Match[str]) -> str:
        if not (folder / f"{link[1]}.md").resolve().exists():
            _log.warning("%s: there is no page %s", page.file.src_uri, link[1])
        return f'href="{link[1]}.html{link[2] or ""}"'

    return _NOTEBOOK_LINK.sub(replace, html)
