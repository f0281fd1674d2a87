"""The console script, and `python -m mfsdp_cli`: what keeps its start and its end short."""

import gc
import os
import sys
import threading
from atexit import _run_exitfuncs as run_exit_functions


def main() -> None:
    """Run the command line and leave with its exit code."""
    # Nearly all that a start makes lives to its end: looking through it for garbage a hundred times took a tenth of the time of --help.
    gc.set_threshold(100_000)
    from mfsdp_cli import cli

    try:
        cli.main()
    except SystemExit as end:
        if threading.active_count() > 1:
            raise
        # Python would take its modules apart one by one, a fifth of the time of --help. Nothing is left that needs it: files are
        # closed by the blocks that opened them.
        run_exit_functions()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(end.code or 0)


if __name__ == "__main__":
    main()
