"""pip_download: packages of the index that tests unpack and do not install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["pip_download"]


def pip_download(folder: Path, *words: str) -> None:
    """Download packages without what they need; `words` are pip's. Raises CalledProcessError."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    subprocess.run([*pip, "--no-deps", "-d", str(folder), *words], check=True, timeout=240)
