"""The result files: typed records and their versioned JSON.

A run folder holds `run.json` (what the trials were measured for), `trials.jsonl`, `probe.json`, `sweep.json`,
`sampler.yaml` and `verify.json`; that of a stream `stream.json` and `stream.yaml`; that of a loader
`loader.json` and `loader.yaml`; that of a recorded training `training.jsonl`. Units are in the names; unknown is
None (`null`), never 0.

Files may come from anywhere. The types of the records limit each number, and their method `problems` checks how numbers
relate; `read_result` checks both, once, when it reads a file.
"""

# ruff: noqa: F403  # every name of these modules is public here
from batchtune.records import *
from batchtune.results.loader import *
from batchtune.results.measured import *
from batchtune.results.printed import *
from batchtune.results.rows import *
from batchtune.results.shared import *
from batchtune.results.sweep import *
