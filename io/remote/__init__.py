"""Reading objects behind URLs by ranges, over https or s3."""

__all__: list[str] = []
