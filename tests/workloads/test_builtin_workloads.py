import pytest
import torch
from torch import distributed
from torch.nn.utils import parameters_to_vector

from batchtune.errors import OptionError, UsageError, WorkloadError
from batchtune.results import BatchShape
from batchtune.workloads import BUILTINS, load_workload

CPU = torch.device("cpu")
SHAPES = {
    "conformer-ctc": BatchShape(3, 1.234),
    "transformer-lm": BatchShape(3, 17),
}


def built(name, **options):
    workload = load_workload(
        f"builtin:{name}", {"size": "tiny", "layers": 2, "vocab": 50, **options}
    )
    workload.setup(CPU)
    return workload


def parameters_of(workload):
    return parameters_to_vector(workload.model.parameters()).detach()


def gradients_of(workload):
    return parameters_to_vector(each.grad for each in workload.model.parameters())


RULES = [
    ({"size": "huge"}, "size: Invalid enum value 'huge'"),
    ({"dim": 0}, "dim: must be a whole number of at least 1"),
    ({"layers": 2.5}, "layers: must be a whole number, got `float`"),
    (
        {"dim": 100, "heads": 8},
        "dim must be a multiple of 2 * heads, got dim=100, heads=8",
    ),
    ({"dropout": 1}, "dropout: must be a number below 1"),
    ({"dtype": "int8"}, "dtype: Invalid enum value 'int8'"),
    ({"checkpoint": 1}, "checkpoint: must be true or false, got `int`"),
]

RULES_OF_SPEECH = [
    ({"unit": "tokens"}, "unit: Invalid enum value 'tokens'"),
    ({"kernel": 4}, "kernel must be odd, got 4"),
]


def step(workload, name):
    workload.step(workload.make_batch(SHAPES[name]))


@pytest.mark.parametrize("name", BUILTINS)
class TestConformance:
    def test_no_option_can_name_code_or_a_path(self, name):
        # `verify` takes a built-in's options from probe.json, which may come from anywhere.
        config = built(name).config
        for field in config.__struct_fields__:
            value = getattr(config, field)
            assert isinstance(value, (str, bool, int, float, type(None)))
            wrong = [["a"], {"a": 1}]
            if isinstance(value, str):
                wrong = ["/etc/passwd", "id > X"]
            for other in ("os:system", *wrong):
                with pytest.raises(WorkloadError, match=field):
                    load_workload(f"builtin:{name}", {field: other})

    @pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
    def test_a_step_gives_every_parameter_its_optimizer_state(self, name, optimizer):
        workload = built(name, optimizer=optimizer)
        step(workload, name)
        assert len(workload.optimizer.state) == len(list(workload.model.parameters()))

    @pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("checkpoint", [False, True])
    def test_a_step_changes_the_parameters_and_keeps_them_finite(
        self, name, dtype, checkpoint
    ):
        workload = built(name, dtype=dtype, checkpoint=checkpoint)
        before = parameters_of(workload)
        step(workload, name)
        after = parameters_of(workload)
        assert torch.isfinite(after).all() and not torch.equal(before, after)

    def test_checkpointing_gives_the_same_gradients(self, name):
        gradients = []
        for checkpoint in (False, True):
            workload = built(name, dropout=0, checkpoint=checkpoint)
            torch.manual_seed(1)
            step(workload, name)
            gradients.append(gradients_of(workload))
        torch.testing.assert_close(*gradients)

    def test_the_same_seed_gives_the_same_parameters_after_a_step(self, name):
        outcomes = []
        for _ in range(2):
            workload = built(name, seed=3)
            step(workload, name)
            outcomes.append(parameters_of(workload))
        torch.testing.assert_close(*outcomes)

    def test_a_step_works_after_a_failed_backward_pass(self, name):
        workload = built(name)
        hook = next(workload.model.parameters()).register_hook(raise_out_of_memory)
        batch = workload.make_batch(SHAPES[name])
        with pytest.raises(MemoryError):
            workload.step(batch)
        hook.remove()
        workload.step(batch)
        assert torch.isfinite(parameters_of(workload)).all()

    def test_an_option_outside_its_range_is_refused_with_the_rule(self, name):
        rules = RULES
        if name == "conformer-ctc":
            rules = RULES + RULES_OF_SPEECH
        for options, rule in rules:
            with pytest.raises(WorkloadError) as caught:
                load_workload(f"builtin:{name}", options)
            assert caught.value.message == f"builtin:{name}: {rule}"

    def test_an_unknown_option_is_refused_with_those_that_there_are(self, name):
        with pytest.raises(WorkloadError) as caught:
            load_workload(f"builtin:{name}", {"layer": 3})
        assert "size, dim, layers" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "size", "millions"),
    [
        ("conformer-ctc", "tiny", 0.5),
        ("conformer-ctc", "small", 4.1),
        ("conformer-ctc", "base", 25),
        ("conformer-ctc", "large", 104),
        ("transformer-lm", "tiny", 1.4),
        ("transformer-lm", "small", 5.3),
        ("transformer-lm", "base", 110),
        ("transformer-lm", "large", 335),
    ],
)
def test_a_size_has_about_the_documented_number_of_parameters(name, size, millions):
    workload = load_workload(f"builtin:{name}", {"size": size})
    with torch.device("meta"):
        model = workload.build_model()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(
        millions, rel=0.04
    )


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({}, 1.5),
        ({"unit": "samples", "sample_rate": 8000}, 12000),
        ({"unit": "frames"}, 150),
    ],
)
def test_a_speech_batch_has_100_frames_of_80_features_a_second(options, length):
    batch = built("conformer-ctc", **options).make_batch(BatchShape(2, length))
    assert batch.features.shape == (2, 150, 80)


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        (BatchShape(2, 4.0), 20),
        (BatchShape(2, 4.0, 33), 33),
        (BatchShape(2, 4.0, 0), 0),
        (BatchShape(2, 4.0, 1000), 100),
    ],
)
def test_a_target_is_no_longer_than_the_subsampled_frames(shape, tokens):
    assert built("conformer-ctc").make_batch(shape).targets.shape == (2, tokens)


def test_no_target_token_is_blank_or_follows_itself():
    targets = built("conformer-ctc", vocab=4).make_batch(BatchShape(4, 10, 200)).targets
    assert set(targets.unique().tolist()) == {1, 2, 3}
    assert (targets.diff(dim=1) != 0).all()


def test_a_text_batch_is_prompt_answer_and_the_next_token():
    batch = built("transformer-lm").make_batch(BatchShape(3, 20, 9))
    assert batch.tokens.shape == batch.following.shape == (3, 29)
    assert torch.equal(batch.tokens[:, 1:], batch.following[:, :-1])


def raise_out_of_memory(_):
    raise MemoryError("made")


def test_ranks_are_needed_to_train_together():
    with pytest.raises(UsageError, match="needs ranks") as refused:
        built("transformer-lm", parallel="ddp")
    assert "--nproc-per-node" in refused.value.hint


def test_no_optimizer_is_taken_that_fails_on_shards():
    with pytest.raises(OptionError, match="takes no sharded parameters"):
        built("transformer-lm", parallel="fsdp2", optimizer="adafactor")


@pytest.fixture
def group_of_one():
    distributed.init_process_group(
        "gloo", store=distributed.HashStore(), rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("name", BUILTINS)
@pytest.mark.parametrize("parallel", [None, "ddp", "fsdp2"])
def test_ranks_train_together(name, parallel):
    workload = built(name, parallel=parallel)
    expected = "FSDP" if parallel == "fsdp2" else "DistributedDataParallel"
    assert type(workload.model).__name__.startswith(expected)
    before = norms_of(workload)
    step(workload, name)
    assert norms_of(workload) != before


def norms_of(workload):
    return [float(value.detach().norm()) for value in workload.model.parameters()]
