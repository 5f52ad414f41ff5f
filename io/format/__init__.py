"""What lies in HDF5 files and slab folders, and where."""

__all__: list[str] = []
