"""Messages quote little of what a file holds, however long its ids, keys and values are."""

import pytest
from samples import SAMPLES

from batchtune.errors import ManifestError, shortened

LONG = 20_000
MOST_CHARACTERS = 1500
KINDS = pytest.mark.parametrize(
    "name", ["nemo", "speechbrain-json", "table", "kaldi", "parquet", "webdataset"]
)


def assert_short(error):
    assert len(error.message) <= MOST_CHARACTERS
    assert len(error.hint or "") <= MOST_CHARACTERS


@KINDS
def test_a_long_value_is_quoted_by_its_beginning(refusal, name):
    error = refusal(SAMPLES[name].content(["1", "z" * LONG, "2"]), format=name)
    assert_short(error)
    assert "zzzzz" in error.message


@KINDS
def test_a_long_id_is_quoted_by_its_beginning(refusal, name):
    text = SAMPLES[name].text
    content = SAMPLES[name].content(["1", "-1", "2"])
    assert_short(refusal(content.replace(b"utt1", b"u" * LONG) if text else content))


@pytest.mark.parametrize(
    "content",
    [
        '{"KEY": 1}\n',
        '[{"KEY": 1}]',
        '{"a": {"KEY": 1}}',
        "id,KEY\na,1\n",
        "id,KEY,KEY\na,1,2\n",
        "id," + ",".join(f"column {number}" for number in range(5000)) + "\n",
        "id," + ",".join(f"column {number // 2}" for number in range(5000)) + "\n",
        "id,"
        + ",".join(f"duration{'_' * number}" for number in range(500))
        + "\n"
        + ",".join(["1"] * 501)
        + "\n",
    ],
)
def test_long_and_many_columns_are_listed_in_short(refusal, content):
    for key in ("k" * LONG, "k " * LONG):
        error = refusal(content.replace("KEY", key))
        assert len(error.message) <= 3 * MOST_CHARACTERS
        assert len(error.hint or "") <= MOST_CHARACTERS


def test_a_path_is_named_whole_unless_it_is_endless():
    path = "/".join(["folder"] * 40)
    assert path in ManifestError(f"{path} does not exist").message
    endless = "/".join([*["d" * 200] * 19, "name.csv"])
    message = ManifestError(f"{endless} does not exist").message
    assert len(message) < 500
    assert "name.csv does not exist" in message


def test_a_number_that_python_refuses_to_write_can_be_quoted():
    assert shortened(10**5000) == "a number of thousands of digits"
