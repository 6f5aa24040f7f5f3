"""Token lengths of five public data sets, where they are in a folder `shared/data` beside a folder above this one."""

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def folder():
    """The folder of the data sets; None where it is absent."""
    places = (above / "shared" / "data" for above in Path(__file__).resolve().parents)
    return next((place for place in places if place.is_dir()), None)


def sharegpt(data):
    """Prompts and answers of ShareGPT."""
    return two_columns(data / "sharegpt-lengths")


def vidur(data):
    """Prompts and summaries of vidur's arXiv trace."""
    return two_columns(data / "vidur-traces")


def two_columns(place):
    """Tokens of prompts and answers."""
    file = next(place.glob("*.csv"))
    rows = np.loadtxt(file, delimiter=",", skiprows=1, usecols=(0, 1))
    return rows.sum(axis=1).astype(np.int64)


def mooncake(data):
    """Inputs and outputs of Mooncake's conversations."""
    with gzip.open(data / "mooncake-fast25" / "conversation_trace.jsonl.gz") as file:
        rows = [json.loads(line) for line in file]
    return np.array([row["input_length"] + row["output_length"] for row in rows])


def gsm8k(data):
    """Characters of questions and answers of GSM8K."""
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(data / "gsm8k-parquet" / "test.parquet")
    texts = [row["extra_info"] for row in rows.to_pylist()]
    return np.array([len(text["question"]) + len(text["answer"]) for text in texts])


def code(data):
    """Bytes of files of code, without the empty ones."""
    file = data / "code-file-lengths" / "code_file_lengths.tsv.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t"))
    sizes = np.array([int(row["bytes"]) for row in rows])
    return sizes[sizes > 0]


SETS = {
    "sharegpt": sharegpt,
    "mooncake": mooncake,
    "vidur": vidur,
    "gsm8k": gsm8k,
    "code": code,
}
