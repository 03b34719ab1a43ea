"""The profiles that ship: they load, they are complete, and device numbers say where they come from."""

from __future__ import annotations

import re

import pytest

from engine.profile import ProfileError, catalog
from engine.profile.policy import Condition, Measure, Policy, Rule, check

DEVICES = {"h100-sxm-80g", "h200-sxm-141g", "a100-sxm-80g", "a100-sxm-40g", "h100-96g-hbm2e", "mi250"}
MODELS = {"gpt3-175b", "llama3-8b", "llama3-70b", "llama3-405b", "mixtral-8x7b"} | {
    f"mpt-{size}b" for size in (7, 13, 30, 70)
}
CLUSTERS = {"h200x32": 32, "h100x64": 64, "mi250x32": 32, "lab": 8}
# Published sizes, in billions of weights.
SIZES = {"gpt3-175b": 174.6, "llama3-8b": 8.03, "llama3-70b": 70.6, "llama3-405b": 405.8, "mixtral-8x7b": 46.7}


def test_everything_promised_is_there() -> None:
    assert set(catalog.names("device")) >= DEVICES
    assert set(catalog.names("model")) >= MODELS
    assert set(catalog.names("plan")) >= {"communication-bound", "compute-bound"}
    assert set(catalog.names("policy")) >= {"seed-85-95", "margin"}


@pytest.mark.parametrize("name", catalog.names("device"))
def test_every_number_of_a_device_has_its_source(name: str) -> None:
    device = catalog.device(name)
    assert device.name == name
    assert device.temperature_c.operating < device.temperature_c.slowdown < device.temperature_c.shutdown
    text = catalog.find("device", name).read_text()
    block = ""
    for line in text.splitlines():
        key = re.match(r"( *)([\w]+):", line)
        comment = line.partition("#")[2].strip()
        if key and not key.group(1):
            block = comment
        if re.search(r":\s*[-\d{]", line.partition("#")[0]):
            assert comment or block, f"{name}: no source beside: {line}"


@pytest.mark.parametrize("name", catalog.names("model"))
def test_models_have_their_published_size(name: str) -> None:
    model = catalog.model(name)
    assert model.name == name
    if name in SIZES:
        assert model.parameters / 1e9 == pytest.approx(SIZES[name], rel=0.002)


@pytest.mark.parametrize("name", catalog.names("cluster"))
def test_clusters(name: str) -> None:
    cluster = catalog.cluster(name)
    if name in CLUSTERS:
        assert cluster.gpus == CLUSTERS[name]


def test_the_slow_network_is_kept_where_the_source_had_it() -> None:
    assert catalog.cluster("h200x32").node_gb_s == 12.5
    assert catalog.cluster("h200x32-400g").node_gb_s == 400
    spread = [catalog.cluster("h200x32").inlet_c(n) for n in catalog.cluster("h200x32").nodes]
    assert max(spread) - min(spread) == pytest.approx(11, abs=0.01)


def test_templates_keep_their_shape() -> None:
    plan = catalog.plan("communication-bound")
    assert (plan.parallelism.tensor, plan.parallelism.pipeline, plan.parallelism.data) == (4, 8, 2)
    assert plan.optimizations.activation == "recompute"
    assert plan.hardware.preferred == "H200"
    assert catalog.plan("compute-bound").optimizations.microbatch == 32


def test_the_hotter_rule_is_tried_first() -> None:
    policy = catalog.thermal_policy("seed-85-95")
    assert policy.rule_for(96, 89).name == "pause"  # type: ignore[union-attr]
    assert policy.rule_for(86, 89).name == "halve-and-throttle"  # type: ignore[union-attr]
    assert policy.rule_for(84, 89) is None
    margin = catalog.thermal_policy("margin")
    assert margin.rule_for(84, 89).name == "throttle"  # type: ignore[union-attr]
    assert margin.rule_for(84, 105) is None


def test_a_rule_that_can_never_run_is_refused() -> None:
    def rule(name: str, above: float) -> Rule:
        return Rule(name=name, when=Condition(temperature_above_c=above), do=(Measure(microbatch="halve"),))

    backwards = Policy(name="as in the article", rules=(rule("warm", 85), rule("hot", 95)))
    with pytest.raises(ProfileError, match="rule 'hot' can never run"):
        check(backwards, "policy")
