"""``python -m flexspec`` is the ``flexspec`` command."""

from __future__ import annotations

import sys

from flexspec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
