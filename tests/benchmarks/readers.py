"""How fast JSON manifests are read, against Python's own json: `python tests/benchmarks/readers.py`.

Makes a manifest of each kind with a million examples, reads each with both, in turn, each time in a new
process, and prints the medians of the processor time and their ratio, as JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

COUNT = 1_000_000
REPEATS = 5
_WORDS = "the of and to in that he was it his is with as had for her not but at on she be".split()
_MEASURED = """
import sys, time
{imports}
start = time.process_time()
{body}
print(time.process_time() - start)
"""
_OURS = ("from batchtune.manifests import load_lengths", "load_lengths(sys.argv[1])")
_KINDS = {
    "nemo": (
        "import json",
        "lengths = [json.loads(line)['duration'] for line in open(sys.argv[1])]",
    ),
    "speechbrain-json": ("import json", "entries = json.load(open(sys.argv[1]))"),
}


def examples(count):
    draw = random.Random(1)
    for number in range(count):
        yield (
            number,
            round(draw.lognormvariate(2.3, 0.5), 4),
            " ".join(draw.choices(_WORDS, k=28)),
        )


def write_nemo(path, count):
    with path.open("w") as stream:
        for number, duration, text in examples(count):
            entry = {
                "audio_filepath": f"/data/train/{number % 1000}/{number:07d}.wav",
                "duration": duration,
                "text": text,
            }
            stream.write(json.dumps(entry) + "\n")


def write_speechbrain(path, count):
    """As SpeechBrain's recipes write it: json.dumps(entries, indent=2)."""
    with path.open("w") as stream:
        for number, duration, text in examples(count):
            wav = f"{{data_root}}/train/{number:07d}.wav"
            entry = {
                "wav": wav,
                "length": duration,
                "spk_id": f"{number % 1000}",
                "wrd": text.upper(),
            }
            written = json.dumps(entry, indent=2).replace("\n", "\n  ")
            stream.write(f'{"," if number else "{"}\n  "utt{number:07d}": {written}')
        stream.write("\n}\n")


def measured(imports, body, path):
    """Seconds that a piece of code takes in a new process."""
    code = _MEASURED.format(imports=imports, body=body)
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(ran.stdout)


def main():
    with tempfile.TemporaryDirectory() as folder:
        for kind, write in (
            ("nemo", write_nemo),
            ("speechbrain-json", write_speechbrain),
        ):
            path = Path(folder, kind)
            write(path, COUNT)
            runs = [
                (measured(*_KINDS[kind], path), measured(*_OURS, path))
                for _ in range(REPEATS)
            ]
            theirs, ours = map(statistics.median, zip(*runs, strict=True))
            result = {
                "manifest": kind,
                "json_seconds": round(theirs, 3),
                "batchtune_seconds": round(ours, 3),
                "ratio": round(theirs / ours, 2),
            }
            print(json.dumps(result))


if __name__ == "__main__":
    main()
