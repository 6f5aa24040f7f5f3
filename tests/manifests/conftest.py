"""What the tests of the manifests share."""

import shutil
from pathlib import Path

import pytest

from batchtune.errors import ManifestError
from batchtune.manifests import ReadOptions, load_lengths

CASES = Path(__file__).parent / "cases"


def write_files(folder, files):
    """Write files by name: texts, or bytes."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture
def read(tmp_path):
    """Writes a manifest and reads it: read(content, name="manifest", **options).

    Of several files, read({name: content, …}, "*.csv"), those that are named; by default all in their folder.
    """

    def run(content, name=None, **options):
        if isinstance(content, dict):
            write_files(tmp_path, content)
            return load_lengths(f"{tmp_path}/{name or ''}", ReadOptions(**options))
        path = tmp_path / (name or "manifest")
        write_files(tmp_path, {path.name: content})
        return load_lengths(path, ReadOptions(**options))

    return run


@pytest.fixture
def refusal(read):
    """The ManifestError that reading a manifest, or several, must end with."""

    def run(content, name=None, **options):
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
