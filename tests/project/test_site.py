"""The site of `make docs` builds without a warning, and its generated pages say all that they are
made from: commands and their options, settings, public names, cases that a benchmark lost.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import pytest

from hsgd.config import Config
from hsgd.tools.cli import make_parser

__all__: list[str] = []

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".ci/site"
BUILD_S = 240.0
# Pages of the reference, the module whose public names they hold, and where else these are told.
REFERENCE = {
    "hsgd": ("hsgd", ("hsgd.world", "hsgd.errors")),
    "torch": ("hsgd.torch", ("hsgd.torch.barrier",)),
    "optim": ("hsgd.optim", ()),
    "io": ("hsgd.io", ()),
}


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as for its neighbours, which import it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    sources, pages = folder / "sources", folder / "pages"
    for command in (
        [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(sources)],
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(pages)],
    ):
        environ = {**os.environ, "DOCS_SOURCES": str(sources), "NO_MKDOCS_2_WARNING": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=BUILD_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return pages


def test_the_site_builds_without_a_warning(site: Path) -> None:
    assert (site / "index.html").exists()


@pytest.mark.parametrize("page", REFERENCE)
def test_the_reference_holds_every_public_function_and_class(site: Path, page: str) -> None:
    module, others = REFERENCE[page]
    html = (site / f"reference/{page}.html").read_text()
    public = importlib.import_module(module)
    missing = [
        name
        for name in public.__all__
        if isinstance(getattr(public, name), type | FunctionType)
        and not any(f'id="{home}.{name}"' in html for home in (module, *others))
    ]
    assert missing == []


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command
                yield from commands(command)


def test_the_page_of_the_command_line_has_every_option() -> None:
    page = tool("reference").cli_page(make_parser(["data"]))
    for command in commands(make_parser(["data"])):
        shown = [action for action in command._actions if action.help != argparse.SUPPRESS]
        options = [name for action in shown for name in action.option_strings]
        missing = {name for name in options if name not in page} - {"-h", "--help"}
        assert not missing, f"{command.prog}: {missing}"


def test_the_page_of_settings_explains_every_variable() -> None:
    page = tool("reference").settings_page(Config)
    rows = dict(re.findall(r"^\| `(HSGD_\w+)` \|.*\| (.+) \|$", page, re.MULTILINE))
    assert rows.keys() == set(Config.variables().values())
    assert all(len(meaning) > 10 for meaning in rows.values())


def test_the_page_of_benchmarks_names_every_case_that_a_peer_wins() -> None:
    runs = sorted((ROOT / "docs/benchmarks").glob("*.json"))
    page = tool("benchmark_page").page(runs)
    assert runs
    for run in runs:
        document = json.loads(run.read_text())
        for key, ratio in document["ratios"].items():
            peer, _, case = key.partition("/")
            if peer not in ("vs_limit", "vs_goal") and ratio < 1:
                assert f"- {case}: {ratio:.2f} ({peer.removeprefix('vs_')})" in page
        assert document["meta"]["commit"][:12] in page
        assert document["meta"]["date"][:10] in page


def test_a_kept_run_names_no_host_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tool("benchmark_page")
    (run,) = [path for path in module.FOLDER.glob("*.json") if path.stem == "allreduce"]
    document = json.loads(run.read_text())
    document["meta"]["host"]["name"] = "frontend7"
    document["meta"]["command"] = ["python", "benchmarks/allreduce.py", "--json", "/scratch/x.json"]
    (tmp_path / "x.json").write_text(json.dumps(document))
    monkeypatch.setattr(module, "FOLDER", tmp_path / "kept")
    kept = module.keep(tmp_path / "x.json", "beside other work").read_text()
    assert "frontend7" not in kept and "/scratch" not in kept
    assert "- Remark: beside other work" in module.page([tmp_path / "kept/allreduce.json"])


def test_a_link_to_a_missing_file_of_the_sources_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("reference", "benchmark_page"):
        tool(name)
    hooks = tool("hooks")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="start/mpi.md"))
    text = (
        "[demo](../../examples/train_digits.py), [gone](../../examples/gone.py), [x](../torch.md)"
    )
    with caplog.at_level(logging.WARNING, "mkdocs.plugins.hsgd"):
        shown = hooks.on_page_markdown(text, page=page)
    assert shown.startswith("demo (`examples/train_digits.py`), ")
    assert shown.endswith("[x](../torch.md)")
    assert [record.getMessage() for record in caplog.records] == [
        "start/mpi.md: there is no ../../examples/gone.py"
    ]
