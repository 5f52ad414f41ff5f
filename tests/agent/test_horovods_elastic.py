"""Horovod's own elastic examples for PyTorch run unedited by `hsgd run --horovod --min-np`.

They are no part of Horovod's distribution: its folder examples/elastic/pytorch of version 0.28.1 is
looked for in horovod-examples, in the cache folder of hsgd. torchvision is a stand-in: images that
are made up, a small network, and the fault, at the same sample in each run.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hsgd.jobs.launch.horovod_wheel import cache_folder
from site_copy import installed_environ
from toolkit.processes import run_marked

__all__: list[str] = []

pytestmark = pytest.mark.long

JOB_S = 240.0
EXAMPLES = cache_folder(None).parent / "horovod-examples"
FAULT = """
import os
import signal

left = int(os.environ["FAULT_AFTER"])

def one_more():
    global left
    left -= 1
    if left == 0 and os.environ["RANK"] == os.environ["FAULT_OF_RANK"]:
        try:
            os.close(os.open(os.environ["FAULT_DONE"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return  # a rank that was started in place of the lost one
        os.kill(os.getpid(), signal.SIGKILL)
"""
DATASETS = """
import torch
from torchvision import fault

class MNIST:
    def __init__(self, root, train=True, download=False, transform=None):
        draw = torch.Generator().manual_seed(int(train))
        self.count = 1024 if train else 256
        self.targets = torch.randint(10, (self.count,), generator=draw)
        patterns = torch.rand(10, 28, 28, generator=torch.Generator().manual_seed(2)).round()
        noise = torch.rand(self.count, 28, 28, generator=draw)
        self.images = 0.7 * patterns[self.targets] + 0.3 * noise
        self.train, self.transform = train, transform

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.train:
            fault.one_more()
        return self.transform(self.images[index]), int(self.targets[index])
"""
TRANSFORMS = """
def Compose(transforms):
    def call(image):
        for transform in transforms:
            image = transform(image)
        return image
    return call

def ToTensor():
    return lambda image: image[None]

def Normalize(mean, std):
    return lambda image: (image - mean[0]) / std[0]
"""
MODELS = """
import torch
from torchvision import fault

class resnet50(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 16, stride=16)
        self.last = torch.nn.Linear(8, 1000)

    def forward(self, images):
        fault.one_more()
        return self.last(self.first(images).relu().mean((2, 3)))
"""
STAND_IN = {
    "__init__": "",
    "fault": FAULT,
    "datasets": DATASETS,
    "transforms": TRANSFORMS,
    "models": MODELS,
}
PROGRAMS = {
    "pytorch_mnist_elastic": (
        ("--epochs", "3", "--batch-size", "32", "--lr", "0.05"),
        700,  # images: in the second epoch
        r"Test set: Average loss: [\d.]+, Accuracy: (?:9\d|100)\.\d\d%",
    ),
    "pytorch_synthetic_benchmark_elastic": (
        ("--batch-size", "4", "--num-iters", "4"),
        25,  # steps: in the second iteration
        r"Total img/sec on [12] CPU\(s\): \d+",
    ),
}


@pytest.mark.suites
@pytest.mark.skipif(
    not EXAMPLES.is_dir(),
    reason=f"put examples/elastic/pytorch of Horovod 0.28.1 into {EXAMPLES}",
)
@pytest.mark.parametrize("lost", ["none", "0", "1"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_example_comes_to_its_end(tmp_path: Path, program: str, lost: str) -> None:
    options, after, told = PROGRAMS[program]
    (tmp_path / "torchvision").mkdir()
    for name, text in STAND_IN.items():
        (tmp_path / "torchvision" / f"{name}.py").write_text(text)
    done = tmp_path / "done"
    environ = installed_environ(HSGD_AS_HOROVOD="force", PYTHONUNBUFFERED="1")
    environ["PYTHONPATH"] = f"{tmp_path}:{environ.get('PYTHONPATH', '')}"
    environ |= {"FAULT_OF_RANK": lost, "FAULT_AFTER": str(after), "FAULT_DONE": str(done)}
    words = [sys.executable, "-m", "hsgd", "run", "--horovod", "-np", "2", "--min-np", "1"]
    ended = run_marked(
        [*words, sys.executable, str(EXAMPLES / f"{program}.py"), *options], environ, JOB_S
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert re.search(told, ended.stdout), ended.stdout[-3000:]
    assert done.exists() == (lost != "none")
    assert ("was ended by SIGKILL" in ended.stderr) == (lost != "none")
    assert ("world 2: " in ended.stderr) == (lost != "none")
