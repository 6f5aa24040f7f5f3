"""The example's stream: SpeechBrain's function and our stage read as many batches as the sweep predicts."""

import os
from pathlib import Path

import pytest
from started import python

pytest.importorskip("webdataset")
EXAMPLES = Path(__file__).parents[1] / "examples" / "streams"


@pytest.mark.slow
def test_the_example_reads_what_it_predicts(tmp_path):
    """An empty module takes torchaudio's place, which does not load beside every torch."""
    (tmp_path / "torchaudio.py").touch()
    path = os.pathsep.join([str(tmp_path), str(EXAMPLES.parents[1])])
    env = {**os.environ, "PYTHONPATH": path}
    done = python(EXAMPLES / "read_stream.py", "--out", tmp_path, env=env)
    rows = {line[:25].strip(): line[25:].split() for line in done.stdout.splitlines()}
    # Batches, padding, mean and largest size.
    assert rows["BucketedStream, read"] == rows["BucketedStream, predicted"]
    if "SpeechBrain, skipped:" not in rows:
        read = rows["SpeechBrain, read"]
        predicted = rows["SpeechBrain, predicted"]
        assert int(read[0]) == pytest.approx(int(predicted[0]), rel=0.02)
        assert rows["- as a nominal epoch"] == predicted[:1]
