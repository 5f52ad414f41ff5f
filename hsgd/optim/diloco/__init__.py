"""DiLoCo: workers that train on their own and average how far they came, now and then."""

__all__: list[str] = []
