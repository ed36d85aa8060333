"""``python -m wnfused``."""

import sys

from wnfused.cli import main

if __name__ == "__main__":
    sys.exit(main())
