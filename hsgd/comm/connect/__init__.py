"""How the ranks of a job connect: through MPI, through a store, through torchrun."""

__all__: list[str] = []
