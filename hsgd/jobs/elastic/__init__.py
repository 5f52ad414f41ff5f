"""Elastic jobs: an agent on each node starts and watches ranks, and worlds form anew when some are
lost or join.

Owns the processes of a job that `hsgd run --min-np` started. docs/elastic.md tells the whole way.
"""

__all__: list[str] = []
