"""`python -m gpuroute` is the `gpuroute` command."""

from __future__ import annotations

import sys

from gpuroute.cli import main

if __name__ == "__main__":
    sys.exit(main())
