"""Parameter shapes of the models whose scaling the ShmCaffe paper studies, and of a small one."""

from __future__ import annotations

from collections.abc import Callable

from harness.steps import resnet50

__all__ = ["MODELS"]

Shapes = list[tuple[int, ...]]


def inception_v1() -> Shapes:
    """Szegedy et al., "Going Deeper with Convolutions", arXiv:1409.4842, table 1, without the
    auxiliary classifiers: convolutions with a bias.
    """
    shapes: Shapes = []

    def convolution(out: int, into: int, size: int) -> None:
        shapes.extend([(out, into, size, size), (out,)])

    for out, into, size in ((64, 3, 7), (64, 64, 1), (192, 64, 3)):
        convolution(out, into, size)
    into = 192
    for one, reduce3, three, reduce5, five, pool in (
        (64, 96, 128, 16, 32, 32),
        (128, 128, 192, 32, 96, 64),
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
        (256, 160, 320, 32, 128, 128),
        (384, 192, 384, 48, 128, 128),
    ):
        convolution(one, into, 1)
        convolution(reduce3, into, 1)
        convolution(three, reduce3, 3)
        convolution(reduce5, into, 1)
        convolution(five, reduce5, 5)
        convolution(pool, into, 1)
        into = one + three + five + pool
    return [*shapes, (1000, into), (1000,)]


def inception_resnet_v2() -> Shapes:
    """Szegedy et al., "Inception-v4, Inception-ResNet", arXiv:1602.07261, with the widths of the
    authors' code: convolutions without bias, each with a batch normalization; the last of a
    residual block has a bias instead.
    """
    shapes: Shapes = []

    def chain(into: int, *layers: tuple[int, int, int]) -> None:
        """Convolutions of (channels, height, width), one behind the other."""
        for out, height, width in layers:
            shapes.extend([(out, into, height, width), (out,), (out,)])
            into = out

    def residual(blocks: int, into: int, *branches: tuple[tuple[int, int, int], ...]) -> None:
        joined = sum(branch[-1][0] for branch in branches)
        for _ in range(blocks):
            for branch in branches:
                chain(into, *branch)
            shapes.extend([(into, joined, 1, 1), (into,)])

    chain(3, (32, 3, 3), (32, 3, 3), (64, 3, 3), (80, 1, 1), (192, 3, 3))
    for branch in (
        [(96, 1, 1)],
        [(48, 1, 1), (64, 5, 5)],
        [(64, 1, 1), (96, 3, 3), (96, 3, 3)],
        [(64, 1, 1)],
    ):
        chain(192, *branch)
    one = ((32, 1, 1),)
    residual(10, 320, one, (*one, (32, 3, 3)), (*one, (48, 3, 3), (64, 3, 3)))
    chain(320, (384, 3, 3))
    chain(320, (256, 1, 1), (256, 3, 3), (384, 3, 3))
    residual(20, 1088, ((192, 1, 1),), ((128, 1, 1), (160, 1, 7), (192, 7, 1)))
    for last in ([(384, 3, 3)], [(288, 3, 3)], [(288, 3, 3), (320, 3, 3)]):
        chain(1088, (256, 1, 1), *last)
    residual(10, 2080, ((192, 1, 1),), ((192, 1, 1), (224, 1, 3), (256, 3, 1)))
    chain(2080, (1536, 1, 1))
    return [*shapes, (1000, 1536), (1000,)]


def vgg16() -> Shapes:
    """Simonyan, Zisserman, arXiv:1409.1556, configuration D."""
    shapes: Shapes = []
    into = 3
    for out, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            shapes.extend([(out, into, 3, 3), (out,)])
            into = out
    for out, into in ((4096, 512 * 7 * 7), (4096, 4096), (1000, 4096)):
        shapes.extend([(out, into), (out,)])
    return shapes


def small() -> Shapes:
    """4 MB in 16 layers, for short runs."""
    return [(256, 256)] * 16


MODELS: dict[str, Callable[[], Shapes]] = {
    "inception_v1": inception_v1,
    "resnet50": resnet50,
    "inception_resnet_v2": inception_resnet_v2,
    "vgg16": vgg16,
    "small": small,
}
