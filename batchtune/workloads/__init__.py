"""Training steps to measure: their interface, the built-in ones by name, options, and the user's code that makes one.

Importing this package does not import torch: a workload's module is imported where the workload is built, which is the
worker process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import inspect
import math
import os
import re
import sys
import sysconfig
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable

import batchtune
from batchtune.errors import (
    BatchtuneError,
    OptionError,
    UsageError,
    WorkloadError,
    did_you_mean,
)
from batchtune.results import BatchShape

if TYPE_CHECKING:
    import torch

_INTEGER = re.compile(r"[+-]?\d+")
_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}


@runtime_checkable
class Workload(Protocol):
    """A training step that can be run at any batch shape.

    The worker process calls `setup` once, then `make_batch` and `step` for one shape after another, larger and smaller
    ones in any order. Between two steps, only parameters, gradients and the optimizer's state may stay in memory: a
    loss or an output that you keep holds its whole graph, and the next shape then measures too large. If memory runs
    out, the step's error must reach the caller unchanged.

    A workload that packs has an attribute `packed = True`. Then a shape is one row: `shape.sequences` holds the lengths
    of its examples, one after the other without padding, and `make_batch` makes exactly that row.
    """

    def setup(self, device: torch.device) -> None:
        """Build the model and its optimizer on the device, once; its memory limit is already in force."""

    def make_batch(self, shape: BatchShape) -> Any:
        """Make a padded batch of exactly this shape, on the device, and return whatever `step` takes.

        The values don't matter, the sizes and types do: make every example as long as the longest, the worst case of
        this shape. `length` and `target_length` (None if the manifest has no second length) are in the manifest's unit,
        such as seconds or tokens; the workload turns them into samples or frames.
        """

    def step(self, batch: Any) -> None:
        """Run one full training step: forward, loss, backward, optimizer step; a batch may come again."""


class Builtin(NamedTuple):
    """A built-in workload."""

    class_name: str  # in `workloads.builtin`, imported when it is asked for
    # Of the lengths that it stands in for if the user names no workload.
    units: tuple[str, ...]
    takes_unit: bool = False  # whether it has an option `unit`


BUILTINS: dict[str, Builtin] = {
    "conformer-ctc": Builtin(
        "ConformerCTC",
        ("s", "ms", "samples", "frames"),
        takes_unit=True,
    ),
    "transformer-lm": Builtin(
        "TransformerLM",
        ("tokens", "words", "characters", "bytes"),
    ),
}


def is_builtin(spec: str) -> bool:
    """Return whether a `--workload` value names a built-in, and so no code but batchtune's own."""
    return spec.startswith("builtin:") and spec.removeprefix("builtin:") in BUILTINS


def default_workload(unit: str | None) -> str | None:
    """Return the `--workload` value of the built-in that fits lengths of this unit; None if the unit is unknown."""
    for name, builtin in BUILTINS.items():
        if unit in builtin.units:
            return f"builtin:{name}"
    return None


def with_unit(
    spec: str, options: Mapping[str, Any], unit: str | None
) -> dict[str, Any]:
    """Return a workload's options, with the unit of the lengths if it is a built-in that takes one."""
    if (
        unit is None
        or not is_builtin(spec)
        or not BUILTINS[spec.removeprefix("builtin:")].takes_unit
    ):
        return dict(options)
    return {**options, "unit": options.get("unit", unit)}


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Read `--set key=value` options: `["layers=12", "dtype=bf16", "checkpoint=true"]`.

    `true`, `false` and `none` in any case are Python's; other values are an int, a float or the text itself. Raises
    UsageError for a pair without `=` or a key, or a repeated key.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals_sign, text = pair.partition("=")
        key = key.strip()
        if not equals_sign or not key:
            raise UsageError(
                f"{pair!r} is not a workload option",
                "Write key=value, such as layers=12.",
            )
        if key in options:
            raise UsageError(
                f"the workload option {key!r} is set twice", f"Keep one --set {key}=..."
            )
        text = text.strip()
        if text.lower() in _WORDS:
            options[key] = _WORDS[text.lower()]
        elif _INTEGER.fullmatch(text):
            options[key] = int(text)
        elif _DECIMAL.fullmatch(text):
            options[key] = float(text)
            if math.isinf(options[key]):
                raise UsageError(
                    f"{pair!r} is larger than any float", "Write a smaller number."
                )
        else:
            options[key] = text
    return options


# The user's code: from `--workload` to a workload object, and the part of a traceback that is the user's.

_FORMS = "Write path/to/file.py:NAME or package.module:NAME."
_METHODS = ("setup", "make_batch", "step")
# Begins the name of a user's module whose own name another module has.
_OTHER_NAME = "batchtune_workload_"
_LAST_LINES = 15
_LONGEST_LINE = 1000
# Of an OutOfMemoryError; torch gives it even where expandable segments are on.
_TORCHS_ADVICE = re.compile(r"\s*If reserved but unallocated memory is large try .*")

_OURS = str(Path(batchtune.__file__).parent)
_STANDARD = sysconfig.get_path("stdlib")
_PACKAGES = {"site-packages", "dist-packages"}

# A traceback's frames.
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)(?:\n {4}.*)*$', re.MULTILINE)
# A stack of faulthandler's, the innermost frame first.
_STACK_HEAD = "(most recent call first):\n"
_STACK_LINE = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def load_workload(spec: str, options: Mapping[str, Any]) -> Workload:
    """Import the code that `spec` names and call it with the options; return the workload, not yet set up.

    This runs the user's code and may import torch: call it in the worker process only. The folder of a file, or the
    working folder if the package is in it, is put first on `sys.path` and stays there, for imports inside the
    workload's methods.
    Raises OptionError if an option is wrong, WorkloadError for the spec, the user's code or what it returns.
    """
    target = load_function(spec, options)
    try:
        workload: Workload = target(**options)
    except BatchtuneError:
        raise
    except (Exception, SystemExit) as error:
        if spec.startswith("builtin:") and isinstance(error, ValueError):
            raise OptionError(f"{spec}: {error}", "Change that --set option.") from None
        raise WorkloadError(
            f"{spec} can't be built: {first_line(error)}",
            "The error was raised when it was called with the --set options.",
            user_traceback(error),
        ) from error
    missing = [
        method for method in _METHODS if not callable(getattr(workload, method, None))
    ]
    if missing:
        raise WorkloadError(
            f"{spec} gives a {type(workload).__name__} without {', '.join(missing)}: that is not a workload",
            "A workload has the methods setup(device), make_batch(shape) and step(batch).",
        )
    return workload


def load_function(
    spec: str, options: Mapping[str, Any], *, given: Collection[str] = ()
) -> Callable[..., Any]:
    """Import the class or function that `spec` names, as `load_workload` does, and check that it takes the options.

    `given` are the names of further arguments that it will be called with.
    """
    location, _, name = spec.rpartition(":")
    if location != "builtin" and not (location and name.isidentifier()):
        raise WorkloadError(
            f"{spec!r} names no class or function",
            f"Did you mean builtin:{spec}?" if spec in BUILTINS else _FORMS,
        )
    target = load_object(location, name)
    if not callable(target):
        raise WorkloadError(
            f"{name} in {location} is of type {type(target).__name__}, but a class or a function is needed",
            "Name the class, or a function that returns what is needed.",
        )
    _check_options(spec, target, options, given)
    return cast("Callable[..., Any]", target)


def spec_of(target: object) -> str:
    """Return the `--workload` value that names a class or function: the inverse of `load_function`.

    Raises WorkloadError if the worker process, which imports it anew, would not find it.
    """
    name = getattr(target, "__qualname__", type(target).__name__)
    module = inspect.getmodule(target)
    file = getattr(module, "__file__", None) or ""  # of standard input: `<stdin>`
    if not file.endswith(".py") or getattr(module, name, None) is not target:
        raise WorkloadError(
            f"{name} can't be imported from a file, and the probe runs it in another process",
            f"Define it at the top level of a file (in a notebook: %%writefile step.py), and give 'step.py:{name}'.",
        )
    assert module is not None
    if "." in module.__name__:  # in a package, whose modules may import each other
        return f"{module.__name__}:{name}"
    return f"{os.path.relpath(file)}:{name}"


def load_object(location: str, name: str) -> Any:
    """Import a built-in, a file or a package's module, and return its attribute `name`."""
    if location == "builtin":
        if name not in BUILTINS:
            raise WorkloadError(
                f"unknown built-in workload {name!r}",
                f"{did_you_mean(name, BUILTINS)}Built in: {', '.join(sorted(BUILTINS))}.",
            )
        from batchtune.workloads import builtin

        return getattr(builtin, BUILTINS[name].class_name)
    try:
        code = (
            _import_file(Path(location))
            if location.endswith(".py")
            else _import_module(location)
        )
    except BatchtuneError:
        raise
    # A script without a main guard leaves with SystemExit.
    except (
        Exception,
        SystemExit,
    ) as error:
        raise WorkloadError(
            f"{location} can't be imported: {first_line(error)}",
            "The error is in that code or in what it imports; a module is looked for in the working folder too.",
            user_traceback(error),
        ) from error
    if hasattr(code, name):
        return getattr(code, name)
    names = [name for name in vars(code) if not name.startswith("_")]
    raise WorkloadError(
        f"{location} has no {name!r}", did_you_mean(name, names) + _FORMS
    )


def _import_file(path: Path) -> ModuleType:
    if not path.exists():
        raise WorkloadError(f"{path} does not exist", _FORMS)
    if not path.is_file():
        raise WorkloadError(f"{path} is not a file", _FORMS)
    path = path.resolve()
    _put_first(str(path.parent))
    # Under its own name, so that a spawned process can import it too, unless that hides another module: `random.py`.
    module_name = path.stem
    others = [folder for folder in sys.path if folder != str(path.parent)]
    is_known = module_name in {*sys.modules, *sys.builtin_module_names}
    if is_known or PathFinder.find_spec(module_name, others):
        module_name = f"{_OTHER_NAME}{module_name}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a class's module up there.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _import_module(location: str) -> ModuleType:
    if not all(part.isidentifier() for part in location.split(".")):
        raise WorkloadError(f"{location!r} is neither a .py file nor a module", _FORMS)
    importlib.invalidate_caches()
    package = location.partition(".")[0]
    working_folder = os.getcwd()
    here = PathFinder.find_spec(package, [working_folder])
    # A folder of data may have the name of an installed package: without an __init__.py it is the last choice.
    if here is not None and (
        here.origin is not None or PathFinder.find_spec(package) is None
    ):
        _put_first(working_folder)
    return importlib.import_module(location)


def _put_first(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _check_options(
    spec: str, target: Any, options: Mapping[str, Any], given: Collection[str]
) -> None:
    """Check the options against the signature, so that the error for a wrong one lists those that exist.

    What is `given` may be left out of the options, and by the signature.
    """
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return  # written in C: the call itself will fail
    parameters = signature.parameters.keys()
    try:
        signature.bind(**{**options, **dict.fromkeys(parameters & given)})
    except TypeError as error:
        names = ", ".join(parameters) or "no options"
        raise OptionError(
            f"the options of {spec}: {error}", f"It takes {names}."
        ) from None


def user_traceback(error: BaseException) -> str:
    """Return the last lines of an exception's traceback, with the user's own frames, and its message.

    If no frame is the user's (an installed package is the workload), those of other packages stay.
    """
    report = traceback.TracebackException.from_exception(error)
    report.stack = _users_frames(report.stack)
    return _last_lines("".join(report.format()))


def user_stack(output: str) -> str:
    """Return the user's own frames of the last stack that faulthandler printed, the innermost last; empty without one.

    If no frame is the user's, those of other packages stay.
    """
    printed = output.rpartition(_STACK_HEAD)[2]
    frames = [
        traceback.FrameSummary(name, int(line), function)
        for name, line, function in _STACK_LINE.findall(printed)
    ]
    return _last_lines("".join(_users_frames(frames[::-1]).format()))


def last_frame(stack: str) -> str:
    """Name the innermost frame of a stack from `user_stack`: `train.py, line 12, in setup`."""
    name, line, function = _FRAME.findall(stack)[-1]
    return f"{Path(name).name}, line {line}, in {function}"


def first_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    name = type(error).__name__
    lines = []
    with contextlib.suppress(Exception):  # its own __str__ fails
        lines = str(error).strip().splitlines()
    if not lines:
        return name
    return _clipped(f"{name}: {_TORCHS_ADVICE.sub('', lines[0])}")


def _clipped(line: str) -> str:
    """Return a line with lone surrogates escaped, cut to 1,000 characters."""
    text = line.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}…"


def _last_lines(text: str) -> str:
    return "\n".join(_clipped(line) for line in text.splitlines()[-_LAST_LINES:])


def _users_frames(stack: Iterable[traceback.FrameSummary]) -> traceback.StackSummary:
    """Return the user's own frames; without any, all frames but batchtune's."""
    not_ours = [
        frame for frame in stack if not frame.filename.startswith((_OURS, "<frozen"))
    ]
    users = [
        frame
        for frame in not_ours
        if not frame.filename.startswith(_STANDARD)
        and not _PACKAGES.intersection(Path(frame.filename).parts)
    ]
    return traceback.StackSummary.from_list(users or not_ours)


# The parameters that a workload trains: found by their optimizers, wherever these are.


def live_objects(kind: type) -> list[Any]:
    """Return all live objects of a kind."""
    # By type, not isinstance, which asks an object for its __class__: a lazy module would import things to answer.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


def trained_parameters() -> list[torch.Tensor]:
    """Return the parameters of all live optimizers, each once; without an optimizer, all live parameters."""
    import torch
    from torch.nn.parameter import is_lazy

    optimizers = live_objects(torch.optim.Optimizer)
    trained = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            trained += group["params"]
    if not optimizers:
        trained = live_objects(torch.nn.Parameter)
    each_once = {id(parameter): parameter for parameter in trained}.values()
    return [
        parameter
        for parameter in each_once
        if parameter.requires_grad and not is_lazy(parameter) and _is_held(parameter)
    ]


def training_gpu() -> int | None:
    """Return which GPU holds most of what is trained, torch's current one if none does; None before CUDA is used."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    trained: Counter[int] = Counter()
    for parameter in trained_parameters():
        if parameter.device.type == "cuda":
            trained[parameter.device.index] += parameter.numel()
    if not trained:
        return torch.cuda.current_device()
    return max(trained, key=trained.__getitem__)


def _is_held(parameter: torch.Tensor) -> bool:
    """Return whether its values are in memory: FSDP frees those of whole parameters between steps."""
    values = own_part(parameter)
    return values.numel() == 0 or values.untyped_storage().size() > 0


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values; of a sharded one this rank's alone, because all of them would take a collective."""
    values = parameter.detach()
    if hasattr(values, "to_local"):
        own: torch.Tensor = values.to_local()
        return own
    return values


def gradient_bytes() -> int:
    """Return the bytes of the gradients of what the workload trains, which DDP's gradient buckets take too.

    (DDP keeps its buckets in addition to the gradients unless given `gradient_as_bucket_view=True`:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.)
    """
    gc.collect()  # drop what is no longer trained
    return sum(
        parameter.numel() * parameter.element_size()
        for parameter in trained_parameters()
    )


def drop_gradients() -> None:
    """Free the last step's gradients, as the next step will; keep a view, whose memory is a buffer's.

    Until then an allocator can't free the blocks that hold them: the next shape would run next to
    the last one's.
    """
    for parameter in trained_parameters():
        if parameter.grad is not None and not parameter.grad._is_view():
            parameter.grad = None


class TrainingCheck:
    """Tells whether any step so far has changed a parameter, without keeping one alive or copying it.

    An operation in place raises a tensor's version, but neither a write to `parameter.data` nor a CUDA graph does. So
    where no version has risen, the sums of the values are compared from then on.
    """

    def __init__(self) -> None:
        """Begin before the first step, once the workload is built."""
        self._before = [
            (weakref.ref(parameter), parameter._version)
            for parameter in trained_parameters()
        ]
        self._sums: list[float] | None = None
        self._has_changed = False

    def has_changed(self) -> bool | None:
        """Return whether a parameter has changed by now; None if that is not known, or not known yet."""
        import torch

        if self._has_changed:
            return True
        sums = []
        for reference, version in self._before:
            parameter = reference()
            if parameter is None:  # replaced by another
                return None
            if parameter._version != version:
                self._has_changed = True
                return True
            # There may be no memory left, or a tensor of a kind that has no sum.
            with contextlib.suppress(Exception):
                if _is_held(parameter):
                    sums.append(float(own_part(parameter).sum(dtype=torch.float64)))
        # Without any, all were made in a step.
        if not sums or len(sums) < len(self._before):
            return None
        if self._sums is None:
            self._sums = sums
            return None
        self._has_changed = sums != self._sums
        return self._has_changed
