"""Makes the manifests that the scripts in this folder train on: `python examples/scripts/make_manifests.py`."""

import csv
import random
from pathlib import Path

FOLDER = Path(__file__).parent
WORDS = (
    "a and are at but for from had he her his i in it more not of on one said she some "
    "that the their them there they this to was were what when which who will with you "
    "about after again always another because before between children country different "
    "everything family further government himself important morning mother nothing "
    "number people question something sometimes themselves thought together"
).split()


def utterances(name, number):
    """Yields an id, a duration in seconds and a text of 8 to 14 characters a second."""
    for index in range(number):
        duration = random.lognormvariate(0.1, 0.5)
        duration = min(3.0, max(0.4, duration))
        most_characters = duration * random.uniform(8, 14)
        text = random.choice(WORDS[:20])
        word = random.choice(WORDS)
        while len(text) + 1 + len(word) <= most_characters:
            text = f"{text} {word}"
            word = random.choice(WORDS)
        yield f"{name}-{index:03}", f"{duration:.2f}", text


def write(name, header, rows):
    """Writes a CSV file next to this script."""
    with (FOLDER / name).open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(header)
        table.writerows(rows)


def main():
    """Writes made utterances, and a sample of the Python functions in ../stdlib_lengths.csv."""
    random.seed(0)
    header = ("ID", "duration", "text")
    write("speech_train.csv", header, utterances("train", 400))
    write("speech_valid.csv", header, utterances("valid", 24))
    with (FOLDER.parent / "stdlib_lengths.csv").open(newline="") as stream:
        header, *functions = csv.reader(stream)
    functions = [row for row in functions if 8 <= int(row[1]) <= 384]
    write("code_train.csv", header, functions[::17])
    write("code_valid.csv", header, functions[5::300])


if __name__ == "__main__":
    main()
