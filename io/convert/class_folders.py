"""ClassFolders: folders of images, one for each class, and the other files in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hsgd.errors import DataError

from ..layouts.splits import is_split

__all__ = ["IMAGE_SUFFIXES", "ClassFolders"]

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff"})


@dataclass
class ClassFolders:
    """The class folders in a folder."""

    path: Path
    names: list[str] = field(default_factory=list)  # sorted; a label is an index
    images: list[tuple[Path, int]] = field(default_factory=list)  # and labels, sorted by path
    left_out: dict[str, str] = field(default_factory=dict)  # path -> reason

    def __post_init__(self) -> None:
        """Raise DataError if there are no images, or if the folders are splits of a data set."""
        for entry in sorted(self.path.iterdir()):
            if entry.is_dir():
                self._add_class(entry)
            else:
                self._leave_out(entry, "not in a class folder")
        if not self.images:
            raise DataError(f"{self.path}: no images in class folders, as path/class/image.png")
        self._refuse_splits()

    def _add_class(self, folder: Path) -> None:
        label, before = len(self.names), len(self.images)
        self.names.append(folder.name)
        for entry in sorted(folder.rglob("*")):
            if entry.is_dir():
                if entry.is_symlink():
                    self._leave_out(entry, "a link to a folder inside a class")
            elif entry.suffix.lower() not in IMAGE_SUFFIXES:
                self._leave_out(entry, "no image by its name")
            elif entry.is_file():
                self.images.append((entry, label))
            else:
                self._leave_out(entry, "no file, or a link that leads nowhere")
        if len(self.images) == before:
            self._leave_out(folder, f"a class without images, which keeps the label {label}")

    def _leave_out(self, entry: Path, why: str) -> None:
        self.left_out[entry.relative_to(self.path).as_posix()] = why

    def _refuse_splits(self) -> None:
        used = sorted({self.names[label] for _, label in self.images})
        nested = any(image.parent.parent != self.path for image, _ in self.images)
        if nested and all(map(is_split, used)):
            first = next((name for name in used if name.casefold().startswith("train")), used[0])
            what = "splits" if len(used) > 1 else "a split"
            raise DataError(
                f"{self.path}: its folders are {what} with class folders inside, not classes: "
                f"{', '.join(used)}; convert one at a time, such as {self.path / first}"
            )
