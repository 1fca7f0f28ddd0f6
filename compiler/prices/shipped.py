"""Data files shipped with flexspec, found by bare name; any other file by its path."""

from __future__ import annotations

from pathlib import Path


def shipped_names(folder: Path, suffix: str) -> list[str]:
    """Bare names of the folder's files."""
    return sorted(path.stem for path in folder.glob(f"*{suffix}"))


def unknown_words(name_or_path: str) -> tuple[str, str]:
    """(found, fix) of the error for a path or name for which :func:`find_file` finds nothing."""
    path = Path(name_or_path)
    is_path = len(path.parts) > 1 or path.suffix in (".toml", ".json")
    return (
        (f"{name_or_path!r}: does not exist", "check the path") if is_path else (f"{name_or_path!r}", "check the name")
    )


def find_file(name_or_path: str, folder: Path, suffix: str) -> Path | None:
    """The shipped file of this bare name, otherwise the file at this path; None if there is neither."""
    path = Path(name_or_path)
    if path.suffix != suffix and (folder / f"{name_or_path}{suffix}").is_file():
        path = folder / f"{name_or_path}{suffix}"
    return path if path.is_file() else None
