"""How each contender of `recipes.py` batches: the real libraries, with settings found as their users find them.

A contender is found once, on a worker under the memory limit, which costs time; then it gives the
batches of each epoch.

"Shipped" settings are those of a recipe's own configuration, which its comment names. They were chosen for a larger
GPU than the limit here, so they are halved until the largest batches of an epoch run, as their users would.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from benchmarks.peer_files import axolotl_multipack, nemo_sampling
from probe.peer_searches import from_the_last_answer
from real_speechbrain import load_dynamic_batch_sampler, load_speechbrain
from torch.utils.data import BatchSampler

from batchtune import BucketedStream, SameStepBatchSampler, sampler_from_config
from batchtune.buckets.micro_batches import SAME_STEP
from batchtune.exports.run_configs import sampler_config
from batchtune.reports.packing import WORTH_A_CHANGE
from batchtune.results import SWEEP_FILE, Row, Sweep, read_result
from batchtune.units import counted

# A shipped setting is halved again if it runs out of memory in one of so many epochs.
EPOCHS_TRIED = 3
# OOMptimizer's default: it stops when the gap is 5% of the size that failed.
OOMPTIMIZER_THRESHOLD = 0.05
# axolotl's default: sample_packing_bin_size.
AXOLOTL_BIN_SIZE = 200
# Lhotse's default number of buckets.
LHOTSE_BUCKETS = 10
# Over both lengths NeMo cuts each bucket in two.
NEMO_BUCKETS = 5
# What users of SpeechBrain try, of which the one with the fewest batches is taken.
SPEECHBRAIN_BUCKETS = (10, 15, 20, 30, 60, 100, 200)
# As its own example has it: 4 workers with a prefetch_factor of 64 hold so many examples, and these are grouped.
ODB_WINDOW = 4 * 64
SAMPLES_PER_SECOND = 16_000
ENDED_EARLY = ", of a probe that --minutes ended early"
# What WebDataset's users put before `.batched()`.
SHUFFLE_BUFFER = 1000


class DoesNotFit(Exception):
    """Not even batches of one fit the limit."""


class OutOfTime(Exception):
    """The minutes of the searches are over."""


class NothingRecommended(Exception):
    """batchtune has no recommendation of this kind; the message says why."""


@dataclass(frozen=True)
class Contender:
    """One way to batch.

    Attributes:
        name: For people.
        find: Finds its setting in a `RecipeBench`: the batches by their epoch, and the setting in words.
        needs: The package that does the batching.
        kind: `shipped`, `peer` or `batchtune`: of these, the probe that they share is part of the search.
        keeps_accumulation: Whether a step has as many micro-batches as the recipe ships. Otherwise they are as many as
            bring a step nearest to the examples that it has there.
    """

    name: str
    find: Callable
    needs: str = "torch"
    kind: str = "peer"
    keeps_accumulation: bool = False

    @property
    def is_installed(self):
        """Whether its package is."""
        return importlib.util.find_spec(self.needs) is not None


def worst_batches(bench, batches):
    """Return the batches of an epoch that can be the first to run out of memory."""
    longest = [bench.lengths[batch].max() for batch in batches]
    by_cells = sorted(
        range(len(batches)), key=lambda place: len(batches[place]) * longest[place]
    )
    places = [
        *by_cells[-2:],
        max(range(len(batches)), key=lambda place: len(batches[place])),
        int(np.argmax(longest)),
    ]
    if bench.targets is not None:
        targets = bench.targets
        cells = [len(batch) * targets[batch].max() for batch in batches]
        pairs = [cell * length for cell, length in zip(cells, longest, strict=True)]
        places += [int(np.argmax(cells)), int(np.argmax(pairs))]
    return [batches[place] for place in dict.fromkeys(places)]


def worst_packed(bench, batches):
    """Return the packed batches of an epoch with the most tokens."""
    by_tokens = sorted(batches, key=lambda batch: float(bench.lengths[batch].sum()))
    return by_tokens[-2:]


def shipped(make, smallest, needs="torch", worst=worst_batches):
    """Return what a recipe ships, halved until its worst batches fit; `make(bench, share)` is the setting × share."""

    def find(bench):
        share = 1.0
        while True:
            epochs, words = make(bench, share)
            tried = map(epochs, range(EPOCHS_TRIED))
            if all(bench.fits(worst(bench, batches)) for batches in tried):
                return epochs, words
            if smallest(bench, share):
                raise DoesNotFit
            share /= 2

    return Contender("as shipped", find, needs, "shipped", keeps_accumulation=True)


def shuffled(count, epoch):
    """Return a random order, as torch's RandomSampler makes one."""
    generator = torch.Generator().manual_seed(epoch)
    return torch.randperm(count, generator=generator).tolist()


def fixed(bench, batch_size):
    """Make batches of one size, shuffled, as a DataLoader does."""
    count = bench.lengths.size
    return lambda epoch: list(BatchSampler(shuffled(count, epoch), batch_size, False))


def shipped_size(make, batch_size, words, *more):
    """Return a recipe that ships a batch size; `make(bench, size)` makes its batches."""

    def halved(bench, share):
        size = max(1, int(batch_size * share))
        return make(bench, size), words.format(size)

    return shipped(halved, lambda bench, share: batch_size * share <= 1, *more)


def shipped_fixed(batch_size):
    """Return a recipe that ships a fixed batch size, shuffled."""
    return shipped_size(fixed, batch_size, "batch size {}")


def speechbrain(bench, max_batch_length, num_buckets, max_batch_ex):
    """Make the batches of SpeechBrain's own sampler."""
    sampler_class = load_dynamic_batch_sampler()

    def epochs(epoch):
        sampler = sampler_class(
            range(bench.lengths.size),
            max_batch_length,
            num_buckets=num_buckets,
            lengths_list=bench.lengths.tolist(),
            shuffle=True,
            batch_ordering="random",
            max_batch_ex=max_batch_ex,
            seed=epoch,
        )
        return [list(batch) for batch in sampler]

    return epochs


def shipped_speechbrain(max_batch_length, num_buckets, max_batch_ex):
    """Return a recipe of SpeechBrain with dynamic batching.

    Buckets are halved with the length: an epoch here has fewer batches in proportion, and each bucket leaves one that
    is not full.
    """

    def make(bench, share):
        limit = max_batch_length * share
        buckets = max(2, round(num_buckets * share))
        epochs = speechbrain(bench, limit, buckets, max_batch_ex)
        return epochs, f"max_batch_length {limit:g}, num_buckets {buckets}"

    def smallest(bench, share):
        return max_batch_length * share < bench.lengths.min()

    return shipped(make, smallest, "speechbrain")


def tuned_speechbrain(bench):
    """Take the largest max_batch_length that fits; at each, the num_buckets of fewest batches."""

    def make(max_batch_length):
        ways = [
            (speechbrain(bench, max_batch_length, buckets, None), buckets)
            for buckets in SPEECHBRAIN_BUCKETS
        ]
        return min(ways, key=lambda way: len(way[0](0)))

    passed = largest_budget(bench, lambda budget: make(budget)[0])
    epochs, buckets = make(passed)
    return epochs, f"max_batch_length {passed:.4g}, num_buckets {buckets}"


def largest_budget(bench, make):
    """Raise the padded length of a batch until memory runs out, then bisect to 5%."""

    def fits(budget):
        return bench.fits(worst_batches(bench, make(budget)(0)))

    passed = float(bench.lengths.max())
    while not fits(passed):
        passed /= 2
        if passed < bench.lengths.min():
            raise DoesNotFit
    failed = 2 * passed
    while failed < bench.lengths.sum() and fits(failed):
        passed = failed
        failed = 2 * passed
    while failed - passed > 0.05 * failed:
        middle = (passed + failed) / 2
        if fits(middle):
            passed = middle
        else:
            failed = middle
    return passed


def accelerates_size(bench, make, words="batch size {}"):
    """Find a batch size with accelerate's decorator: from 128 down by a tenth, until an epoch's worst batches run."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=min(128, bench.lengths.size))
    def train(batch_size):
        if not bench.fits(worst_batches(bench, make(bench, batch_size)(0))):
            # What torch raises in the worker.
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return batch_size

    try:
        found = train()
    except RuntimeError as error:
        raise DoesNotFit from error
    return make(bench, found), words.format(found)


def accelerate_fixed(bench):
    """Find a fixed batch size with accelerate."""
    return accelerates_size(bench, fixed)


def grouped_by_length(bench):
    """Group by length, as Transformers' Trainer does with `group_by_length`; the batch size by accelerate's search."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    lengths = bench.lengths.tolist()

    def make(bench, batch_size):
        def epochs(epoch):
            generator = torch.Generator().manual_seed(epoch)
            order = LengthGroupedSampler(
                batch_size, lengths=lengths, generator=generator
            )
            return list(BatchSampler(order, batch_size, False))

        return epochs

    return accelerates_size(bench, make)


def rebalanced(bench):
    """Cut each step's examples as Transformers' Trainer does with `train_sampling_strategy="batch_rebalance"`.

    It searches nothing: a step is that of the recipe. Lengths of audio are samples, as of `input_values`.
    """
    try:
        from transformers.trainer_pt_utils import BatchRebalanceSampler
    except ImportError as error:
        raise NothingRecommended("Transformers has it from 5.24 on") from error
    per_unit = SAMPLES_PER_SECOND if bench.recipe.unit == "s" else 1
    sampler = BatchRebalanceSampler(
        (bench.lengths * per_unit).tolist(),
        bench.shipped_batch_size * bench.recipe.accumulate,
        dp_size=1,
        grad_accum=bench.recipe.accumulate,
        seed=0,
        drop_last=False,
    )
    return epochs_of(sampler), f"{bench.recipe.accumulate} micro-batches a step"


def online_dynamic_batching(bench):
    """Group windows of examples by length, with the package's own function; its token budget is searched for."""
    from odb.grouping import grouping_data

    lengths = bench.lengths.astype(np.int64).tolist()

    def make(budget):
        def epochs(epoch):
            order = shuffled(len(lengths), epoch)
            shuffle = random.Random(epoch).shuffle
            batches = []
            for first in range(0, len(order), ODB_WINDOW):
                window = [
                    {"input_ids": [0] * lengths[index], "index": index}
                    for index in order[first : first + ODB_WINDOW]
                ]
                groups = grouping_data([window], int(budget), None)[0]
                shuffle(groups)
                batches += indices_of(groups)
            return batches

        return epochs

    budget = largest_budget(bench, make)
    return make(budget), f"token_budget {int(budget)}, windows of {ODB_WINDOW}"


def lhotse_cuts(bench, order):
    """Return Lhotse's cuts of the examples, in an order."""
    from lhotse.cut import MonoCut

    return [
        MonoCut(id=str(i), start=0, duration=float(bench.lengths[i]), channel=0)
        for i in order
    ]


def lhotse_batches(cuts, **options):
    """Make the batches that Lhotse's sampler makes of cuts."""
    from lhotse import CutSet
    from lhotse.dataset import DynamicBucketingSampler

    def epochs(epoch):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = DynamicBucketingSampler(
                CutSet.from_cuts(cuts),
                shuffle=True,
                world_size=1,
                rank=0,
                seed=epoch,
                **options,
            )
            return [[int(cut.id) for cut in batch] for batch in sampler]

    return epochs


def oomptimizer_sizes(bench, buckets):
    """Return the batch size that OOMptimizer's search finds for each bucket, given by its largest lengths."""
    found = dict(
        from_the_last_answer(
            lambda size, bucket: bench.fits_shape(size, *bucket),
            buckets,
            lambda _: bench.lengths.size,
            OOMPTIMIZER_THRESHOLD,
        )
    )
    if min(found.values()) == 0:
        raise DoesNotFit
    return [found[bucket] for bucket in buckets]


def lhotse_sized(bench):
    """Take Lhotse's bins, and for each the size that OOMptimizer's search finds."""
    from lhotse.dataset.sampling.dynamic_bucketing import (
        FixedBucketBatchSizeConstraint,
        estimate_duration_buckets,
    )

    cuts = lhotse_cuts(bench, shuffled(bench.lengths.size, 0))
    bins = estimate_duration_buckets(cuts, num_buckets=LHOTSE_BUCKETS)
    edges = [*bins, float(bench.lengths.max())]
    sizes = oomptimizer_sizes(bench, [(edge,) for edge in edges])
    constraint = FixedBucketBatchSizeConstraint(
        max_seq_len_buckets=edges, batch_sizes=sizes
    )
    epochs = lhotse_batches(cuts, duration_bins=list(bins), constraint=constraint)
    return epochs, f"{len(edges)} buckets, sizes {sizes[-1]} to {sizes[0]}"


def nemo_two_dimensional(bench):
    """Take NeMo's buckets over both lengths, with the sizes that OOMptimizer's search finds.

    Buckets hold equal shares of the seconds, and their halves equal shares of the targets, both cut by Lhotse.
    """
    from lhotse.dataset.sampling.dynamic_bucketing import estimate_duration_buckets
    from lhotse.supervision import SupervisionSegment

    cuts = lhotse_cuts(bench, shuffled(bench.lengths.size, 0))
    for cut in cuts:
        segment = SupervisionSegment(cut.id, cut.id, start=0, duration=cut.duration)
        segment.tokens = [0] * int(bench.targets[int(cut.id)])
        cut.supervisions.append(segment)
    edges = [
        *estimate_duration_buckets(cuts, num_buckets=NEMO_BUCKETS),
        float(bench.lengths.max()),
    ]
    buckets = []
    bucket_of = np.searchsorted(edges, bench.lengths)
    for place, edge in enumerate(edges):
        targets = np.sort(bench.targets[bucket_of == place])
        if targets.size == 0:
            continue
        half = int(np.searchsorted(targets.cumsum(), targets.sum() / 2))
        halves = sorted({float(targets[half]), float(targets.max())})
        buckets += [(edge, target) for target in halves]
    sizes = oomptimizer_sizes(bench, buckets)
    constraint = nemo_sampling().FixedBucketBatchSizeConstraint2D(
        max_seq_len_buckets=buckets, batch_sizes=sizes, strict_2d=False
    )
    epochs = lhotse_batches(cuts, duration_bins=buckets, constraint=constraint)
    return epochs, f"{len(buckets)} buckets, sizes {min(sizes)} to {max(sizes)}"


def trl_rows(bench, cut_at):
    """Pack with TRL's default strategy into rows of `cut_at` tokens, in batches of one row."""
    from datasets import Dataset, disable_progress_bars
    from trl.data_utils import pack_dataset

    disable_progress_bars()
    sequences = [[i] * int(length) for i, length in enumerate(bench.lengths)]
    packed = pack_dataset(Dataset.from_dict({"input_ids": sequences}), cut_at, "bfd")
    rows = [list(dict.fromkeys(row)) for row in packed["input_ids"]]
    return lambda epoch: [rows[place] for place in shuffled(len(rows), epoch)]


def joined(rows, count):
    """Join so many rows to a batch, which is flattened: padding-free, as TRL trains packed rows."""

    def epochs(epoch):
        given = rows(epoch)
        return [
            [index for row in given[first : first + count] for index in row]
            for first in range(0, len(given), count)
        ]

    return epochs


def shipped_trl(batch_size, cut_at):
    """Return TRL's own packing, with its default of rows a batch, halved until it fits."""

    def make(bench, size):
        return joined(trl_rows(bench, cut_at), size)

    words = f"{{}} rows of {cut_at} tokens"
    return shipped_size(make, batch_size, words, "trl", worst_packed)


def tuned_trl(bench):
    """Pack with TRL, at the budget that batchtune found: TRL has no search of its own."""
    max_tokens = packed_config(filled_run(bench)).max_tokens
    return trl_rows(bench, max_tokens), f"max_length {max_tokens}, batchtune's budget"


def tuned_axolotl(bench):
    """Pack with axolotl's own sampler, at the budget that batchtune found: axolotl has no search of its own."""
    sampler_class = axolotl_multipack().MultipackBatchSampler
    lengths = bench.lengths.astype(np.int64)
    max_tokens = packed_config(filled_run(bench)).max_tokens

    def epochs(epoch):
        sampler = sampler_class(
            sampler=shuffled(lengths.size, epoch),
            batch_size=1,
            batch_max_len=max_tokens,
            bin_size=AXOLOTL_BIN_SIZE,
            lengths=lengths,
            num_processes=1,
        )
        packed = sampler.generate_batches(set_stats=False)
        return [[int(index) for index in batch[0]] for batch in packed]

    return epochs, f"sequence_len {max_tokens}, batchtune's budget"


def read_samples(bench, epoch):
    """Read the shards with WebDataset, shuffled as its users do."""
    import webdataset

    data = webdataset.WebDataset(
        bench.shards, shardshuffle=100, detshuffle=True, seed=epoch
    )
    samples = (json.loads(sample["json"]) for sample in data)
    return webdataset.filters.shuffle(SHUFFLE_BUFFER, seed=epoch)(samples)


def indices_of(batches):
    """Return the indices of a stream's examples, batch by batch."""
    return [[int(example["index"]) for example in batch] for batch in batches]


def batched_stream(bench, batch_size):
    """Make WebDataset's own batches of one size."""
    import webdataset

    stage = webdataset.filters.batched(batch_size, collation_fn=list)
    return lambda epoch: indices_of(stage(read_samples(bench, epoch)))


def shipped_stream(batch_size):
    """Return a stream with WebDataset's `.batched(batch_size)`."""
    return shipped_size(batched_stream, batch_size, ".batched({})", "webdataset")


def accelerate_stream(bench):
    """Find the size of WebDataset's batches with accelerate."""
    return accelerates_size(bench, batched_stream, ".batched({})")


def swept_stream(bench, run, *options):
    """Sweep the stream once, after the probe; return stream.json."""
    path = run / "stream.json"
    if not path.exists():
        call_batchtune(
            "sweep-stream", bench.shards, "--length-key", "json.duration",
            "--run", str(run), "--quiet", *options,
        )  # fmt: skip
    return json.loads(path.read_text())


def speechbrain_stream(bench):
    """Batch the stream with SpeechBrain's own function, with the settings that are best for it."""
    stream = swept_stream(bench, bench.run)
    return by_speechbrain(bench, stream["rows"][stream["recommended_speechbrain"]])


def by_speechbrain(bench, row):
    """Batch the stream with SpeechBrain's own function, with the settings of a row of stream.json."""
    names = ("target_batch_numel", "max_batch_numel", "max_batch_size", "max_padding_ratio")  # fmt: skip
    settings = {name: row[name] for name in names if row[name] is not None}
    batch = load_speechbrain()[3].dynamic_bucketed_batch

    def epochs(epoch):
        random.seed(epoch)  # which SpeechBrain draws from
        batches = batch(
            read_samples(bench, epoch),
            len_key="duration",
            len_fn=float,
            buffersize=row["buffer_size"],
            collate_fn=list,
            sampler_kwargs=settings,
        )
        return indices_of(batches)

    words = ", ".join(f"{name} {value:.4g}" for name, value in settings.items())
    return epochs, f"{words}, buffer of {row['buffer_size']}"


def by_default(bench):
    """Batch as recommended by default, which keeps the training: each step's examples, or the number of steps."""
    if bench.recipe.streamed:
        run = copied_run(bench, "run-steps-kept")
        swept_stream(bench, run, f"--min-steps={bench.shipped_steps}")
        return configured_stream(bench, run)
    return recommended_in(bench, bench.run)


def filled(bench):
    """Batch as recommended with `--keep nothing`: the batches that take the least time of all that fit."""
    if bench.recipe.streamed:
        swept_stream(bench, bench.run)
        return configured_stream(bench, bench.run)
    return recommended_in(bench, filled_run(bench))


def recut(bench):
    """Keep each step's examples in as many micro-batches as are fastest, as the report of the default advises."""
    swept = read_result(bench.run / SWEEP_FILE, Sweep)
    same = [other for other in swept.rows if other.keeps_examples]
    fastest = min(same, key=lambda other: other.estimated_epoch_seconds)
    seconds = swept.recommended_row.estimated_epoch_seconds
    if seconds <= WORTH_A_CHANGE * fastest.estimated_epoch_seconds:
        raise NothingRecommended("no other number of micro-batches is worth a change")
    micro_batches = ["--micro-batches", str(fastest.accumulate)]
    run = swept_again(bench, "run-recut", *bench.current(), *micro_batches)
    return recommended_in(bench, run)


def filled_run(bench):
    """Return a run folder with the same probe, and a sweep that fills the memory."""
    return swept_again(bench, "run-filled", "--keep", "nothing")


def swept_again(bench, name, *options):
    """Return a run folder with the same probe, and a sweep with other options."""
    run = bench.folder / name
    if not (run / SWEEP_FILE).exists():
        copied_run(bench, run.name, SWEEP_FILE)
        call_batchtune(
            "sweep-buckets", *bench.manifest(), "--run", str(run), "--quiet", *options
        )
    return run


def copied_run(bench, name, *without):
    """Copy the run folder of the probe."""
    run = bench.folder / name
    ignore = shutil.ignore_patterns("stream.*", *without)
    shutil.copytree(bench.run, run, dirs_exist_ok=True, ignore=ignore)
    return run


def recommended_in(bench, run):
    """Batch as the config in a run folder says; steps that keep their examples are those that the recipe ships."""
    path = run / "sampler.yaml"
    swept = read_result(run / SWEEP_FILE, Sweep)
    row = swept.recommended_row if swept.packed is None else swept.packed.row
    if row is not None and row.keeps_examples:
        return same_steps(
            bench, path
        ), f"{SAME_STEP}, {counted(row.accumulate, 'micro-batch')}"
    if bench.recipe.is_packed:
        config = packed_config(run)
        setting = f"{config.packer}, max_tokens {config.max_tokens}"
    elif not isinstance(row, Row):
        raise NothingRecommended("no table beats a fixed batch size")
    else:
        setting = f"{row.strategy}, {row.num_buckets} buckets"
    sampler = sampler_from_config(path, bench.lengths, targets=bench.targets)
    return epochs_of(sampler), setting


def same_steps(bench, path):
    """Cut the shipped steps anew."""

    def epochs(epoch):
        own = bench.shipped_epochs[epoch]
        return list(
            SameStepBatchSampler.from_config(
                path, own, bench.lengths, targets=bench.targets
            )
        )

    return epochs


def configured_stream(bench, run):
    """Batch the stream with batchtune's stage, or, where that is recommended, with SpeechBrain's function."""
    stream = json.loads((run / "stream.json").read_text())
    row = stream["rows"][stream["recommended"]]
    if row["algorithm"] == "speechbrain":
        return by_speechbrain(bench, row)

    def epochs(epoch):
        stage = BucketedStream.from_config(
            run / "stream.yaml", length_of=lambda example: example["duration"]
        )
        return indices_of(stage(read_samples(bench, epoch)))

    return epochs, f"{row['algorithm']}, buffer of {row['buffer_size']}"


def packed_config(run):
    """Return batchtune's recommendation for packed rows."""
    return sampler_config(read_result(run / SWEEP_FILE, Sweep))


def epochs_of(sampler):
    """Return a sampler's batches by epoch."""

    def epochs(epoch):
        sampler.set_epoch(epoch)
        return [list(map(int, batch)) for batch in sampler]

    return epochs


def call_batchtune(*arguments):
    """Run a command of batchtune; what it prints is not shown."""
    command = [sys.executable, "-m", "batchtune", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
