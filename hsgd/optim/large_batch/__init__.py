"""Optimizers and schedules for large batches: LARS, LAMB, warm-up and polynomial decay."""

__all__: list[str] = []
