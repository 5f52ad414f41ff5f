"""The job of this process: what its launcher says, where its ranks meet, how it ends."""

__all__: list[str] = []
