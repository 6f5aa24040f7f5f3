"""Small data sets on which lengths went wrong, each with its right lengths, or the message that says what to do."""

import json
import re
import struct

import numpy as np
import pytest
from manifests.conftest import CASES, by_transformers
from manifests.samples import parquet, wav


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def said(role, content):
    return {"role": role, "content": content}


def asked(prompt, *answers):
    return [said("user", prompt), *(said("assistant", answer) for answer in answers)]


KALDI = {
    "segments": "a-1 a 10.0 15.0\na-2 a 20.0 27.5\nb-1 b 270.0 -1\n",
    "reco2dur": "a 600.0\nb 300.0\n",
    "text": "a-1 hello\na-2 hello\nb-1 hello\n",
}
DROPPED = {"utt2dur": "a 2\nb 4\nc 8\nd 16\n", "text": "a one\nb two\nc three\n"}
IMAGE = said("user", [{"type": "image"}, {"type": "text", "text": "what is"}])
TOKENS = [
    {"prompt_tokens": 10, "completion_tokens": 100},
    {"prompt_tokens": 20, "completion_tokens": 500},
]
CHATS = lines(
    {"prompt": asked("w w "), "completion": [said("assistant", "v v v ")]},
    {"prompt": asked("w w w w "), "completion": [said("assistant", "v ")]},
)
AUDIO = [
    {"audio": {"bytes": wav(size), "path": "a.wav"}, "text": "x"}
    for size in (800, 1600)
]
LJSPEECH = 'LJ1|hello|hello\nLJ2|hello, "there|hello, "there\nLJ3|one|1\n'
SPANS = "path,start,end,text\na.wav,1.0,3.5,x\na.wav,10,20,y\n"


@pytest.mark.parametrize(
    ("files", "options", "lengths", "unit"),
    [
        (KALDI, {}, [30, 7.5, 5], "s"),
        (DROPPED, {"skip_invalid": True}, [8, 4, 2], "s"),
        (parquet(TOKENS), {"length_key": "prompt_tokens+completion_tokens"}, [520, 110], "tokens"),
        (parquet([{"x": {"y": asked("ab", "c")}}]), {"length_key": "x.y"}, [3], "characters"),
        (parquet([{"x": [asked("ab", "c")]}]), {"length_key": "x[0]"}, [3], "characters"),
        (parquet(AUDIO), {}, [0.1, 0.05], "s"),
    ],
)  # fmt: skip
def test_the_lengths_are_right(read, files, options, lengths, unit):
    found = read(files, **options)
    assert (found.values.tolist(), found.unit) == (lengths, unit)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (DROPPED, "id 'd': 'duration' can't be read: an id that the utterances beside it lack"),
        ({**KALDI, "reco2dur": "a 600\n"}, "id 'b-1': 'duration' .*segment without an end: is b in"),
        ({"utt2dur": "a 1\n", "segments": KALDI["segments"]}, "an id that the utterances beside it lack"),
        ({"reco2dur": KALDI["reco2dur"], "text": KALDI["text"]}, "an id that the utterances beside it lack"),
        (parquet(TOKENS), "2 columns .* 'prompt_tokens' .* 'completion_tokens'"),
        ('{"duration": NaN}\n', "line 1: 'duration' is missing"),
        (parquet([{"image": {"bytes": wav(8), "path": "a"}, "text": "x"}]), "no column that is known"),
        (LJSPEECH, "no column .*: '1', '2', '3'\nName .*--length-key NAME"),
        ("a|b\nc|d|e\n", "line 2: 3 cells, separated by bars"),
        (SPANS, "no column .*\n.*--length-key end-start"),
    ],
    ids=str,
)  # fmt: skip
def test_what_to_do_is_said(refusal, files, message):
    error = refusal(files)
    assert re.search(message, f"{error.message}\n{error.hint}", re.DOTALL)


def test_a_segment_that_ends_before_it_begins_is_invalid(refusal):
    error = refusal("start,end\n3,1\n", length_key="end-start", unit="s")
    assert "'end-start' is -2.0 (negative)" in error.message


@pytest.mark.parametrize(
    ("content", "is_told"),
    [
        (lines({"messages": [IMAGE]}), True),
        (lines({"messages": [said("user", "x")]}, {"messages": [IMAGE]}), True),
        (lines({"messages": [said("user", [{"type": "text", "text": "x"}])]}), False),
    ],
)
def test_images_in_chats_are_told(read, content, is_told):
    assert any("hold images" in note for note in read(content).notes) == is_told


def test_files_of_one_set_in_seconds_and_milliseconds_are_told(read):
    files = {
        f"{name}.jsonl": lines(*({"duration": scale * n} for n in (3.1, 5.2, 7.7)))
        for name, scale in (("a", 1), ("b", 1000), ("c", 3))
    }
    (note,) = (n for n in read(files).notes if "different units" in n)
    assert "b.jsonl" in note and "a.jsonl" in note and "1,000 times" in note
    assert len(read(files, "{a,c}.jsonl").notes) == 1


# As transformers renders them


@pytest.mark.parametrize(
    "as_stored",
    [
        lambda tools: tools,
        json.dumps,
        lambda tools: list(map(json.dumps, tools)),
    ],
    ids=["objects", "JSON", "list of JSON"],
)
def test_tools_count_as_the_template_renders_them(read, as_stored):
    text = (CASES / "tools.jsonl").read_text()
    rows = list(map(json.loads, text.splitlines()))
    rows.append({"messages": rows[0]["messages"], "tools": []})
    stored = [{**row, "tools": as_stored(row["tools"])} for row in rows]
    found = read(lines(*stored), tokenizer=str(CASES / "tok"))
    chats = [(row["messages"], row["tools"] or None) for row in rows]
    assert found.values.tolist() == by_transformers(CASES / "tok", chats)


@pytest.mark.parametrize("tokenizer", ["strict", "default_system"])
def test_prompt_and_completion_are_one_chat(read, tokenizer):
    folder = CASES / tokenizer
    found = read(CHATS, tokenizer=str(folder))
    rows = map(json.loads, CHATS.splitlines())
    chats = [(row["prompt"] + row["completion"], None) for row in rows]
    assert found.values.tolist() == by_transformers(folder, chats)


# Indexes, as their libraries write them

SIZES = np.array([3, 12, 1])


def megatron():
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 3, 4)
    pointers = np.array([0, 12, 60], "<i8").tobytes()
    return head + SIZES.astype("<i4").tobytes() + pointers + bytes(32)


def fairseq():
    head = b"MMIDIDX\0\0" + struct.pack("<QBQ", 1, 4, 3)
    return head + SIZES.astype("<i4").tobytes() + bytes(24)


def chunk(config=b""):
    begin = 4 + 4 * (SIZES.size + 1) + len(config)
    offsets = begin + np.cumsum([0, *SIZES])
    head = struct.pack("<I", SIZES.size) + offsets.astype("<u4").tobytes()
    return head + config + b"x" * int(SIZES.sum())


INDEXES = {
    "megatron": (megatron(), "tokens"),
    "fairseq": (fairseq(), "tokens"),
    "mds": (chunk(b'{"format": "mds"}'), "bytes"),
    "litdata": (chunk(), "bytes"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_sizes_stand_in_the_header(read, name):
    content, unit = INDEXES[name]
    found = read(content)
    assert (found.values.tolist(), found.unit) == ([12, 3, 1], unit)


@pytest.mark.parametrize("name", INDEXES)
def test_a_header_that_breaks_off_or_lies_is_one_message(refusal, name):
    content, _ = INDEXES[name]
    for damaged in (content[:13], content[:30], content[:8], huge(content)):
        assert "breaks off" in refusal(damaged, format="sizes").message


def huge(content):
    """The same with an absurd number of examples."""
    if content.startswith(b"MMIDIDX"):
        return content[:18] + struct.pack("<Q", 2**60) + content[26:]
    return struct.pack("<I", 2**32 - 1) + content[4:]
