"""Objects behind URLs: ranges of bytes by https or s3."""

__all__: list[str] = []
