"""Commands of the repository, run as a user runs them."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*command: str | Path) -> str:
    """What it printed; it must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
