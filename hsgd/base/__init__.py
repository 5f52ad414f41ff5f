"""Base of all packages of hsgd: checks of arguments, closing of objects, facts of the build."""

__all__: list[str] = []
