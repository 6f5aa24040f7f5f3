"""No secret of a command or a URL is written to a file."""

import shlex

import pytest
from msgspec.structs import replace
from report_records import made_probe

from batchtune.files import command_text, redacted_command
from batchtune.lengths import Lengths
from batchtune.probe.settings import ProbeSettings, begin_run
from batchtune.reports import FORMATS, load_run, render
from batchtune.results import write_result

TOKEN = "hf_AbCdEfGhIjKlMnOpQrSt"


@pytest.mark.parametrize(
    "line",
    [
        "train.py --hf-token SECRET",
        "train.py --hf_token=SECRET",
        "train.py --password SECRET",
        "train.py '--password=a,SECRET;b'",
        "train.py --wandb-api-key SECRET --lr 1e-3",
        "train.py model.auth.token=SECRET",
        "train.py +secret_key=SECRET",
        "env HF_TOKEN=SECRET python train.py",
        "bash -c 'export AWS_SECRET_ACCESS_KEY=SECRET; python train.py'",
        "bash -c 'curl -H \"Authorization: Bearer SECRET\" x'",
        "bash -c 'python train.py --hf-token SECRET --lr 1'",
        "train.py hf_SECRETSECRETSECRETSECRET",
        "train.py --name sk-proj-SECRETSECRETSECRET",
        "train.py --store ghp_SECRETSECRETSECRETSECRET",
        "train.py --data https://me:SECRET@host/train.json",
        "train.py --data 's3://bucket/a?X-Amz-Signature=SECRET&x=1'",
        "train.py eyJhbGciOiJIUzI1NiJ9.eyJSECRET.SECRET",
    ],
)
def test_a_secret_is_not_in_a_recorded_command(line):
    words = shlex.split(line)
    public = redacted_command(words)
    assert "SECRET" not in " ".join(public).replace("AWS_SECRET", "")
    assert "sha256:" in " ".join(public)
    other = redacted_command([word.replace("SECRET", "OTHERS") for word in words])
    assert other != public  # it is another command
    assert redacted_command(public) == public or "//" in line
    kept = [word for word in words if "SECRET" not in word]
    assert [word for word in public if "sha256:" not in word] == kept


@pytest.mark.parametrize(
    "line",
    [
        "train.py --tokenizer bert-base --max-tokens 4096 --num_tokens=3 --tokens_per_batch 5",
        "train.py --pad-token '<pad>' --eos_token=</s> tokenizer.unk_token=<unk>",
        "train.py --use-auth-token True --token false",
        "train.py --target-key text --length-key num_tokens --key speech",
        "train.py --revision 3f2a9c8d7e6b5a4f3c2d1e0f9a8b7c6d5e4f3a2b --path a/b.pt",
        "train.py --token --verbose",
        "torchrun --nproc-per-node 2 --rdzv-endpoint host:29500 train.py",
    ],
)
def test_other_words_stay_as_they_are(line):
    words = shlex.split(line)
    assert redacted_command(words) == words


def test_no_file_of_a_run_and_no_report_holds_the_token(tmp_path):
    words = ["python", "train.py", "--hf-token", TOKEN]
    settings = ProbeSettings(
        workload=command_text(words), command=words, options={"api_key": "MySecret"}
    )
    probe = made_probe()
    begin_run(
        Lengths.of([1.0, 2.0], unit="s"), settings, tmp_path, probe.device, force=True
    )
    probed = replace(probe, workload=settings.subject)
    write_result(tmp_path / "probe.json", probed)
    shown = [render(report_format, load_run(tmp_path)) for report_format in FORMATS]
    written = [path.read_text() for path in tmp_path.iterdir()]
    assert len(written) == 2
    for text in (*written, *shown):
        assert "hf_" not in text and "MySecret" not in text
        assert "sha256:" in text
