"""What takes a while to make and is only read is made once, for all test processes."""

from collections.abc import Callable
from pathlib import Path

MadeOnce = Callable[[str, Callable[[Path], None]], Path]
