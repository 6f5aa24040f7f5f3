"""One process that has PyTorch, for the workers of all tests."""

import atexit

import tiers

from batchtune.loaders.worker import LoaderReply
from batchtune.probe.supervisor import worker_program
from batchtune.processes.worker import Nursery


class SharedNursery(Nursery):
    """Stays for the next test, which needs not import PyTorch again; ends with the test process."""

    def start_worker(self):
        tiers.started.append("a worker of the shared nursery")
        super().start_worker()

    def close(self):
        if (
            self._exit_code is None
            or self._process is None
            or self._process.poll() is not None
        ):
            super().close()

    def pids(self):
        """Its process."""
        return {self._process.pid} if self._process is not None else set()


SHARED = SharedNursery(*worker_program())
OF_LOADERS = SharedNursery("batchtune.loaders.worker", LoaderReply, {})
OF_SCRIPTS = SharedNursery(*worker_program(script=True))
for nursery in (SHARED, OF_LOADERS, OF_SCRIPTS):
    atexit.register(Nursery.close, nursery)
