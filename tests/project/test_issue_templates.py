"""The forms for issues ask for what hsgd's commands really print, and name files that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
FORMS = sorted(set(GITHUB.glob("ISSUE_TEMPLATE/*.yml")) - {GITHUB / "ISSUE_TEMPLATE/config.yml"})
FIELDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}  # of GitHub's form schema


def fields(form: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load(form.read_text())["body"])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_has_what_github_asks_of_it(form: Path) -> None:
    head = yaml.safe_load(form.read_text())
    assert {"name", "description", "labels", "body"} == head.keys()
    assert {field["type"] for field in fields(form)} <= FIELDS
    asked = [field for field in fields(form) if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in asked)
    assert len({field["id"] for field in asked}) == len(asked) > 0
    assert any(field.get("validations", {}).get("required") for field in asked)


def test_commands_and_files_that_the_forms_name_exist() -> None:
    text = "\n".join(path.read_text() for path in GITHUB.rglob("*") if path.is_file())
    for name in set(re.findall(r"\b[\w./]+\.md\b", text)):
        assert (ROOT / name).is_file(), name
    commands = set(re.findall(r"\bhsgd ((?:doctor|status|info)(?: --[\w-]+)*)", text))
    assert {"doctor --json", "status --stacks"} <= commands
    for command in commands:
        verb, *options = command.split()
        done = subprocess.run(
            [sys.executable, "-m", "hsgd", verb, "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0, command
        assert all(option in done.stdout for option in options), command
    targets = set(re.findall(r"`make ([\w-]+)`", text))
    assert targets and all(f"\n{target}:" in (ROOT / "Makefile").read_text() for target in targets)
