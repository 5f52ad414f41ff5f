"""Random faults at random moments in small jobs of hsgd, and a judge of what came of them.

A case is drawn from its number alone, so that each can be run again. See
docs/internals/reliability.md.
"""

__all__: list[str] = []
