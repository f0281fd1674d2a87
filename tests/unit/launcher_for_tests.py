"""Stands for `mfsdp sft` with a small program in torchrun's place: launcher_for_tests.py RUN_DIR FAKE_FILE [--json]

The fake gets the attempt folder as its argument. Runs on its own so that tests can send it real signals.
"""

import os
import signal
import sys
from pathlib import Path

from mfsdp_cli.cli import guarded
from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.launch.folder import open_attempt
from mfsdp_cli.launch.run import run
from mfsdp_cli.launch.start import tell
from mfsdp_cli.output import Console


def main() -> int:
    run_dir, fake = Path(sys.argv[1]), sys.argv[2]
    console = Console(json="--json" in sys.argv)
    settings = SftSettings()
    settings.trainer.output_dir = str(run_dir)
    attempt = open_attempt(run_dir, settings, {})
    with attempt.lock:
        return tell(run([sys.executable, fake, str(attempt.path)], dict(os.environ), attempt, console), console)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores SIGINT, and so would we
    sys.exit(guarded(main, sys.argv[1:]))
