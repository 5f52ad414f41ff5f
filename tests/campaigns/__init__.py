"""Campaigns: many jobs of hsgd, each judged, with random faults (chaos) or for hours (soak).

PYTHONPATH=tests python -m campaigns chaos --faults 100 --seed 1
PYTHONPATH=tests python -m campaigns soak --quick
"""

__all__: list[str] = []
