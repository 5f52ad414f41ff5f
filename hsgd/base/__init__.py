"""What every wing needs: checks of arguments, the life of objects, facts of the build."""

__all__: list[str] = []
