"""What the processes of a script print at their end that were not measured, and what it means."""

from __future__ import annotations

import re

NO_STEP = "ended, and no optimizer stepped after any of its"
"""Is said of batches of loaders: the process may only help the one that trains."""
NO_LOADER = "iterated over no torch DataLoader in its first"
"""Is said of the optimizer steps of a process that was ended, as it trains without one."""

_HINTS = {
    NO_LOADER: "batchtune gives a script its batches through a torch DataLoader. Describe the training step to it "
    "instead, as a class with setup, make_batch and step: --workload FILE:NAME.",
    NO_STEP: "Its training loop must call step() of a torch optimizer after a batch of a DataLoader. Is its loss "
    "finite?",
}


def meaning(output: str, *, failed: bool) -> tuple[str, str] | None:
    """Return what was said last in the output of a script, which may have `failed`, and a hint; None without it."""
    for words, hint in _HINTS.items():
        said = re.findall(rf"batchtune: (.*{words}.*)$", output, re.MULTILINE)
        if said and (words == NO_LOADER or not failed):
            return said[-1], hint
    return None
