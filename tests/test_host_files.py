"""Files are whole or absent, whoever else writes them, and what the system refuses is one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flexspec.errors import StorageError
from flexspec.host import cache
from flexspec.host.cache import cache_root, in_cache, temporary_cache, writable_cache
from flexspec.host.files import new_file, new_folder, put_in_place, storage_error, write_file


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan.json"
    write_file(path, "old")
    with pytest.raises(RuntimeError, match="came to a bad end"), new_file(path) as file:
        file.write(b"half")
        raise RuntimeError("came to a bad end")
    assert path.read_text() == "old"
    write_file(path, b"new")
    assert path.read_text() == "new" and os.listdir(path.parent) == ["plan.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_file(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"


def test_a_device_is_written_not_replaced() -> None:
    write_file(Path("/dev/null"), "text")
    assert not Path("/dev/null").is_file()
    with pytest.raises(StorageError, match=r"/dev/full: No space left.*room for 4 bytes"):
        write_file(Path("/dev/full"), "text")


@pytest.mark.parametrize("where", ["taken/x", "taken/deep/x"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path, where: str) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(StorageError, match=r"expected a folder, which .*taken is not\. Fix: choose another path"):
        write_file(tmp_path / where, "text")
    with pytest.raises(StorageError, match="taken"), new_folder(tmp_path / where):
        pass
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_full_disk_is_told_with_what_is_needed_and_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import resource, sys; from pathlib import Path; from flexspec.host.files import write_file\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); write_file(Path(sys.argv[1]), bytes(5000))"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "x"], capture_output=True, text=True)
    assert "FS402" in done.stderr and "5000 bytes" in done.stderr and "bytes free" in done.stderr
    assert os.listdir(tmp_path) == []


def test_writers_who_share_a_process_id_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in containers
    out = tmp_path / "x.fspec"
    with new_folder(out) as first, new_folder(out) as second:
        assert first != second and first.is_dir()  # the second took nothing from the first, which lives
        (first / "a").write_text("first")
        (second / "a").write_text("second")
        put_in_place(first, out)
        put_in_place(second, out)
    assert (out / "a").read_text() == "second" and os.listdir(tmp_path) == ["x.fspec"]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "x.fspec"
    script = (
        "import os, signal, sys; from pathlib import Path; from flexspec.host.files import new_folder\n"
        "with new_folder(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, out], check=False)
    (left,) = tmp_path.iterdir()
    with new_folder(out) as folder:
        assert os.listdir(tmp_path) == [folder.name] and folder != left


def test_many_writers_leave_one_whole_folder(tmp_path: Path) -> None:
    out, failures = tmp_path / "x", list[BaseException]()

    def write(text: str) -> None:
        try:
            for _ in range(20):
                with new_folder(out) as folder:
                    for name in "abc":
                        (folder / name).write_text(text)
                    put_in_place(folder, out)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in "0123"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len({(out / name).read_text() for name in "abc"}) == 1 and os.listdir(tmp_path) == ["x"]


def test_errors_name_the_nearest_folder(tmp_path: Path) -> None:
    denied = storage_error(PermissionError(errno.EACCES, "Permission denied"), tmp_path / "a" / "b")
    assert str(denied) == (
        f"FS402: {tmp_path}/a/b: Permission denied; expected a path that this user can use in {tmp_path}. "
        "Fix: choose another path"
    )


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLEXSPEC_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    cache._instead.cache_clear()


@pytest.mark.usefixtures("_fresh")
class TestCache:
    def test_without_a_home(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        def homeless() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", homeless)
        with pytest.raises(StorageError, match="FLEXSPEC_CACHE"):
            cache_root()
        assert in_cache("cpu", "x") is None
        write_file(writable_cache("cpu") / "x", "made")
        write_file(writable_cache("cpu") / "y", "made")
        assert len(caplog.records) == 1 and "no home" in caplog.text

    @pytest.mark.parametrize("folder", ["/proc/none", "/dev/null/x"])
    def test_that_cannot_be_written(
        self, folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("FLEXSPEC_CACHE", folder)
        write_file(writable_cache("cpu") / "x", "made")
        writable_cache("cpu")
        assert len(caplog.records) == 1 and folder in caplog.text and "FLEXSPEC_CACHE" in caplog.text

    def test_that_is_full(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FLEXSPEC_CACHE", str(tmp_path))
        assert writable_cache("cpu") == tmp_path / "cpu"
        full = StorageError("full", "room", "free some")
        assert not temporary_cache("cpu", full).is_relative_to(tmp_path)

    def test_what_is_there_is_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FLEXSPEC_CACHE", str(tmp_path))
        write_file(writable_cache("cpu") / "x", "made")
        assert in_cache("cpu", "x") == tmp_path / "cpu" / "x" and in_cache("cpu", "y") is None
