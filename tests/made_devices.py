"""A device made by hand, and a meter of it that measures nothing."""

from batchtune.probe.devices import Meter
from batchtune.results import Device

MIB = 1 << 20


def made_device(**facts):
    """A device that knows nothing but what is said."""
    made = {
        "kind": "cpu",
        "name": "made",
        "total_bytes": 1 << 30,
        "limit_bytes": 1 << 30,
        "driver": None,
        "torch": "2.13",
        "allocator": "malloc",
        "other_processes": None,
    }
    return Device(**{**made, **facts})


class StillMeter(Meter):
    """Of a device whose memory nobody measures."""

    def __init__(self):
        self.device = made_device()

    def limit(self): ...
    def settle(self, reserve_bytes, ddp_bytes): ...
    def lower(self, limit_bytes): ...
    def reset(self): ...
    def peak(self):
        return 2 * MIB

    def in_use(self):
        return MIB
