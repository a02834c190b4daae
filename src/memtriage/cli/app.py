"""The command `memtriage`: hands `run` its arguments unread, and the other sub-commands to their parser."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from memtriage.cli import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 on bad usage and input that cannot be read.

    `run` exits as its script does.

    Args:
        argv: arguments without the program's name; those of this process by default.

    Raises:
        KeyboardInterrupt: Ctrl-C, so that the process ends as the shell expects.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if run.is_run(arguments):
        # Before any parser sees them: what follows the script is the script's own.
        return run.main(arguments)
    # Imported late, as are the commands themselves: `run` must start as fast as the script alone.
    from memtriage.cli.commands import dispatch

    try:
        status = dispatch(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader went away (`| head`). Point stdout elsewhere, or the interpreter complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
