"""Whether the files of an open artifact still hold what was opened.

Weights are mapped, so what is written into such a file is what the next step computes with, and where a file is cut
there is nothing left to read. Replacing a file or the whole artifact (as ``compile -o`` does) is harmless: what is
mapped stays.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable

from flexspec.compiler.artifact.open import Artifact

PERIOD_S = 5.0


class OpenedFiles:
    """The members of ``artifact`` as they are now, to be asked later. One thread may ask."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._stats = {name: os.stat(artifact.root / name) for name in artifact.manifest.files}

    def changed(self) -> str:
        """The first member written or cut in place since, with what was found; "" if none is.

        A changed time alone is no change: then the contents decide.
        """
        for name, before in self._stats.items():
            try:
                now = os.stat(self._artifact.root / name)
            except OSError:  # removed: what is mapped stays
                continue
            if (now.st_dev, now.st_ino) != (before.st_dev, before.st_ino):
                continue
            if now.st_size != before.st_size:
                return f"{name} has {now.st_size} bytes instead of {before.st_size}"
            if now.st_mtime_ns != before.st_mtime_ns:
                with (self._artifact.root / name).open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest != self._artifact.manifest.files[name].sha256:
                    return f"the contents of {name} changed"
                self._stats[name] = now
        return ""

    def watch(self, on_change: Callable[[str], None], period_s: float = PERIOD_S) -> Callable[[], None]:
        """Ask every ``period_s`` seconds in a thread; the first change is reported once. Returns what ends it."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(period_s):
                if what := self.changed():
                    on_change(what)
                    return

        threading.Thread(target=look, name="artifact-files", daemon=True).start()
        return ended.set
