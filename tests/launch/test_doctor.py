"""`hsgd doctor`, bare `hsgd` and completion: verdicts, remedies, exit codes, colours."""

from __future__ import annotations

import argparse
import json
import os
import pty
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hsgd.errors import LaunchError, MissingExtra
from hsgd.jobs.environment import launcher_variables
from hsgd.jobs.launch import launch
from hsgd.jobs.stores.sealed_store import JOB_SECRET
from hsgd.tools.cli import completion, make_parser
from hsgd.tools.doctor import checkup, info, probe
from hsgd.tools.status import stacks
from toolkit.processes import launch_environ

__all__: list[str] = []

LIMIT_S = 200
HSGD = [sys.executable, "-m", "hsgd"]


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HSGD, *words],
        env=launch_environ(**environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_hsgd_alone_shows_first_steps() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("hsgd doctor", "hsgd run -np 2 python train.py", "hsgd status"):
        assert command in done.stdout


@pytest.mark.long
def test_the_doctor_tries_shared_memory_and_a_job_here() -> None:
    done = run("doctor", "--json")
    trials = {trial["name"]: trial for trial in json.loads(done.stdout)}
    assert trials["shared memory"]["state"] == "ok", trials["shared memory"]
    assert trials["MPI job"]["state"] == "ok", trials["MPI job"]
    assert done.returncode == any(trial["state"] == "fail" for trial in trials.values())


ANSWERS = {
    "bad": [
        {"name": "torch", "state": "ok", "found": "2.13.0", "remedy": ""},
        {"name": "links", "state": "fail", "found": "no interface is up", "remedy": ""},
    ],
    "well": [{"name": "torch", "state": "ok", "found": "2.13.0", "remedy": ""}],
    "old": [{"title": "torch"}],
}


def test_other_hosts_are_visited_and_their_problems_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for host, answer in ANSWERS.items():
        (tmp_path / host).write_text(json.dumps(answer))
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\nfor word; do host="$last"; last="$word"; done\n'
        f'[ -e "{tmp_path}/$host" ] && exec cat "{tmp_path}/$host"\n'
        'echo "ssh: no route" >&2; exit 255\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = checkup.examine_hosts(["bad", "well", "old", "dark"])
    assert [(trial.name, trial.state, trial.found) for trial in found] == [
        ("bad: links", "fail", "no interface is up"),
        ("well", "ok", "all is well"),
        ("old", "fail", "its hsgd has another version"),
        ("dark", "fail", "ssh: no route"),
    ]


def test_other_hosts_need_an_allocation_or_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM", "PBS", "LSB"))]:
        monkeypatch.delenv(name)
    with pytest.raises(LaunchError, match="name the hosts with -H"):
        checkup.other_hosts()
    monkeypatch.setenv("LSB_MCPU_HOSTS", f"{os.uname()[1]} 2 other 2")
    assert checkup.other_hosts() == ["other"]


def test_a_folder_that_takes_no_sockets_is_named_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    trial = checkup._temporary_folder()
    assert trial.state == "fail" and str(deep) in trial.found
    assert "TMPDIR" in trial.remedy and list(deep.iterdir()) == []


def test_shared_memory_that_fails_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "sums", lambda ranks: probe.Finding(error="no memory for it"))
    trial = checkup._shared_memory()
    assert trial.state == "fail" and trial.found.endswith("no memory for it") and trial.remedy


def test_without_a_launcher_the_way_without_mpi_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise LaunchError("no mpirun was found")

    monkeypatch.setattr(launch, "plan_run", refuse)
    trial = checkup._job()
    assert trial is not None and trial.state == "note"
    assert trial.found == "no mpirun was found" and "torchrun" in trial.remedy


@pytest.mark.parametrize("torch", ["2.13.0", None])
def test_a_machine_without_mpirun_is_usable(
    monkeypatch: pytest.MonkeyPatch, torch: str | None
) -> None:
    def refuse(*_: object) -> None:
        raise launch.NoLauncher("no mpirun was found")

    monkeypatch.setattr(launch, "find_launcher", refuse)
    monkeypatch.setattr(info, "_version", lambda name: torch)
    report = info.Report()
    assert info._add_launcher(report) is None
    assert report.usable and len(report.problems) == 1  # MPI is optional
    assert ("torchrun" in report.problems[0].remedy) == (torch is not None)


def test_stacks_that_nothing_can_read_are_not_called_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*, native: bool) -> None:
        raise MissingExtra("no py-spy")

    monkeypatch.setattr(stacks, "find_reader", refuse)
    trial = checkup._ptrace()
    assert trial.state == "note" and trial.remedy


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("echo; echo 'mpirun refuses to run as root' >&2; exit 1", "OMPI_ALLOW_RUN_AS_ROOT=1"),
        ("echo 'Error: not enough slots' >&2; exit 1", "localhost:2"),
        ("exit 3", "hsgd info"),
    ],
)
def test_a_job_that_fails_has_the_remedy_of_its_message(
    monkeypatch: pytest.MonkeyPatch, words: str, remedy: str
) -> None:
    monkeypatch.setattr(launch, "plan_run", lambda *_: (["sh", "-c", words], {}))
    trial = checkup._job()
    assert trial is not None and trial.state == "fail"
    assert remedy in trial.remedy


def test_a_part_that_is_missing_or_does_not_load_is_not_called_ok() -> None:
    report = info.Report()
    report.fact("MPI", "mpi4py", "4.1.2, does not load")
    report.fact("Python", "torch", "2.13.0")
    states = {trial.name: trial.state for trial in checkup._versions(report)}
    assert (states["mpi4py"], states["torch"], states["h5py"]) == ("note", "ok", "note")


def test_a_store_that_others_reach_is_told_within_such_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (trial := checkup._store()) is not None and trial.state == "ok"
    monkeypatch.setattr(launcher_variables, "torchrun", lambda: object())
    assert (trial := checkup._store()) is not None and trial.state == "note"
    assert "hsgd run" in trial.remedy and "SECURITY.md" in trial.remedy
    monkeypatch.setenv(JOB_SECRET, "5" * 64)
    assert (trial := checkup._store()) is not None and trial.state == "ok"


def test_few_open_files_are_told_in_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (128, 256))
    trial = checkup._open_files()
    assert trial.state == "note" and "256 files: 112 ranks per node" in trial.found
    assert "limits.conf" in trial.remedy


def test_a_list_counts_what_is_to_be_mended() -> None:
    trials = [checkup.Trial("a", "ok", "fine"), checkup.Trial("bb", "fail", "broken", "mend it")]
    assert checkup.lines(trials, coloured=False) == [
        "ok    a   fine",
        "fail  bb  broken",
        "          -> mend it",
        "",
        "1 to fix, 0 worth knowing.",
    ]
    assert "\x1b[31mfail\x1b[0m" in checkup.lines(trials, coloured=True)[1]


@pytest.mark.parametrize(("variable", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_are_for_terminals(variable: dict[str, str], coloured: bool) -> None:
    master, slave = pty.openpty()
    code = (
        "import sys; from hsgd.tools import cli; from hsgd.tools.doctor import checkup\n"
        "checkup.examine = lambda: [checkup.Trial('a', 'ok', 'fine')]\n"
        "sys.exit(cli.main(['doctor']))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=launch_environ(**variable),
            stdout=slave,
            timeout=LIMIT_S,
        )
        shown = os.read(master, 4096).decode()
    finally:
        os.close(master)
        os.close(slave)
    assert done.returncode == 0
    assert ("\x1b[32m" in shown) == coloured


def complete(script: Path, *words: str) -> list[str]:
    quoted = " ".join(f'"{word}"' for word in words)
    code = (
        f'source "{script}"; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _hsgd; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    return done.stdout.split()


def test_bash_completes_commands_their_commands_and_options(tmp_path: Path) -> None:
    script = tmp_path / "hsgd.bash"
    script.write_text(completion.script("bash", make_parser(["data"])))
    (subparsers,) = [
        action
        for action in make_parser(["data"])._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    assert complete(script, "hsgd", "") == [*make_options(), *subparsers.choices]
    assert complete(script, "hsgd", "do") == ["doctor"]
    assert complete(script, "hsgd", "data", "con") == ["convert"]
    assert "--min-np" in complete(script, "hsgd", "run", "--")
    assert complete(script, "hsgd", "completion", "f") == ["fish"]
    assert complete(script, "hsgd", "run", "--launcher", "t") == ["torchrun"]
    assert complete(script, "hsgd", "run", "--launcher", "mpirun", "--min") == ["--min-np"]


@pytest.mark.parametrize("whole", [False, True], ids=["split at =", "whole words"])
def test_values_are_completed_behind_an_equals_sign(tmp_path: Path, whole: bool) -> None:
    """Bash makes "=" a word of its own; zsh does not, nor bash with other COMP_WORDBREAKS."""
    script = tmp_path / "hsgd.bash"
    script.write_text(completion.script("bash", make_parser(["data"])))

    def found(*words: str) -> list[str]:
        split = [part for word in words for part in word.replace("=", "\n=\n").split("\n")]
        split = [part for part in split if part or "=" not in words[-1]]
        return complete(script, "hsgd", "run", *(words if whole else split))

    prefix = "--launcher=" if whole else ""
    assert found("--launcher=t") == [f"{prefix}torchrun"]
    assert found("-np", "2", "--launcher=m") == [f"{prefix}mpirun"]
    assert len(found("--launcher=")) > 1
    assert found("--min-np=") == found("--no-such-option=") == found("--verbose=") == []
    assert found("--launcher=mpirun", "--min") == ["--min-np"]
    assert found("--min-np=2", "python", "--") == []


def test_bash_completes_the_program_of_a_job_as_file_names(tmp_path: Path) -> None:
    script = tmp_path / "hsgd.bash"
    script.write_text(completion.script("bash", make_parser([])))
    for words in (
        ("-np", "2", "python", "--"),
        ("--verbose", "python", "-"),
        ("--", ""),
        ("-H", ""),
        ("-np", "2", "data", "con"),
    ):
        assert complete(script, "hsgd", "run", *words) == [], words


def make_options() -> list[str]:
    return ["--help", "--version"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_every_command(shell: str) -> None:
    text = completion.script(shell, make_parser(["data"]))
    for command in ("doctor", "status", "convert", "--min-np" if shell == "zsh" else "min-np"):
        assert command in text


def test_the_reason_of_a_failed_job_is_its_last_error_and_no_path() -> None:
    trace = (
        'Traceback (most recent call last):\n  File "/root/venv/lib/comm.py", line 3, in <module>\n'
        "    raise ValueError(f\"{x}\")\nModuleNotFoundError: No module named 'foo'\n"
    )
    assert probe._reason(trace, 1) == "ModuleNotFoundError: No module named 'foo'"
    launcher = "-----\nprterun has detected an attempt to run as root.\nThis is unwise.\n-----\n"
    assert probe._reason(launcher, 1) == "prterun has detected an attempt to run as root."
    assert probe._reason("", 7) == "exit code 7"


@pytest.mark.long
def test_sources_in_the_working_directory_do_not_shadow_what_the_doctor_tests(
    tmp_path: Path,
) -> None:
    """In a clone, `python -c` finds the sources, which are not built: children must not."""
    (tmp_path / "hsgd").mkdir()
    (tmp_path / "hsgd" / "__init__.py").write_text("raise ImportError('sources, not built')\n")
    script = tmp_path / "bin" / "hsgd"  # as the console script: its folder is first on the path
    script.parent.mkdir()
    script.write_text("import sys\nfrom hsgd.tools.cli import main\nsys.exit(main())\n")
    done = subprocess.run(
        [sys.executable, str(script), "doctor", "--json"],
        env=launch_environ(),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    trials = {trial["name"]: trial for trial in json.loads(done.stdout)}
    assert trials["shared memory"]["state"] == "ok", trials["shared memory"]
    assert trials["MPI job"]["state"] == "ok", trials["MPI job"]
    assert not any("\0" in trial["found"] for trial in trials.values())


def test_python_m_hsgd_in_a_clone_says_that_sources_are_not_built(tmp_path: Path) -> None:
    # not the native files: as in a clone of which a copy was installed
    package = Path(info.__file__).parents[2]
    leave = shutil.ignore_patterns("*.so", "csrc", "__pycache__")
    shutil.copytree(package, tmp_path / "hsgd", ignore=leave)
    done = subprocess.run(
        [sys.executable, "-m", "hsgd", "doctor"],
        env=launch_environ(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "call hsgd" in done.stderr, done.stderr
