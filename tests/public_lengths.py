"""Token lengths of five public data sets, where they are in a folder `shared/data` beside a folder above this one."""

from pathlib import Path

import pandas as pd


def folder():
    """The folder of the data sets; None where it is absent."""
    places = (above / "shared" / "data" for above in Path(__file__).resolve().parents)
    return next((place for place in places if place.is_dir()), None)


def two_columns(place):
    """Tokens of prompts and answers."""
    return pd.read_csv(next(place.glob("*.csv"))).iloc[:, :2].sum(axis=1)


def sharegpt(data):
    """Prompts and answers of ShareGPT."""
    return two_columns(data / "sharegpt-lengths")


def vidur(data):
    """Prompts and summaries of vidur's arXiv trace."""
    return two_columns(data / "vidur-traces")


def mooncake(data):
    """Inputs and outputs of Mooncake's conversations."""
    rows = pd.read_json(
        data / "mooncake-fast25" / "conversation_trace.jsonl.gz", lines=True
    )
    return rows["input_length"] + rows["output_length"]


def gsm8k(data):
    """Characters of questions and answers of GSM8K."""
    texts = pd.read_parquet(data / "gsm8k-parquet" / "test.parquet")["extra_info"]
    return texts.str["question"].str.len() + texts.str["answer"].str.len()


def code(data):
    """Bytes of files of code, without the empty ones."""
    rows = pd.read_csv(
        data / "code-file-lengths" / "code_file_lengths.tsv.gz", sep="\t"
    )
    return rows["bytes"][rows["bytes"] > 0]


SETS = {
    "sharegpt": sharegpt,
    "mooncake": mooncake,
    "vidur": vidur,
    "gsm8k": gsm8k,
    "code": code,
}
