"""Parses the recipe and renders it for each MPI, which finds mistakes of form; builds nothing.

Needs py-rattler-build, of the extra "release".
"""

from __future__ import annotations

from pathlib import Path

import rattler_build

__all__: list[str] = []

HERE = Path(__file__).resolve().parent


def _main() -> None:
    recipe = rattler_build.Stage0Recipe.from_file(HERE / "recipe.yaml")
    variants = rattler_build.VariantConfig.from_file(HERE / "variants.yaml")
    rendered = recipe.render(variants)
    if len(rendered) != len(variants.get_values("mpi")):
        raise SystemExit(f"{len(rendered)} packages, not one for each MPI")
    for each in rendered:
        package = each.recipe.package
        print(f"{package.name} {package.version}: {each.variant}")


if __name__ == "__main__":
    _main()
