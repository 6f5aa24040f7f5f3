"""Trainings as people run them, batched by everybody: `python tests/benchmarks/recipes.py [RECIPE...]`.

Seven small models train on real lengths, each under one memory limit for all contenders: 100 MiB beside what a training
holds before its first step (8 GiB on a GPU). Contenders are what the recipe ships, the peers that apply, by their real
libraries, and batchtune: as it recommends by default, with another accumulation if its report says that this is faster
(`--micro-batches`), and filling the memory (`--keep nothing`). By default it keeps the training: each optimizer step's
examples, where a recipe accumulates gradients, else the number of steps; the batches are those that `batchtune run`
gives an unchanged script (`tests/scripts/test_running.py`). A contender whose micro-batches have another size
accumulates as many as bring a step nearest to the shipped examples. The loss is a mean over all tokens of a step,
however it is cut. Without names all recipes run. Of NeMo, axolotl and online-dynamic-batching the files that batch are
enough, in a folder on PYTHONPATH (`peer_files.py`); who isn't installed is left out by name.

    ctc           CTC speech recognition, Common Voice
    ctc-bucketed  the same in SpeechBrain's buckets, LibriSpeech
    aed           encoder-decoder speech with two lengths, LibriSpeech
    sft           fine-tuning of a causal language model, ShareGPT; padded
    sft-packed    the same, packed
    mlm           masked language model, files of code
    stream        tar shards with WebDataset, Common Voice

Each contender trains in a process of its own, on one thread of the CPU. In each round all train the same seed for one
epoch, in turns of a step or a few, so that whatever slows the machine down slows all. A round's losses are those
of examples that no one trained on. The learning rate grows with the square root of the mean step (AdamW). Rounds go
on until the standard errors are below 1%, 2 rounds at least and 6 at most, or until the recipe's share of `--minutes`
is over. Half of the share is for the searches: a contender whose search takes longer is left out, by name.

DIR/RECIPE.json is written after each round. An interrupted benchmark goes on from there; `--work` keeps what was found
before the rounds. `recipes.py summarise` prints the tables, writes the blocks of README.md and FIGURES.md from DIR, and
draws the picture beside them.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import pandas as pd
from benchmarks.recipe_list import RECIPES, NoLengths
from benchmarks.recipe_peers import (
    ENDED_EARLY,
    DoesNotFit,
    NothingRecommended,
    OutOfTime,
    call_batchtune,
)
from benchmarks.recipe_summary import largest_error, machine_name, summarise

from batchtune.allocators import worker_variables
from batchtune.errors import BatchtuneError
from batchtune.files import write_whole
from batchtune.probe.devices import backends
from batchtune.results import PROBE_FILE, Probe, read_result

HERE = Path(__file__).parent
# Of an epoch, in turns: fast and slow seconds of the machine are then shared by all.
SLICES = 32
# Of the shipped setting.
LR = 2e-3
# That each training has beside what it holds before its first step: that depends on versions of libraries.
ROOM_MIB = {"cpu": 100, "cuda": 8192}
FEWEST_ROUNDS = 2
MOST_ROUNDS = 6
HIGHEST_ERROR = 0.01
# Of a recipe's minutes, for the searches; the rounds have the rest.
SEARCH_SHARE = 0.5
# Of what is left to the searches, for batchtune's probe.
TUNING_SHARE = 0.5
MORE_THAN_EVEN = 1.25
HELD_OUT = 40
HELD_OUT_BATCH = 4
# A probe takes so much of what --memory gives; the limit is for everybody.
MEMORY_FRACTION = Fraction(9, 10)


WHY_LEFT_OUT = {
    DoesNotFit: "nothing fits",
    OutOfTime: "its search did not end in time",
}


class WorkerDied(Exception):
    """A worker process ended."""


class Worker:
    """A training process under the limit, and what to ask it. It starts while others work: the first request waits."""

    def __init__(self, started_with):
        # The allocator with which batchtune measures, for all.
        environment = {**os.environ, **worker_variables("auto", os.environ)}
        for backend in backends():
            environment |= backend.WORKER_ENVIRONMENT
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "recipe_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._has_started = False
        self._send("start", started_with)

    def ask(self, request, **arguments):
        """Send a request; return the reply. Raises WorkerDied."""
        self.wait()
        self._send(request, arguments)
        return self._receive()

    def wait(self):
        """Wait until it has started. Raises WorkerDied."""
        if not self._has_started:
            self.started = self._receive()
            self._has_started = True

    def _send(self, request, arguments):
        try:
            print(
                json.dumps({"do": request, **arguments}),
                file=self._process.stdin,
                flush=True,
            )
        except BrokenPipeError as error:
            raise WorkerDied from error

    def _receive(self):
        line = self._process.stdout.readline()
        if not line:
            raise WorkerDied
        return json.loads(line)

    def close(self):
        """End the process."""
        self._process.kill()
        self._process.communicate()


class RecipeBench:
    """A recipe with its lengths, limit and run folder, where contenders find their settings."""

    def __init__(self, recipe, options, search_deadline):
        self.recipe = recipe
        self.search_deadline = search_deadline
        self.device = options.device
        self.folder = options.work / recipe.name
        self.run = self.folder / "run"
        lengths, targets = recipe.lengths()
        count = min(recipe.count, lengths.size - HELD_OUT)
        drawn = np.random.default_rng(0).permutation(lengths.size)[: count + HELD_OUT]
        self._all = lengths[drawn]
        self._all_targets = None if targets is None else targets[drawn]
        self.lengths = self._all[:count]
        self.targets = None if targets is None else self._all_targets[:count]
        # The batches of all epochs as the recipe ships it, once they are known.
        self.shipped_epochs = []
        self._worker = None

    @property
    def limit_bytes(self):
        """The memory limit of everybody: what a training holds before its first step, and the room."""
        path = self.folder / "limit.json"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            room = ROOM_MIB[self.device.partition(":")[0]] << 20
            worker = self._worker_under(None)
            worker.wait()
            worker.close()
            write_whole(path, json.dumps(worker.started["held_bytes"] + room))
        return json.loads(path.read_text())

    @property
    def shipped_batches(self):
        """The batches of the first epoch as shipped."""
        return self.shipped_epochs[0]

    @property
    def shipped_batch_size(self):
        """The examples of a shipped batch that is full; of packed ones the mean."""
        if self.recipe.is_packed:
            return round(self.lengths.size / len(self.shipped_batches))
        return max(map(len, self.shipped_batches))

    @property
    def shipped_steps(self):
        """The optimizer steps of an epoch as shipped."""
        return -(-len(self.shipped_batches) // self.recipe.accumulate)

    def accumulation_of(self, contender, batches):
        """Return how many of a contender's batches make a step."""
        if contender.keeps_accumulation or self.recipe.accumulate == 1:
            return self.recipe.accumulate
        share = len(batches) / len(self.shipped_batches)
        return max(1, round(self.recipe.accumulate * share))

    def close(self):
        """End the worker of the searches."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def new_worker(self):
        """Start a training process under the limit."""
        return self._worker_under(self.limit_bytes)

    def _worker_under(self, limit_bytes):
        count = self.lengths.size
        by_length = sorted(
            range(count, count + HELD_OUT), key=lambda index: float(self._all[index])
        )
        held_out = [
            by_length[first : first + HELD_OUT_BATCH]
            for first in range(0, HELD_OUT, HELD_OUT_BATCH)
        ]
        targets = [None] * self._all.size
        if self._all_targets is not None:
            targets = self._all_targets.tolist()
        return Worker(
            {
                "training": self.recipe.training,
                "options": self.recipe.options,
                "device": self.device,
                "limit_bytes": limit_bytes,
                "lengths": self._all.tolist(),
                "targets": targets,
                "held_out": held_out,
            }
        )

    def _asked(self, request, **arguments):
        """Ask the worker of the searches whether something fits; it does not if the worker died of it."""
        if time.monotonic() > self.search_deadline:
            raise OutOfTime
        if self._worker is None:
            self._worker = self.new_worker()
        try:
            reply = self._worker.ask(request, **arguments)
        except WorkerDied:
            reply = {"fits": False, "worn": True}
        if reply["worn"]:
            self.close()
        return reply["fits"]

    def fits(self, batches):
        """Run batches on the limited device."""
        return self._asked("fits", batches=batches)

    def fits_shape(self, batch_size, length, target=None):
        """Run a batch of a shape; its target is the longest that occurs unless one is given."""
        if self.targets is not None and target is None:
            target = float(self.targets[self.lengths <= length].max())
        return self._asked(
            "fits_shape", batch_size=batch_size, length=length, target=target
        )

    @cached_property
    def shards(self):
        """Write tar shards of the examples, with their lengths."""
        if not self.recipe.streamed:
            return None
        import webdataset

        shards = self.folder / "shards"
        shards.mkdir(parents=True, exist_ok=True)
        pattern = str(shards / "train-%03d.tar")
        with webdataset.ShardWriter(pattern, maxcount=250, verbose=0) as writer:
            for index, length in enumerate(self.lengths.tolist()):
                example = {"index": index, "duration": length}
                writer.write(
                    {"__key__": f"{index:06}", "json": json.dumps(example).encode()}
                )
        last = -(-self.lengths.size // 250) - 1
        return str(shards / f"train-{{000..{last:03}}}.tar")

    def manifest(self):
        """Write the lengths as a manifest; return its path, and the options that read it."""
        manifest = self.folder / "lengths.csv"
        columns = {"length": self.lengths}
        keys = ["--length-key", "length"]
        if self.targets is not None:
            columns["target"] = self.targets
            keys += ["--target-key", "target"]
        write_whole(manifest, pd.DataFrame(columns).to_csv(index=False))
        return [str(manifest), *keys, "--unit", self.recipe.unit]

    def workload(self):
        """Return the options that name the training as a workload."""
        settings = []
        for name, value in self.recipe.options.items():
            settings += ["--set", f"{name}={value}"]
        workload = f"{HERE / 'recipe_models.py'}:{self.recipe.training}"
        return ["--workload", workload, *settings, "--device", self.device]

    def current(self):
        """Return the options that say how the recipe trains, so that this is kept."""
        if self.recipe.streamed:
            return ["--keep", "nothing"]  # sweep-stream has the rest
        accumulate = ["--accumulate", str(self.recipe.accumulate)]
        if self.recipe.accumulate == 1:
            return [*accumulate, "--min-steps", str(self.shipped_steps)]
        return [*accumulate, "--current", f"batch_size={self.shipped_batch_size}"]

    def tune(self):
        """Run `batchtune tune` as its user does; return whether its time ended the probe.

        Raises OutOfTime if the time of the searches was over before anything had run.
        """
        memory = math.ceil(self.limit_bytes / MEMORY_FRACTION)
        started = time.monotonic()
        minutes = max(0.1, (self.search_deadline - started) / 60 * TUNING_SHARE)
        try:
            call_batchtune(
                "tune", *self.manifest(), "--memory", str(memory),
                "--minutes", f"{minutes:.2f}", "--run", str(self.run), "--quiet",
                *self.current(), *self.workload(),
            )  # fmt: skip
        except subprocess.CalledProcessError:
            if time.monotonic() - started < 60 * minutes:
                raise
            raise OutOfTime from None
        return {"unfinished": read_result(self.run / PROBE_FILE, Probe).unfinished}


def stand_in_for_torchaudio(folder):
    """Put an empty module in torchaudio's place where it does not load: SpeechBrain and Transformers import it."""
    check = [sys.executable, "-c", "import torchaudio"]
    if subprocess.run(check, capture_output=True).returncode == 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "torchaudio.py").touch()
    places = [str(folder.resolve()), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    sys.path.insert(0, str(folder.resolve()))


def found_settings(bench, contenders, left_out):
    """Find the setting of each contender, or read what an earlier call has found; add who has none to `left_out`.

    Raises DoesNotFit if what the recipe ships does not run at batch size 1.
    """
    path = bench.folder / "found.json"
    bench.folder.mkdir(parents=True, exist_ok=True)
    found = {}
    if path.exists():
        found = json.loads(path.read_text())
    # Kept, so that an interrupted benchmark goes on with the same contenders.
    reasons = found.setdefault("left_out", {})
    for contender in contenders:
        if contender.name not in found and contender.name not in reasons:
            progress(bench.recipe, f"finds the setting of {contender.name}")
            try:
                found[contender.name] = found_setting(bench, contender, found)
            except (DoesNotFit, OutOfTime, NothingRecommended) as reason:
                if contender.kind == "shipped":
                    raise
                reasons[contender.name] = WHY_LEFT_OUT.get(type(reason), str(reason))
            write_whole(path, json.dumps(found))
        if contender.kind == "shipped":
            bench.shipped_epochs = found[contender.name]["epochs"]
            if "tuning" not in found:
                progress(bench.recipe, "batchtune tune")
                found["tuning"] = bench.tune()
                write_whole(path, json.dumps(found))
    bench.close()
    left_out += [f"{name} ({reason})" for name, reason in reasons.items()]
    return found


def found_setting(bench, contender, found):
    """Find the setting of a contender, its batches of all epochs, and how many of these make a step."""
    started = time.monotonic()
    epochs, setting = contender.find(bench)
    if contender.kind == "batchtune" and found["tuning"]["unfinished"]:
        setting += ENDED_EARLY
    batches = [epochs(epoch) for epoch in range(MOST_ROUNDS)]
    if contender.kind == "shipped":
        bench.shipped_epochs = batches
    seconds = time.monotonic() - started
    progress(bench.recipe, f"{contender.name}: {setting}, in {seconds:.0f} s")
    return {
        "kind": contender.kind,
        "setting": setting,
        "accumulate": bench.accumulation_of(contender, batches[0]),
        "epochs": batches,
    }


def in_steps(batches, accumulate):
    """Return the micro-batches of each optimizer step."""
    starts = range(0, len(batches), accumulate)
    return [batches[start : start + accumulate] for start in starts]


def run_recipe(recipe, options, deadline):
    """Find all settings, then train in turns, and write the results after each round."""
    path = options.out / f"{recipe.name}.json"
    contenders = []
    left_out = []
    for contender in recipe.contenders:
        if contender.is_installed:
            contenders.append(contender)
        else:
            left_out.append(f"{contender.name} ({contender.needs} is not installed)")
    now = time.monotonic()
    search_deadline = now + SEARCH_SHARE * (deadline - now)
    with closing(RecipeBench(recipe, options, search_deadline)) as bench:
        found = found_settings(bench, contenders, left_out)
        contenders = [one for one in contenders if one.name in found]
        for text in left_out:
            progress(recipe, f"left out: {text}")
        results = {
            "recipe": recipe.name,
            "machine": machine_name(options.device),
            "device": options.device,
            "limit_bytes": bench.limit_bytes,
            "training": {"name": recipe.training, **recipe.options},
            "data": recipe.data,
            "examples": int(bench.lengths.size),
            "accumulate": recipe.accumulate,
            "left_out": left_out,
            "contenders": {
                one.name: described(bench, one, found) for one in contenders
            },
            "rounds": [],
            "held_bytes": 0,
            "trace": {},
        }
        bench.close()
        if path.exists():
            results = continued(results, json.loads(path.read_text()), path)
        rounds = results["rounds"]
        if is_known(results):
            print(f"{recipe.name}: complete", flush=True)
            return
        seconds = 0.0
        workers = {one.name: bench.new_worker() for one in contenders}
        try:
            for worker in workers.values():
                worker.wait()
            while not is_known(results):
                if rounds and time.monotonic() + seconds > deadline:
                    print(
                        f"{recipe.name}: its minutes are over after {len(rounds)} rounds of at least {FEWEST_ROUNDS}",
                        flush=True,
                    )
                    break
                started = time.monotonic()
                run_round(results, found, bench, workers)
                seconds = time.monotonic() - started
                write_whole(path, json.dumps(results, indent=1) + "\n")
                progress(recipe, f"round {len(rounds)}, {seconds:.0f} s")
        finally:
            for worker in workers.values():
                worker.close()


def described(bench, contender, found):
    """Return what is known of a contender before it trains."""
    facts = found[contender.name]
    batches = facts["epochs"][0]
    padded = sum(len(batch) * bench.lengths[batch].max() for batch in batches)
    if bench.recipe.is_packed:
        padded = bench.lengths.sum()
    return {
        "kind": contender.kind,
        "setting": facts["setting"],
        "batches": len(batches),
        "steps": -(-len(batches) // facts["accumulate"]),
        "padding_ratio": round(float(1 - bench.lengths.sum() / padded), 4),
    }


def continued(new, earlier, path):
    """Return earlier results, with their rounds, if they are of the same benchmark.

    Raises BatchtuneError if they are not.
    """
    for name in (
        "machine",
        "limit_bytes",
        "training",
        "data",
        "examples",
        "contenders",
    ):
        if new[name] != earlier.get(name):
            raise BatchtuneError(
                f"{path} holds a benchmark with another {name}",
                "Remove it, or give another --out.",
            )
    return earlier


def is_known(results):
    """Return whether enough rounds were run."""
    rounds = len(results["rounds"])
    if rounds < FEWEST_ROUNDS:
        return False
    return rounds >= MOST_ROUNDS or largest_error(results) < HIGHEST_ERROR


def run_round(results, found, bench, workers):
    """Train one epoch of all contenders in turns, and add what it took."""
    number = len(results["rounds"])
    shipped = next(iter(workers))
    names = list(workers)
    names = names[number % len(names) :] + names[: number % len(names)]
    steps = {
        name: in_steps(found[name]["epochs"][number], found[name]["accumulate"])
        for name in names
    }
    round_of = {}
    for name in names:
        scale = len(steps[shipped]) / len(steps[name])
        lr = LR * float(np.sqrt(scale))
        workers[name].ask("reset", seed=number, lr=lr)
        round_of[name] = {"lr": lr, "oom": False}
    traces = {name: [] for name in names}
    for part in range(SLICES):
        for name in names:
            totals = round_of[name]
            if totals["oom"]:
                continue
            mine = steps[name]
            some = mine[part * len(mine) // SLICES : (part + 1) * len(mine) // SLICES]
            try:
                reply = workers[name].ask("train", steps=some)
            except WorkerDied:
                reply = {"steps": [], "oom": True}
            traces[name] += reply["steps"]
            if reply["oom"]:
                totals["oom"] = True
                workers[name].close()
                workers[name] = bench.new_worker()
    for name in names:
        totals = round_of[name]
        totals["seconds"] = sum(step[0] for step in traces[name])
        if not totals["oom"]:
            totals["loss"] = workers[name].ask("evaluate")["loss"]
            if len(traces[name]) == len(traces[shipped]):
                totals["curve_difference"] = difference(traces[name], traces[shipped])
    results["rounds"].append(round_of)
    if number == 0:
        results["trace"] = traces
        results["held_bytes"] = workers[shipped].started["held_bytes"]


def difference(trace, other):
    """Return the largest relative difference between the losses of two trainings' steps."""
    pairs = zip(trace, other, strict=True)
    # An emulated device computes no losses: all are 0.
    return max(abs(mine[2] - theirs[2]) / (theirs[2] or 1.0) for mine, theirs in pairs)


def progress(recipe, text):
    """Say what is being done."""
    print(f"{recipe.name}: {text}", file=sys.stderr, flush=True)


def parsed(argv):
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="recipes.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "recipes",
        nargs="*",
        metavar="RECIPE",
        help="default: all; or summarise",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument(
        "--minutes",
        type=float,
        default=22.0,
        help="for all recipes, with their searches; default: 22",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N",
        help="recipes at a time, each on its own core; default: 1",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=HERE / "results", metavar="DIR")
    parser.add_argument(
        "--work", type=Path, default=Path("recipes-work"), metavar="DIR",
        help="probes and found settings; default: recipes-work",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if unknown := set(options.recipes) - {*RECIPES, "summarise"}:
        parser.error(f"unknown recipe {min(unknown)!r}: --help lists them")
    return options


def main(argv):
    """Run recipes or summarise them; 1 if one could not be run."""
    options = parsed(argv)
    if "summarise" in options.recipes:
        summarise(options.out)
        return 0
    names = options.recipes or list(RECIPES)
    if len(names) > 1:
        return run_several(names, options)
    options.out.mkdir(parents=True, exist_ok=True)
    stand_in_for_torchaudio(options.work / "stand-ins")
    failed = why_it_failed(RECIPES[names[0]], options)
    if failed is not None:
        print(f"Left out: {names[0]}: {failed}", file=sys.stderr)
    return int(failed is not None)


def why_it_failed(recipe, options):
    """Run a recipe; return why it could not be run."""
    if options.device.startswith("cuda"):
        recipe = replace(recipe, **recipe.on_cuda)
    try:
        run_recipe(recipe, options, time.monotonic() + 60 * options.minutes)
    except (DoesNotFit, WorkerDied):
        return "a batch of one does not fit its limit"
    except OutOfTime:
        return "--minutes is too short to find what it ships"
    except NoLengths as error:
        return str(error)
    except BatchtuneError as error:
        return f"{error.message}. {error.hint or ''}"
    except subprocess.CalledProcessError as error:
        return f"batchtune ended with {error.returncode}"
    return None


def run_several(names, options):
    """Run recipes in processes of their own, `--jobs` at a time; 1 if one could not be run."""
    deadline = time.monotonic() + 60 * options.minutes
    words = ["--device", options.device, "--out", str(options.out), "--work", str(options.work)]  # fmt: skip

    def run(place):
        left = max(0.0, deadline - time.monotonic())
        turns = math.ceil((len(names) - place) / options.jobs)
        minutes = min(left, MORE_THAN_EVEN * left / turns) / 60
        command = [sys.executable, __file__, names[place], *words]
        return subprocess.run([*command, "--minutes", f"{minutes:.2f}"]).returncode

    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            return max(pool.map(run, range(len(names))))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
