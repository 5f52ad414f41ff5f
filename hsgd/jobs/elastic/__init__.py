"""Elastic jobs: an agent on each node starts and watches the ranks that `hsgd run --min-np` wants.

If ranks are lost or join, the agents form a new world. docs/elastic.md describes all steps.
"""

__all__: list[str] = []
