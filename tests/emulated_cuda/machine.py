"""Programs on the emulated CUDA device."""

import json
import os
import subprocess
import sys
from pathlib import Path

from emulated_cuda.build import environment

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
CONTEXT = 300 * MIB
"""What a process takes of a device outside torch."""


class Machine:
    """A machine with emulated devices, whose memory its programs share."""

    def __init__(self, built, state):
        self._built = built
        self._state = state

    def variables(self, memory, devices, **settings):
        """The environment of a program; the settings are further variables."""
        return {
            **os.environ,
            **environment(self._built),
            "EMULATED_CUDA_STATE": str(self._state),
            "EMULATED_CUDA_MEMORY": memory,
            "EMULATED_CUDA_DEVICES": str(devices),
            "PYTHONPATH": str(ROOT),
            **settings,
        }

    def __call__(self, *arguments, memory="2GiB", devices=1, **settings):
        """Run Python with these arguments to its end, whatever that is."""
        return subprocess.run(
            [sys.executable, *arguments],
            env=self.variables(memory, devices, **settings),
            capture_output=True,
            text=True,
        )

    def figures(
        self,
        program,
        *arguments,
        memory="2GiB",
        devices=1,
        **settings,
    ):
        """What a program's last line says, in JSON; the program must succeed."""
        ran = self(
            "-c", program, *arguments, memory=memory, devices=devices, **settings
        )
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout.splitlines()[-1])

    def batchtune(self, *arguments, memory="2GiB", devices=1):
        """What a command of batchtune prints; it must succeed."""
        ran = self("-m", "batchtune", *arguments, memory=memory, devices=devices)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def start(
        self,
        program,
        *arguments,
        memory="2GiB",
        devices=1,
        **settings,
    ):
        """Start a program, which is talked to by its standard input and output."""
        return subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env=self.variables(memory, devices, **settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
