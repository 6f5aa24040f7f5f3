"""Build the emulated CUDA device for this Python's CUDA build of torch: `python build.py FOLDER`.

One library holds all functions. It also stands under the file names of NVIDIA's libraries, none of which is needed.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
LIBRARY = "libemulatedcuda.so"
TOOLS = ("gcc", "nm", "objdump")
COMPILER = (
    "gcc",
    "-O2",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Wno-missing-field-initializers",
)

NVIDIAS_FILE = re.compile(r"lib(cu[a-zA-Z]+|nccl|nvrtc|nvshmem_host)\.so\.\d+")
LOADED_AT_RUN_TIME = {"libcuda.so.1", "libnvidia-ml.so.1"}
NVIDIAS_FUNCTION = re.compile(
    r"(__cuda|cu[A-Z]|cuda|cublas|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|nccl|nvrtc|nvshmem)\w+"
)
# A function that SOURCE lacks succeeds without doing anything, unless its name says better.
PRODUCT = re.compile(r"cublas(?!Lt)\w*[gG]emm\w*")
RETURNS_TEXT = re.compile(r"\w+(String|Name)")
SUCCESS = 0
NOT_SUPPORTED = 801  # cudaErrorNotSupported
REFUSES = re.compile(
    r"cuda(Graph|Ipc|Library)\w+|cu(Module|Link|Launch)\w+|cu(solver|sparse)\w+[bB]ufferSize\w*"
)


def torch_libraries():
    """The libraries of torch's CUDA build; none where another build is installed, or no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    libraries = Path(spec.origin).parent / "lib"
    if not (libraries / "libtorch_cuda.so").exists():
        return []
    return sorted(libraries.glob("*.so*"))


def what_is_missing():
    """Why the device can't be built here; None if it can."""
    if not torch_libraries():
        return "needs the CUDA build of torch (.ci/cuda)"
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"needs {tool}"
    return None


def build(folder):
    """Compile into a folder; return the environment variables that show the device to a process."""
    compile_into(folder)
    return environment(folder)


def compile_into(folder):
    """Make the library, and NVIDIA's file names for it.

    Raises:
        FileNotFoundError: gcc or one of binutils is missing.
        subprocess.CalledProcessError: one of them failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    libraries = torch_libraries()
    with ThreadPoolExecutor() as pool:
        objects = list(
            pool.map(partial(compile_source, folder=folder), SOURCE.glob("*.c"))
        )
        headers = list(pool.map(header, libraries))
        imported = set[str]().union(*pool.map(imported_functions, libraries))
    missing = imported - defined_functions(objects)
    generated = folder / "generated.c"
    generated.write_text("\n".join(map(definition, sorted(missing))) + "\n")
    objects.append(compile_source(generated, folder))
    link(objects, versions(headers), folder / LIBRARY)
    for name in file_names(headers):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(LIBRARY)


def environment(folder):
    """The environment variables that show a process the device that was built into a folder."""
    search_path = filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")])
    return {
        # Wheels of NVIDIA's libraries, where there are some, would come before the search path.
        "LD_PRELOAD": str(folder / LIBRARY),
        "LD_LIBRARY_PATH": os.pathsep.join(search_path),
    }


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compile_source(source, folder):
    compiled = folder / f"{source.stem}.o"
    subprocess.run([*COMPILER, "-c", source, "-o", compiled], check=True)
    return compiled


def header(library):
    """The files that a library needs, and the versions that it needs of them."""
    return output("objdump", "-p", library)


def imported_functions(library):
    names = output(
        "nm", "-D", "--undefined-only", "--without-symbol-versions", library
    ).split()
    return {name for name in names if NVIDIAS_FUNCTION.fullmatch(name)}


def defined_functions(objects):
    return set(output("nm", "--extern-only", "--defined-only", *objects).split())


def definition(name):
    """A function that nobody wrote, in C."""
    if PRODUCT.fullmatch(name):
        return (
            "int emulated_product(void *, int, int, int, int, int);\n"
            f"int {name}(void *handle, int a, int b, int m, int n, int k)"
            " { return emulated_product(handle, a, b, m, n, k); }"
        )
    if RETURNS_TEXT.fullmatch(name):
        return f'const char *{name}(void) {{ return "emulated"; }}'
    result = NOT_SUPPORTED if REFUSES.fullmatch(name) else SUCCESS
    body = f'trace("skips", "{name}"); return {result};'
    return f"void trace(const char *, const char *);\nlong {name}(void) {{ {body} }}"


def file_names(headers):
    needed = re.findall(r"NEEDED\s+(\S+)", "".join(headers))
    return LOADED_AT_RUN_TIME.union(filter(NVIDIAS_FILE.fullmatch, needed))


def versions(headers):
    """The names of the versions that are needed of NVIDIA's libraries."""
    found = set[str]()
    for text in headers:
        for file, names in re.findall(r"required from (\S+):\n((?:    .*\n)+)", text):
            if NVIDIAS_FILE.fullmatch(file):
                found.update(line.split()[-1] for line in names.splitlines())
    return found


def link(objects, versions, library):
    """Link the library; it has the versions, but no function needs one."""
    script = library.with_suffix(".map")
    script.write_text("".join(f"{version} {{ }};\n" for version in sorted(versions)))
    options = ["-shared", f"-Wl,-soname,{LIBRARY}", f"-Wl,--version-script,{script}"]
    subprocess.run(
        ["gcc", *options, *objects, "-o", library, "-lpthread", "-ldl"], check=True
    )


if __name__ == "__main__":
    for variable, value in build(Path(sys.argv[1]).absolute()).items():
        print(f"{variable}={value}")
