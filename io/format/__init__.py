"""The format of slab folders, and the examination of HDF5 files."""

__all__: list[str] = []
