"""The page of what happens if ranks disagree: each of its rows is shown by a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "disagreement.md").read_text()
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| (?!call )", line)]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_a_test(row: str) -> None:
    *_, named = row.strip("| ").split(" | ")
    path, _, name = named.strip("`").partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    "name",
    [
        *("hsgd.Comm", "NotifiedWindow", "ParameterBox.over", "hvd.DistributedOptimizer"),
        *("DiLoCo", "Gossip", "ElasticAveraging", "NotifiedTree", "node_shared"),
        *("torch.distributed", "PartitionedLoader", "interposer", "hvd.allreduce"),
    ],
)
def test_each_entry_point_has_a_row(name: str) -> None:
    assert any(name in row for row in ROWS)
