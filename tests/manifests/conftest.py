"""What the tests of the manifests share."""

import shutil
from pathlib import Path

import pytest

from batchtune.errors import ManifestError
from batchtune.manifests import ReadOptions, load_lengths

CASES = Path(__file__).parent / "cases"


@pytest.fixture
def read(tmp_path):
    """Writes a manifest and reads it: read(content, name="manifest", **options)."""

    def run(content, name="manifest", **options):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return load_lengths(path, ReadOptions(**options))

    return run


@pytest.fixture
def refusal(read):
    """The ManifestError that reading a manifest must end with."""

    def run(content, name="manifest", **options):
        with pytest.raises(ManifestError) as caught:
            read(content, name, **options)
        assert caught.value.hint
        return caught.value

    return run


def cases(rows, names):
    """Run a test for each row, which is named by what it holds."""
    return pytest.mark.parametrize(names.split(), rows.values(), ids=rows)


def by_transformers(folder, rows):
    """The tokens of each chat and its tools in a training with transformers, in descending order."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    rendered = [
        tokenizer.apply_chat_template(chat, tools=tools, return_dict=False)
        for chat, tools in rows
    ]
    return sorted(map(len, rendered), reverse=True)


@pytest.fixture
def tokenizer(tmp_path):
    """A folder with a tokenizer of words that truncates, pads, and begins each text with a token of its own."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "model"
    shutil.copytree(CASES / "tok", folder)
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made.enable_truncation(1)
    made.enable_padding(length=9)
    made.save(str(folder / "tokenizer.json"))
    return folder
