"""torch's allocators: what an environment asks for, how a process gets one, and how training does."""

import pytest

from batchtune.allocators import (
    VARIABLES,
    asked_for,
    other_settings,
    setting_for,
    worker_variables,
)
from batchtune.errors import UsageError

OLD = "PYTORCH_CUDA_ALLOC_CONF"
NEW = "PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize(
    ("settings", "allocator", "others"),
    [
        ("expandable_segments : False, expandable_segments:True", "expandable", ""),
        (
            "max_split_size_mb:64,expandable_segments:True,roundup_power2_divisions:[64:8,>:1]",
            "expandable",
            "max_split_size_mb:64,roundup_power2_divisions:[64:8,>:1]",
        ),
        ("backend:native", None, ""),
        ("expandable_segments:True,backend:cudaMallocAsync", "cudaMallocAsync", ""),
    ],
)
def test_settings_ask_for_an_allocator_and_for_other_things(
    settings, allocator, others
):
    assert asked_for(settings) == allocator
    assert other_settings(settings) == others


@pytest.mark.parametrize("name", VARIABLES)
def test_the_users_other_settings_are_kept(name):
    value = "expandable_segments:True,max_split_size_mb:64"
    variables = worker_variables("auto", {name: "max_split_size_mb:64"})
    assert variables == {OLD: value, NEW: value}


@pytest.mark.parametrize(
    ("choice", "value", "users"),
    [
        ("expandable", "expandable_segments:False", "native"),
        ("expandable", "backend:cudaMallocAsync", "cudaMallocAsync"),
    ],
)
def test_a_choice_against_the_users_variable_is_an_error(choice, value, users):
    with pytest.raises(UsageError) as caught:
        worker_variables(choice, {NEW: value})
    assert caught.value.message == (
        f"--allocator {choice} contradicts your environment, which asks for {value}"
    )
    assert f"leave out --allocator, which then takes {users}" in str(caught.value.hint)


def test_a_choice_that_the_users_variable_makes_too_is_none():
    assert worker_variables("native", {NEW: "expandable_segments:False"}) == {}


@pytest.mark.parametrize(
    ("allocator", "torch", "environment", "setting"),
    [
        ("expandable", "2.10.0+cu130", {}, f"{NEW}=expandable_segments:True"),
        # It does not read the new variable for this.
        ("expandable", "2.9.1", {}, f"{OLD}=expandable_segments:True"),
        (
            "expandable",
            "2.13.0",
            {NEW: "max_split_size_mb:64"},
            f"{NEW}=expandable_segments:True,max_split_size_mb:64",
        ),
        # The old one counts if it is set.
        (
            "expandable",
            "2.13.0",
            {OLD: "max_split_size_mb:64"},
            f"{OLD}=expandable_segments:True,max_split_size_mb:64",
        ),
        ("cudaMallocAsync", "2.13.0", {}, f"{NEW}=backend:cudaMallocAsync"),
    ],
)
def test_training_needs_one_setting_that_its_torch_reads(
    allocator, torch, environment, setting
):
    assert setting_for(allocator, torch, environment) == setting
