"""The worker processes of DataLoaders that tests leave in mid-epoch."""

import gc

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


def end_loader_workers():
    """End them now: the garbage collector, in a later test, would wait for each of them for 5 seconds."""
    for thing in gc.get_objects():
        if type(thing) is _MultiProcessingDataLoaderIter:
            thing._shutdown_workers()
