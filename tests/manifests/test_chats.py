"""Chats as examples: by their contents, or as a tokenizer's chat template renders them."""

import json

import pytest
from manifests.conftest import by_transformers
from manifests.samples import parquet

from batchtune.manifests import texts

CHATS = [
    {
        "messages": [
            {"role": "user", "content": "one two"},
            {"role": "assistant", "content": "three"},
        ]
    },
    {
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "two"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"name": "sum", "arguments": {"a": 1}}],
            },
            {"role": "tool", "content": "three </s>"},
        ]
    },
]
AS_CHATS = [(chat["messages"], None) for chat in CHATS]
LINES = "".join(json.dumps(chat) + "\n" for chat in CHATS)
TEMPLATE = """{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
{{ '<|' + message.role + '|> ' }}
    {%- if message.tool_calls is defined %}{{ message.tool_calls | tojson(indent=1) }}{% endif %}
    {%- if message.content is defined %}{% generation %}{{ message.content }}{% endgeneration %}{% endif %}
 {{ eos_token }}
{% endfor %}
{%- if tools is not none or add_generation_prompt %}{{ raise_exception('unexpected') }}{% endif %}
{{ dict(count=ns.count).count }} {{ strftime_now('%d') | length }}
"""


@pytest.fixture(autouse=True)
def with_template(tokenizer):
    write_config(tokenizer, chat_template=TEMPLATE)


def write_config(folder, **fields):
    bos = {"__type": "AddedToken", "content": "<s>"}
    config = {"bos_token": bos, "eos_token": "</s>", **fields}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_note_says_how_chats_are_counted(read):
    said = "'messages' holds chats: the characters of their contents are counted"
    assert said in read(LINES).notes[0]


NAMED = [
    {"name": "tool_use", "template": "one"},
    {"name": "default", "template": TEMPLATE},
]


@pytest.mark.parametrize("template", [TEMPLATE, NAMED], ids=["one", "the default"])
@pytest.mark.parametrize("content", [LINES, parquet(CHATS)], ids=["lines", "Parquet"])
def test_a_chat_template_counts_as_in_training(read, tokenizer, content, template):
    write_config(tokenizer, chat_template=template)
    found = read(content, tokenizer=str(tokenizer))
    assert found.values.tolist() == by_transformers(tokenizer, AS_CHATS)
    assert found.unit == "tokens"
    assert "as the chat template in" in found.notes[0]
    assert "jinja2's sandbox" in found.notes[0]


def test_a_template_may_lie_in_a_file_of_its_own(read, tokenizer):
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE + "{{ ' one one' }}")
    found = read(LINES, tokenizer=str(tokenizer / "tokenizer.json"))
    assert found.values.tolist() == by_transformers(tokenizer, AS_CHATS)
    assert "chat_template.jinja" in found.notes[0]


def test_without_a_template_the_tokens_of_contents_are_counted(read, tokenizer):
    write_config(tokenizer)
    found = read(LINES, tokenizer=str(tokenizer))
    assert found.values.tolist() == [5, 3]
    assert "without a chat template" in found.notes[0]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "an empty list"),
        (["a"], "not a list of messages"),
        ([{"role": "user", "content": ""}], "zero"),
    ],
)
def test_what_is_no_chat_is_named(refusal, messages, said):
    error = refusal(LINES + json.dumps({"messages": messages}) + "\n")
    assert "line 3: 'messages' " in error.message and said in error.message


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() | length }}",
        "{{ dict.__globals__.keys() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% set ns = namespace() %}{% set ns.__html__ = raise_exception %}{{ ns }}",
        "{{ namespace(__html__=raise_exception) }}",
        "{{ messages.append(1) }}",
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_named(refusal, tokenizer, template):
    write_config(tokenizer, chat_template=template)
    message = refusal(LINES, tokenizer=str(tokenizer)).message
    assert "line 1: 'messages' can't be read" in message
    assert "refused by the chat template" in message


def test_a_template_that_never_ends_is_one_error(refusal, tokenizer, monkeypatch):
    monkeypatch.setattr(texts, "_LONGEST_SECONDS", 0.1)
    loops = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    write_config(tokenizer, chat_template=loops)
    message = refusal(LINES, tokenizer=str(tokenizer)).message
    assert "tokenizer_config.json: the chat template takes more than 0.1 s" in message


@pytest.mark.parametrize("content", ["{", '{"chat_template": "{% if %}"}'])
def test_a_damaged_template_is_one_error(refusal, tokenizer, content):
    (tokenizer / "tokenizer_config.json").write_text(content)
    assert "tokenizer_config.json" in refusal(LINES, tokenizer=str(tokenizer)).message
