"""`python -m memtriage`: the command `memtriage`."""

import sys

from memtriage.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
