"""Plans in other frameworks' words, and back: what both can say comes back the same."""

from __future__ import annotations

import json
import shlex
import tomllib

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from engine.plan.export import FORMATS, to_deepspeed, to_megatron, to_nemo, to_torchtitan, to_yaml
from engine.plan.imported import read, read_text
from engine.profile import Optimizations, Parallelism, Plan, ProfileError

plans = st.builds(
    Plan,
    name=st.just("imported"),
    parallelism=st.builds(
        Parallelism,
        tensor=st.sampled_from([2, 4, 8]),
        pipeline=st.sampled_from([2, 4]),
        context=st.sampled_from([1, 2]),
        expert=st.sampled_from([1, 8]),
        interleave=st.sampled_from([1, 2, 5]),
        sequence_parallel=st.booleans(),
        zero=st.sampled_from([0, 1, 2, 3]),
        stages=st.sampled_from(["even", "ends"]),
        order=st.sampled_from(["tp-cp-dp-pp", "tp-cp-pp-dp"]),
    ),
    optimizations=st.builds(
        Optimizations,
        activation=st.sampled_from(["stash", "selective", "recompute"]),
        overlap=st.booleans(),
        microbatch=st.sampled_from([1, 4]),
    ),
    precision=st.just("bf16"),
    global_batch=st.sampled_from([128, 512]),
    sequence=st.sampled_from([None, 8192]),
)


@given(plans)
def test_megatron_there_and_back(plan: Plan) -> None:
    text, lost = to_megatron(plan)
    back = read(["python", "pretrain_gpt.py", *shlex.split(text.replace("\\\n", " "))])
    assert back.plan == plan
    assert back.unused == ()
    assert lost == []


@given(plans)
def test_nemo_there_and_back(plan: Plan) -> None:
    back = read(["run_recipe.py", *to_nemo(plan)[0].split()])
    assert back.plan == plan
    assert back.unused == ()


@given(plans)
def test_torchtitan_is_toml_and_comes_back(plan: Plan) -> None:
    fixed = msgspec.structs.replace(plan, parallelism=msgspec.structs.replace(plan.parallelism, data=4))
    text, lost = to_torchtitan(fixed)
    assert tomllib.loads(text)["parallelism"]["tensor_parallel_degree"] == plan.parallelism.tensor
    back = read_text(text, "file").plan
    assert back.parallelism.data == 4
    assert back.parallelism.zero == (3 if plan.parallelism.zero >= 2 else 0)
    assert back.optimizations.microbatch == plan.optimizations.microbatch
    assert back.optimizations.activation == plan.optimizations.activation
    assert (back.global_batch, back.sequence) == (plan.global_batch, plan.sequence)
    assert any("interleave 5" in sentence for sentence in lost) == (plan.parallelism.interleave == 5)


@given(plans)
def test_deepspeed_says_what_it_cannot_carry(plan: Plan) -> None:
    text, lost = to_deepspeed(plan)
    assert json.loads(text)["zero_optimization"]["stage"] == plan.parallelism.zero
    back = read_text(text, "file").plan
    assert back.parallelism.tensor == plan.parallelism.tensor
    assert back.global_batch == plan.global_batch
    assert any(s.startswith(f"pipeline {plan.parallelism.pipeline}:") for s in lost)


@given(plans)
def test_yaml_is_a_plan_profile(plan: Plan) -> None:
    assert msgspec.convert(yaml.safe_load(to_yaml(plan)[0]), Plan) == plan


@pytest.mark.parametrize("form", [f for f in FORMATS if f != "yaml"])
def test_limits_belong_to_the_nodes(form: str) -> None:
    plan = Plan(name="p", parallelism=Parallelism(), optimizations=Optimizations(power_limit_w=500.0))
    assert any("nvidia-smi -pl 500" in sentence for sentence in FORMATS[form](plan)[1])


def test_a_megatron_command_tells_the_model() -> None:
    """Llama 3 70B, as its launch scripts write it."""
    command = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 80 --hidden-size 8192 --num-attention-heads 64 "
        "--group-query-attention --num-query-groups 8 --ffn-hidden-size 28672 --swiglu --vocab-size 128256 "
        "--untie-embeddings-and-output-weights --seq-length 8192 --tensor-model-parallel-size=4 "
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 --context-parallel-size 2 "
        "--micro-batch-size 1 --global-batch-size 128 --bf16 --lr 1e-4"
    )
    found = read(shlex.split(command))
    assert found.form == "Megatron-LM"
    assert found.plan.parallelism.interleave == 5
    assert found.model is not None
    assert found.model.parameters / 1e9 == pytest.approx(70.6, rel=0.002)
    assert found.unused == ("lr", "nproc-per-node")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("python train.py --epochs 3", "This is no command line that is known"),
        ("--tensor-model-parallel-size eight", "tensor-model-parallel-size is 'eight', which is not a whole number"),
        ("--tensor-model-parallel-size 0", "tensor-model-parallel-size is 0; it must be at least 1"),
        ('{"train_batch_size": "auto"}', "gives no batch as a number"),
        ('{"train_batch_size": ', "this is not valid JSON"),
        ("[parallelism]\ntensor_parallel_degree =", "this is not valid TOML"),
        ("--micro-batch-size '1", "these are no words of a command line"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(text: str, says: str) -> None:
    with pytest.raises(ProfileError, match=says.replace("(", r"\(")):
        read_text(text, "file")
