"""import hsgd.torch as hvd: all of horovod.torch, with the interposer in front, or a clear
error."""

from __future__ import annotations

from pathlib import Path

import pytest

from site_copy import SiteCopy

pytest.importorskip("torch", reason="torch is not installed: pip install torch")
pytest.importorskip(
    "horovod", reason="Horovod is not installed: python -m hsgd.horovod_wheel --install"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> SiteCopy:
    copy = SiteCopy.make(tmp_path_factory.mktemp("site"))
    copy.compile_counting_interposer()
    return copy


def run(site: SiteCopy, code: str, **environ: str) -> str:
    done = site.python(code, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_every_public_name_of_horovod_torch_is_there_and_is_the_same_object(site: SiteCopy) -> None:
    code = (
        "import hsgd.torch as ours, horovod.torch as theirs\n"
        "names = [name for name in dir(theirs) if not name.startswith('_')]\n"
        "assert len(names) > 50\n"
        "assert set(names) <= set(dir(ours)) and set(names) <= set(ours.__all__)\n"
        "assert all(getattr(ours, name) is getattr(theirs, name) for name in names)\n"
    )
    run(site, code)


def test_submodules_are_horovods_own_and_not_second_copies(site: SiteCopy) -> None:
    code = (
        "import importlib\n"
        "for name in ('mpi_ops', 'compression', 'functions', 'optimizer', 'sync_batch_norm',\n"
        "             'elastic', 'elastic.state', 'elastic.sampler'):\n"
        "    ours = importlib.import_module(f'hsgd.torch.{name}')\n"
        "    assert ours is importlib.import_module(f'horovod.torch.{name}'), name\n"
        "import hsgd.torch.elastic.state\n"
    )
    run(site, code)


def test_an_unknown_name_is_an_attribute_error(site: SiteCopy) -> None:
    code = "import hsgd.torch as hvd\ntry: hvd.nothing\nexcept AttributeError as e: print(e)\n"
    assert "module 'hsgd.torch' has no attribute 'nothing'" in run(site, code)


def test_two_ranks_reduce_through_the_interposer_without_any_flag(
    site: SiteCopy, tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "import torch, hsgd.torch as hvd\n"
        "hvd.init()\n"
        "print(hvd.allreduce(torch.ones(5000), op=hvd.Sum, name='x')[0].item(), flush=True)\n"
        "hvd.shutdown()\n"
    )
    done = site.ranks(2, str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2.0\n") == 2
    assert done.stderr.count("stand-in saw calls") == 2


def test_importing_after_horovod_is_too_late_and_says_so(site: SiteCopy) -> None:
    done = site.python("import horovod.torch, hsgd.torch")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "LaunchError: the interposer came too late" in last
    assert "import hsgd.torch before horovod.torch" in last


def test_importing_after_horovod_is_fine_when_the_plugin_was_on(site: SiteCopy) -> None:
    run(site, "import horovod.torch, hsgd.torch", HOROVOD_PLUGIN="hsgd")


def test_the_interposer_may_be_preloaded_as_well(site: SiteCopy) -> None:
    run(site, "import hsgd.torch", LD_PRELOAD=str(site.interposer))


@pytest.mark.parametrize("package", ["torch", "horovod"])
def test_a_missing_package_is_named_with_its_remedy(site: SiteCopy, package: str) -> None:
    code = (
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda n, *a: None if n == {package!r} else find(n, *a)\n"
        "from hsgd.errors import MissingExtra\n"
        "try: import hsgd.torch\n"
        "except MissingExtra as error: print(isinstance(error, ImportError), error)\n"
    )
    text = run(site, code)
    assert text.startswith("True hsgd.torch needs ")
    assert ("pip install torch" if package == "torch" else "hsgd.horovod_wheel --install") in text
