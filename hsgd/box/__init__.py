"""ParameterBox: values that any process may read and add to, on one node and over several."""

__all__: list[str] = []
