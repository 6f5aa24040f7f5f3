"""Sources on S3, as moto's server on this machine plays it; credentials are those of the environment."""

import pytest
from manifests.samples import long_shard

from batchtune.errors import ManifestError
from batchtune.manifests import ReadOptions, load_lengths, scan
from batchtune.manifests.storage import _filesystem

pytestmark = [
    pytest.mark.slow,
    # boto's and moto's own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def s3():
    """A client of a server with an empty bucket."""
    # What it imports takes half a second, which a run without this fixture need not spend.
    pytest.importorskip("s3fs")
    moto_server = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        yield client
        _filesystem.cache_clear()
    server.stop()


def forget_credentials():
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    _filesystem.cache_clear()


@pytest.mark.parametrize("manifest", ["s3://bucket/train", "s3://bucket/train/*.tar"])
def test_few_bytes_of_shards_are_fetched(s3, tmp_path, manifest):
    for number in range(4):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(long_shard(number, 25))
        s3.upload_file(str(path), "bucket", f"train/{number}.tar")
    options = ReadOptions(target_key="txt")
    fetched = []

    def note_traffic(share, examples, traffic):
        fetched.append(traffic)

    output = tmp_path / "remote.parquet"
    scan(manifest, options, output, jobs=2, on_progress=note_traffic)
    expected = load_lengths(str(tmp_path / "*.tar"), options)
    assert load_lengths(output).fingerprint == expected.fingerprint
    assert 0 < fetched[-1].size <= 100 * 3 * 1024


def test_a_bucket_or_object_that_is_missing_is_said(s3):
    for name, message in {
        "s3://no-such-bucket/a.csv": "no such bucket",
        "s3://bucket/none.csv": r"none\.csv does not exist",
        "s3://bucket/none-*.csv": "nothing matches",
    }.items():
        with pytest.raises(ManifestError, match=message):
            load_lengths(name)


def test_missing_credentials_are_said(s3, monkeypatch, tmp_path):
    forget_credentials()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ManifestError, match="no credentials") as caught:
        load_lengths("s3://bucket/a.csv")
    assert "AWS_PROFILE" in str(caught.value.hint)
    forget_credentials()
