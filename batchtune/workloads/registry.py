"""The built-in workloads by name, and which of them stands in where the user names none."""

from __future__ import annotations

# One line for each: the name after `builtin:`, and the module and class that is imported when it is asked
# for.
BUILTINS: dict[str, str] = {
    "conformer-ctc": "batchtune.workloads.conformer_ctc:ConformerCTC",
    "transformer-lm": "batchtune.workloads.transformer_lm:TransformerLM",
}

_DEFAULTS: dict[str, str] = {
    **dict.fromkeys(("s", "ms", "samples", "frames"), "builtin:conformer-ctc"),
    **dict.fromkeys(("tokens", "words", "characters", "bytes"), "builtin:transformer-lm"),
}


def is_builtin(spec: str) -> bool:
    """Whether a `--workload` value names a built-in, and so no code but batchtune's own."""
    return spec.startswith("builtin:") and spec.removeprefix("builtin:") in BUILTINS


def default_workload(unit: str | None) -> str | None:
    """The built-in workload that fits lengths of this unit, as a `--workload` value.

    Args:
        unit: A manifest's unit, or None where it is unknown.

    Returns:
        `builtin:conformer-ctc` for lengths of sound, `builtin:transformer-lm` for lengths of text, None where
        the unit does not tell.
    """
    return None if unit is None else _DEFAULTS.get(unit)
