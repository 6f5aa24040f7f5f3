"""Programs that tests start."""

import subprocess
import sys


def python(*arguments, **options):
    """Run Python with these arguments; the test fails unless it ends well."""
    words = [sys.executable, *map(str, arguments)]
    ran = subprocess.run(words, capture_output=True, text=True, **options)
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
    return ran
