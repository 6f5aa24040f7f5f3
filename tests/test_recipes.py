"""The benchmark of recipes: what the pages and the picture show is what the kept rounds say."""

from pathlib import Path

from benchmarks.recipe_picture import PICTURE, picture_of
from benchmarks.recipe_summary import pictured, read_summaries, written

KEPT = Path(__file__).parent / "benchmarks" / "results"


def test_pages_show_what_the_kept_rounds_say():
    for path, text in written(read_summaries(KEPT)).items():
        assert path.read_text(encoding="utf-8") == text, (
            "`recipes.py summarise` was not run"
        )


def test_the_picture_shows_what_the_kept_rounds_say():
    drawn = picture_of(pictured(read_summaries(KEPT)))
    assert (KEPT / PICTURE).read_text(encoding="utf-8") == drawn
