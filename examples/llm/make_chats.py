"""Makes a small fine-tuning data set and its tokenizer from what every machine has: Python's own standard library.

A chat asks for a function by its name and docstring, and answers with its source. The tokenizer (byte-level BPE) is
trained on these texts, and has a chat template, as that of a model from the Hugging Face Hub does.

    python examples/llm/make_chats.py chats
    batchtune scan chats/chats.jsonl --tokenizer chats
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|im_start|>", "<|im_end|>"]
VOCABULARY = 8192


def main() -> None:
    """Writes chats.jsonl, tokenizer.json and tokenizer_config.json."""
    parser = argparse.ArgumentParser(
        description="Makes chats about the standard library, and a tokenizer."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=int, help="how many chats at most")
    arguments = parser.parse_args()
    library = Path(sysconfig.get_path("stdlib"))
    all_chats = itertools.chain.from_iterable(
        map(chats_in, sorted(library.glob("*.py")))
    )
    chats = list(itertools.islice(all_chats, arguments.most))

    arguments.folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"messages": messages}) + "\n" for messages in chats]
    (arguments.folder / "chats.jsonl").write_text("".join(lines), encoding="utf-8")
    tokenizer = ByteLevelBPETokenizer()
    texts = (message["content"] for messages in chats for message in messages)
    tokenizer.train_from_iterator(
        texts, vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.save(str(arguments.folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[1],
        "chat_template": TEMPLATE,
    }
    (arguments.folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2), encoding="utf-8"
    )
    print(f"{len(chats):,} chats")


def chats_in(path: Path) -> Iterator[list[dict[str, str]]]:
    """Yields a chat for each function of a module that has a docstring."""
    source = path.read_text(encoding="utf-8", errors="replace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in old sources
        tree = ast.parse(source)
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            question = f"Write a Python function `{node.name}`. {docstring}"
            answer = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            yield [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]


if __name__ == "__main__":
    main()
