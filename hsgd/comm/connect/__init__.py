"""Ways to connect the ranks of a job: through MPI, a store, or torchrun."""

__all__: list[str] = []
