"""The exceptions that a user sees: a message, a hint, an exit code.

Every failure that a user can cause or mend is a `BatchtuneError`; `batchtune.cli` catches it in one place and
prints it. Anything else that escapes is a defect of batchtune.
"""

from __future__ import annotations


class BatchtuneError(Exception):
    """Something went wrong that the user can understand and mend.

    Args:
        message: What is wrong and where (file, line, id).
        hint: What to do about it, a full sentence, or None where the message says all.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(BatchtuneError):
    """The command line, the environment or `[tool.batchtune]` asks for something that has no meaning."""

    exit_code = 2


class ManifestError(BatchtuneError):
    """A source of lengths can't be read as asked."""


class ResultError(BatchtuneError):
    """A result file or run folder is missing, damaged, newer than known, or belongs to other data."""


class WorkloadError(BatchtuneError):
    """The user's workload failed with something that is no lack of memory.

    Args:
        message: What failed (import, `setup`, `make_batch`, `step`) and the error's own first line.
        hint: What to do about it.
        traceback: The last lines of the workload's own traceback, or None.
    """

    def __init__(self, message: str, hint: str | None = None, traceback: str | None = None) -> None:
        super().__init__(message, hint)
        self.traceback = traceback


class ProbeError(BatchtuneError):
    """The probe can't give an answer: nothing fits, or the device can't be used."""
