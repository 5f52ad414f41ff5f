"""What the benchmarks share: jobs, layouts, turns, ratios, reports.

Puts tests/ on the path, for the virtual nodes of tests/toolkit.
"""

import sys
from pathlib import Path

__all__: list[str] = []

sys.path.append(str(Path(__file__).parents[2] / "tests"))
