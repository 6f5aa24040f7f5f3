"""The lengths of a stream, as they are stored, shard after shard."""

import gzip

import pytest
from samples import shard

from batchtune.manifests import ReadOptions, load_lengths, load_stream


def write_shard(path, samples):
    members = [
        (f"{key}.json", f'{{"duration": {duration}}}'.encode())
        for key, duration in samples.items()
    ]
    path.write_bytes(shard(members))
    return path


def test_shards_are_read_in_their_order(tmp_path):
    first = write_shard(tmp_path / "a-0.tar", {"x": 3, "y": 1})
    second = write_shard(tmp_path / "a-1.tar", {"z": 2, "x": 5})
    found = load_stream([str(second), str(first)])
    assert found.values.tolist() == [2, 5, 3, 1]
    for told, path in zip(found.shards, (second, first), strict=True):
        assert (told.label, told.size) == (str(path), path.stat().st_size)
        assert (told.count, told.broken) == (2, False)
    assert found.repeated_ids == 1
    same = load_lengths([str(first), str(second)])
    assert found.lengths.fingerprint == same.fingerprint
    some = load_stream([str(second), str(first)], ReadOptions(max_length=2))
    assert [shard.count for shard in some.shards] == [1, 1]
    assert some.lengths.left_out == {"longer than --max-length 2": 2}


def test_a_manifest_is_no_shard_but_several_are(tmp_path):
    first, second = tmp_path / "a.csv", tmp_path / "b.csv"
    first.write_text("id,duration\n1,4\n2,3\n")
    second.write_text("id,duration\n3,7\n")
    assert load_stream(first).shards == []
    both = load_stream([first, second])
    assert both.values.tolist() == [4, 3, 7]
    assert [shard.count for shard in both.shards] == [2, 1]
    assert both.repeated_ids is None


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_whole_samples_of_a_shard_that_breaks_off_are_counted(tmp_path, compress):
    whole = write_shard(tmp_path / "a-0.tar", {"x": 3, "y": 1})
    lengths = {f"k{number}": number + 1 for number in range(100)}
    cut = write_shard(tmp_path / "a-1.tar", lengths)
    cut.write_bytes(compress(cut.read_bytes()[:10_700]))
    found = load_stream([whole, cut], ReadOptions(skip_invalid=True))
    assert [shard.broken for shard in found.shards] == [False, True]
    # Of each a header and a block; nothing says of the last one that it has no more members.
    count = found.shards[1].count
    assert count in (9, 10)
    assert found.values.tolist() == [3, 1, *range(1, count + 1)]
