"""Small data sets, tables, pools and drawings for hypothesis, and the batches that all ranks get."""

import numpy as np
from hypothesis import strategies as st

from batchtune.epochs import ORDERINGS, RankSplit, ShuffleKey, drawn
from batchtune.epochs.batchers import Batching
from batchtune.epochs.table import BucketTable

BOUNDARIES = np.array([5.0, 12.0, 30.0])
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=70).map(
    lambda values: np.array(values, dtype=np.float64)
)
SIZES = st.lists(st.integers(1, 9), min_size=3, max_size=3)
TABLES = SIZES.map(lambda sizes: BucketTable(BOUNDARIES, np.array(sizes)))
# Longer examples never fit more often, as on every device.
REAL_TABLES = SIZES.map(
    lambda sizes: BucketTable(BOUNDARIES, np.array(sorted(sizes, reverse=True)))
)
OVERHEADS = st.none() | st.floats(0, 100)
IN_BUCKETS = st.builds(Batching, TABLES)
IN_POOLS = st.builds(Batching, REAL_TABLES, st.integers(1, 80), OVERHEADS)
BATCHINGS = IN_BUCKETS | IN_POOLS
RANKS = st.integers(1, 5)
DEALINGS = st.builds(
    RankSplit, world_size=RANKS, same_bucket=st.booleans(), drop_last=st.booleans()
)
KEEPING = st.builds(RankSplit, world_size=RANKS, same_bucket=st.booleans())
DRAWINGS = st.builds(
    ShuffleKey,
    shuffle=st.booleans(),
    ordering=st.sampled_from(ORDERINGS),
    seed=st.integers(0, 2**70),
    epoch=st.integers(0, 9),
)


def batches_of_all_ranks(lengths, batching, dealing, drawing):
    """Returns an epoch's cut, and each rank's batches."""
    cut = batching.batcher(lengths).cut(drawing, dealing)
    order = drawn(cut, drawing, lengths)
    return cut, [
        list(cut.lists(order[rank :: dealing.world_size]))
        for rank in range(dealing.world_size)
    ]
