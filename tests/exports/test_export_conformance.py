"""What every export holds to, whatever the framework."""

import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from buckets.speech import swept
from exports.stream_runs import (
    PACKERS,
    TABLES,
    content,
    for_export,
    prose,
    rendered,
    tuned,
)
from loader_records import hostile_loader
from msgspec.structs import replace
from packed_records import MAX_TOKENS, with_packing
from pooled_records import pooled_sweep
from report_records import (
    hostile_results,
    made_probe,
    made_sweep,
    partly_proven_sweep,
    proven_probe,
    proven_sweep,
    whole_sweep,
    with_recommended,
    without_recommendation,
)
from reports.changed import with_row
from test_house import loaded_by

from batchtune.errors import ResultError
from batchtune.exports import FRAMEWORKS, export_of
from batchtune.lengths import SPEECH_UNITS, UNITS, Lengths

# These work batch sizes out of max_batch_length; the others take any table.
FROM_MAX_BATCH_LENGTH = {"speechbrain", "espnet", "fairseq"}
# These run batchtune's own sampler.
OURS = {"pytorch", "lightning", "transformers", "accelerate"}
# These count seconds, and refuse lengths that can't be turned into them.
IN_SECONDS = {"nemo", "lhotse", "nemo-tarred", "lhotse-shar"}


def frontier_sweep():
    """The recommended row takes its batch sizes from the frontier: a fifth more than max_batch_length allows."""
    made = replace(made_sweep(), recommended=58)
    sizes = [size + size // 5 for size in made.recommended_row.batch_sizes]
    return with_row(made, batch_sizes=sizes)


every_export = pytest.mark.parametrize("name", FRAMEWORKS)
every_table = pytest.mark.parametrize("name", TABLES)


def said(name, sweep, **fields):
    return prose(rendered(name, sweep, **fields))


def check(name, text):
    """It can be read as what its name says it is, and is tidy."""
    assert text.endswith("\n") and not text.endswith("\n\n")
    assert all(character == "\n" or character.isprintable() for character in text)
    assert not re.search(r"[ \t]\n", text)
    content(name, text)


@pytest.fixture(scope="module")
def sweeps():
    many = np.random.default_rng(0).gamma(2, 60, 3000).round() + 1
    return [
        *(made_sweep(unit=unit) for unit in (*UNITS, None)),
        made_sweep(timed=False),
        whole_sweep(),
        frontier_sweep(),
        pooled_sweep(),
        with_recommended(made_sweep(), "speechbrain", 20),
        swept([3.0, 4.5, 4.5, 7.25, 1.0] * 40, 30, num_buckets=(5,)),
        swept(Lengths.of(many, unit="tokens"), 5000, num_buckets=(5, 10)),
    ]


@every_export
def test_every_sweep_is_exported_or_refused_because_of_its_unit(name, sweeps):
    for found in sweeps:
        try:
            text = rendered(name, found, probe=made_probe())
        except ResultError as error:
            assert name in IN_SECONDS and found.lengths.unit not in ("s", "ms")
            assert (
                f"counts seconds, but the lengths are in '{found.lengths.unit}'"
                in error.message
            )
            of_audio = found.lengths.unit in SPEECH_UNITS
            assert error.hint and ("--unit s" in error.hint) == of_audio
        else:
            check(name, text)


@every_export
def test_the_same_run_gives_the_same_bytes_on_any_machine(name):
    text, again = (rendered(name, whole_sweep(), probe=made_probe()) for _ in range(2))
    assert text == again
    for path in (
        Path.cwd(),
        Path.home(),
        Path(__file__).parents[2],
        Path(tempfile.gettempdir()),
    ):
        assert str(path) not in text


@every_export
@pytest.mark.parametrize("allocator", ["native", "expandable"])
def test_the_setting_of_the_allocator_is_named_for_training(name, allocator):
    probe = made_probe()
    device = replace(probe.device, allocator=allocator)
    text = said(name, made_sweep(), probe=replace(probe, device=device))
    advice = (
        "Train with PYTORCH_ALLOC_CONF=expandable_segments:True, as it was measured"
    )
    assert text.count(advice) == int(allocator == "expandable")


HOSTILE = {
    "a line break": "x\nimport os\nbatch_bins: 1",
    "a carriage return": "x\rimport os\rbatch_bins: 1",
    "line breaks of Unicode": "x\u0085a: 1\u2028b: 1\u2029c: 1\x0bd: 1\x0ce: 1\x1cf: 1",
    "quotes": '""" \'\'\' \\" \\',
    "YAML": "]}: - &a *b !!python/object:os.system ${x} $(y) `z` #",
    "markup": "<script>{{ x }}{% y %}@CONFIG@",
    "hidden characters": "x\u202ey\u200bz\x1b[31m",
    "a lone surrogate": "x\udcffy",
    "a null": "x\0y",
    "long": "x" * 5000,
}


def hostile(name, text):
    """Every string of the run is this text; but the unit only where the framework takes any."""
    run = hostile_results(text)
    lengths = replace(run.sweep.lengths, unit="s" if name in IN_SECONDS else text)
    return tuned(
        for_export(name, replace(run.sweep, lengths=lengths), text),
        probe=replace(run.probe, lengths=lengths),
        loader=hostile_loader(text),
    )


@every_export
def test_a_hostile_string_stays_in_its_comment(name):
    harmless = content(name, export_of(name).render(hostile(name, "harmless")))
    for kind, text in HOSTILE.items():
        config = export_of(name).render(hostile(name, text))
        check(name, config)
        assert content(name, config) == harmless, kind


@every_export
def test_a_hostile_path_stays_a_path(name):
    harmless = content(name, rendered(name, made_sweep(), config="harmless"))
    for kind, text in HOSTILE.items():
        config = rendered(name, made_sweep(), config=text)
        check(name, config)
        expected = harmless
        if export_of(name).file.endswith(".py"):
            expected = harmless.replace("'harmless'", repr(text))
        assert content(name, config) == expected, kind


@every_table
def test_what_can_not_be_expressed_is_said(name):
    sweep = frontier_sweep()
    kept = replace(sweep, settings=replace(sweep.settings, min_steps=1))
    for table, number_of_steps in ((sweep, False), (kept, True)):
        text = said(name, table, probe=made_probe())
        is_another = name in FROM_MAX_BATCH_LENGTH
        assert ("can't express" in text) == is_another
        assert ("steps with it, not" in text) == (is_another and number_of_steps)


@every_table
def test_pools_run_in_our_sampler_and_others_get_the_best_table(name):
    text = said(name, pooled_sweep(), probe=made_probe())
    ours = "pools of 10,000 examples: 622 batches an epoch"
    others = "batchtune recommends pools of 10,000 examples (622 batches, 3 min 16 s an epoch)"
    table = "This is optimal with 13 buckets (634 batches, 3 min 20 s an epoch): +2.2% time."
    found = [words in text for words in (ours, others, table)]
    assert found == [name in OURS, name not in OURS, name not in OURS]


@every_table
def test_a_sweep_of_pools_alone_is_exported_to_our_sampler(name):
    pooled = pooled_sweep()
    alone = replace(
        pooled, rows=pooled.rows[-1:], recommended=0, recommended_table=None
    )
    if name in OURS:
        check(name, rendered(name, alone))
        return
    why = "can run no row of the sweep: only batchtune's own sampler runs pools"
    with pytest.raises(ResultError, match=why):
        rendered(name, alone)


@every_table
def test_sizes_that_are_not_proven_are_named(name):
    partly = replace(partly_proven_sweep(), max_batch_length=600.0)
    sizes = "4 of 13 batch sizes are not proven to fit (`batchtune report` says why)"
    assert sizes in said(name, partly, probe=proven_probe())
    proven = said(name, proven_sweep(), probe=proven_probe())
    assert "not proven" not in proven and "measured to fit" not in proven


@pytest.mark.parametrize("name", ["espnet", "fairseq"])
def test_a_limit_above_what_was_measured_is_named(name):
    limit = "max_batch_length 700 s is more than the 600 s that was measured to fit"
    assert limit in said(name, partly_proven_sweep(), probe=proven_probe())


def test_a_table_that_is_proven_goes_before_a_faster_one():
    made = frontier_sweep()
    rows = [replace(row, unproven=int(row.strategy != "linear")) for row in made.rows]
    assert "This is linear with" in said("speechbrain", replace(made, rows=rows))


@pytest.mark.parametrize("name", PACKERS)
def test_a_token_budget_is_exported_and_needed(name):
    packed = with_packing(made_sweep(), cut_at=100)
    assert str(MAX_TOKENS) in export_of(name).render(tuned(packed))
    with pytest.raises(ResultError, match="packs by a token budget") as raised:
        export_of(name).render(tuned(made_sweep()))
    assert "--max-tokens" in str(raised.value.hint)


@every_table
def test_packing_runs_in_our_sampler_alone(name):
    text = rendered(name, with_packing(made_sweep()))
    check(name, text)
    assert ("even packing: 640 micro-batches an epoch" in prose(text)) == (name in OURS)
    assert ("batchtune recommends packing to 8,192 tokens" in prose(text)) == (
        name not in OURS
    )
    assert ("DataCollatorWithFlattening()" in text) == (name == "transformers")


@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if name not in PACKERS])
def test_nothing_recommended_is_an_error(name):
    with pytest.raises(ResultError, match="recommends nothing: no table needs fewer"):
        rendered(name, without_recommendation(made_sweep()))


def test_each_has_its_name_and_a_file_of_its_own():
    exports = [export_of(name) for name in FRAMEWORKS]
    assert [export.name for export in exports] == list(FRAMEWORKS)
    assert len({export.file for export in exports}) == len(exports)


@pytest.mark.process
def test_no_framework_is_imported():
    loaded = loaded_by(
        "batchtune.exports; [*map(batchtune.exports.export_of, batchtune.exports.FRAMEWORKS)]"
    )
    assert not set(loaded) & {*FRAMEWORKS, "torch", "pandas", "pyarrow"}
