"""What a training step is made of, for benchmarks/training.py: real parameter shapes, and a small
network with real arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = [
    "CASES",
    "UPDATES",
    "Gradients",
    "Network",
    "bert",
    "build",
    "payload_bytes",
    "resnet50",
]

Shapes = list[tuple[int, ...]]
CASES = {
    "resnet50": "gradients of ResNet-50's 161 tensors, 102 MB",
    "bert": "gradients of BERT-base's 199 tensors, 438 MB",
    "small1000": "gradients of 1000 tensors of 256 floats",
    "cnn": "a small convolutional network on 3x32x32 images, with SGD",
}
UPDATES = {  # with an update by SGD(momentum=0.9, fused=True)
    f"{case}+sgd": f"{CASES[case]}, and the update by SGD with momentum"
    for case in ("resnet50", "bert")
}
IMAGES = 64  # of a step of "cnn", over all ranks


def resnet50() -> Shapes:
    """He et al., "Deep Residual Learning", arXiv:1512.03385, table 1: convolutions without bias,
    each with a batch normalization.
    """
    shapes: Shapes = []

    def convolution(out: int, into: int, size: int) -> None:
        shapes.extend([(out, into, size, size), (out,), (out,)])

    convolution(64, 3, 7)
    into = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(width, into, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:
                convolution(4 * width, into, 1)
            into = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def bert() -> Shapes:
    """Devlin et al., "BERT", arXiv:1810.04805: 12 layers, 768 wide, 30522 words, with a pooler."""
    wide, inner = 768, 3072
    shapes: Shapes = [(30522, wide), (512, wide), (2, wide), (wide,), (wide,)]
    for _ in range(12):
        shapes += [(wide, wide), (wide,)] * 4 + [(wide,), (wide,)]
        shapes += [(inner, wide), (inner,), (wide, inner), (wide,), (wide,), (wide,)]
    return [*shapes, (wide, wide), (wide,)]


class Gradients(nn.Module):
    """A step that only makes gradients: those of `factor`, one tensor after the other."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in shapes])

    def forward(self, factor: Tensor) -> Tensor:
        return torch.stack([(weight * factor).sum() for weight in self.weights]).sum()

    def wrong(self, expected: float) -> str | None:
        """A gradient that is not `expected` everywhere, in words."""
        for number, weight in enumerate(self.weights):
            found = weight.grad
            if found is None or found.numel() == 0 or bool((found != expected).any()):
                return f"gradient {number} is not {expected}"
        return None


class Network(nn.Module):
    """Three convolutions and a layer: milliseconds per step on one core."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.layers(images).logsumexp(1).mean()
        return output


def build(case: str, rank: int, ranks: int) -> tuple[nn.Module, Tensor]:
    """The model of a case, alike on all ranks, and this rank's input."""
    torch.manual_seed(0)
    case = case.removesuffix("+sgd")
    if case == "cnn":
        images = torch.randn(IMAGES, 3, 32, 32)
        return Network(), images[rank * IMAGES // ranks : (rank + 1) * IMAGES // ranks]
    shapes = {"resnet50": resnet50, "bert": bert, "small1000": lambda: [(256,)] * 1000}[case]()
    return Gradients(shapes), torch.tensor(float(rank + 1))


def payload_bytes(case: str) -> int:
    """Gradients of a rank."""
    model, _ = build(case, 0, 1)
    return sum(4 * math.prod(parameter.shape) for parameter in model.parameters())
