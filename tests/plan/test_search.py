"""The planner: the same numbers as one prediction, nothing better left out, published plans among the best."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engine.control import planning
from engine.control.planning import Question
from engine.model.predict import predict
from engine.plan import search as searching
from engine.plan.compare import alternatives
from engine.plan.search import METRICS, constraint, evaluate, pareto_rows, search
from engine.plan.space import Options, chunks, plan_of, shapes
from engine.profile import Cluster, Parallelism, Plan, ProfileError, catalog

H100 = catalog.cluster("h100x64-400g")
CORE = catalog.stack("megatron-core")


def like(batch: int = 128, sequence: int | None = None, precision: str = "bf16") -> Plan:
    plan = Plan(name="like", parallelism=Parallelism(), global_batch=batch, sequence=sequence)
    return msgspec.convert({**msgspec.to_builtins(plan), "precision": precision}, Plan)


def enlarged(times: int) -> Cluster:
    nodes = [msgspec.structs.replace(n, name=f"{n.name}-{i}") for i in range(times) for n in H100.nodes]
    return msgspec.structs.replace(H100, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("model", "cluster", "precision"),
    [("llama3-70b", "h100x64-400g", "bf16"), ("mixtral-8x7b", "h200x32", "fp8"), ("llama3-8b", "mi250x32", "fp16")],
)
def test_a_search_and_a_prediction_are_one_model(model: str, cluster: str, precision: str) -> None:
    """Plans drawn from all over the space, each predicted alone: the same numbers in every metric."""
    what, where, asked = catalog.model(model), catalog.cluster(cluster), like(precision=precision)
    random, compared = np.random.default_rng(3), 0
    for work, _ in chunks(what, where, asked, Options(power_limits_w=(where.device.power_limit_w.min, 250.0))):
        values = evaluate(work, what, where, CORE, precision)
        for row in random.choice(len(work), min(len(work), 25), replace=False):
            plan = plan_of(work, int(row), asked)
            found = predict(what, plan, where, CORE)
            assert values["iteration_s"][row] == pytest.approx(found.iteration_s, rel=1e-9), plan
            assert values["memory_gib"][row] == pytest.approx(found.memory.total_gib, rel=1e-9)
            assert values["tokens_per_joule"][row] == pytest.approx(found.tokens_per_joule, rel=1e-9)
            assert values["temperature_c"][row] == pytest.approx(found.temperature_c, rel=1e-9)
            assert values["cost_per_million_tokens"][row] == pytest.approx(found.cost_per_million_tokens, rel=1e-9)
            assert values["mfu"][row] == pytest.approx(found.mfu, rel=1e-9)
            compared += 1
    assert compared >= 25


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "sequence", "shape"),
    [
        # Published: DGX Cloud recipes (70B on 64), NeMo 24.07 (175B on 512, fp8), Megatron-Bridge (405B on 1,024, fp8).
        ("llama3-70b", 64, 128, 8192, {"tensor": 4, "pipeline": 4, "context": 2, "interleave": 5, "data": 2}),
        ("gpt3-175b", 512, 2048, 2048, {"tensor": 4, "pipeline": 8, "interleave": 6, "data": 16}),
        (
            "llama3-405b",
            1024,
            512,
            8192,
            {"tensor": 8, "pipeline": 8, "context": 2, "interleave": 8, "stages": "ends", "data": 8},
        ),
    ],
)
def test_published_plans_are_near_the_best_found(
    model: str, gpus: int, batch: int, sequence: int, shape: dict[str, object]
) -> None:
    """Their engineers tried; the best that the model finds must not be far from what they run."""
    what, where, precision = catalog.model(model), enlarged(gpus // 64), "bf16"
    asked = like(batch, sequence, precision)
    best = search(what, where, CORE, asked, top=1).plans[0]
    theirs = msgspec.structs.replace(asked, parallelism=msgspec.convert({**shape, "zero": 1}, Parallelism))
    if model == "gpt3-175b":
        theirs = msgspec.structs.replace(
            theirs, optimizations=msgspec.structs.replace(theirs.optimizations, microbatch=2)
        )
    found = predict(what, theirs, where, CORE)
    assert found.iteration_s <= 1.05 * best.metrics["iteration_s"]


@settings(max_examples=60)
@given(arrays(float, st.tuples(st.integers(1, 40), st.just(2)), elements=st.integers(0, 6).map(float)))
def test_nothing_on_the_front_is_beaten_and_nothing_unbeaten_is_left_out(points: np.ndarray) -> None:
    values = {"iteration_s": points[:, 0], "tokens_per_s": points[:, 1]}
    kept = set(pareto_rows(values))
    better = points * np.array([1.0, -1.0])

    def beaten(i: int) -> bool:
        others = np.delete(better, i, axis=0)
        return bool(((others <= better[i]).all(axis=1) & (others < better[i]).any(axis=1)).any())

    for i in range(len(points)):
        if i in kept:
            assert not beaten(i)
        else:
            assert beaten(i) or any((better[k] == better[i]).all() for k in kept)


def test_constraints_hold_and_the_objective_orders() -> None:
    asked = [constraint("zero<=1"), constraint("microbatch=1"), constraint("headroom_gib>=10")]
    found = search(catalog.model("llama3-70b"), H100, CORE, like(), "tokens_per_joule", asked, top=20)
    rates = [p.metrics["tokens_per_joule"] for p in found.plans]
    assert rates == sorted(rates, reverse=True)
    assert len(found.plans) == 20
    for one in found.plans:
        assert one.plan.parallelism.zero <= 1
        assert one.plan.optimizations.microbatch == 1
        assert one.metrics["headroom_gib"] >= 10
    assert found.plans[0].behind == ""
    assert all(one.behind.startswith(("loses to #", "ties with #")) for one in found.plans[1:])


def test_an_empty_space_says_what_emptied_it_and_what_is_nearest() -> None:
    found = search(catalog.model("llama3-70b"), H100, CORE, like(), constraints=[constraint("iteration_s<5")])
    assert found.plans == ()
    assert "were left before 'iteration_s<5' was asked, and none after it" in found.empty
    assert found.nearest is not None
    assert found.nearest.metrics["headroom_gib"] >= 0
    small = msgspec.structs.replace(H100, nodes=H100.nodes[:1])
    crowded = search(catalog.model("llama3-405b"), small, CORE, like())
    assert "that it fits into memory" in crowded.empty
    odd = search(catalog.model("llama3-70b"), msgspec.structs.replace(H100, nodes=H100.nodes[:7]), CORE, like(batch=11))
    assert odd.empty.startswith("No shape divides 56 GPUs, 80 layers, 64 heads and a global batch of 11 at once")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("temperature_c", "'temperature_c' is no constraint; write a name"),
        ("heat<5", "There is no 'heat' to constrain; there are tokens_per_s"),
        ("mfu>1e", "'1e' in 'mfu>1e' is not a number"),
    ],
)
def test_a_constraint_that_is_none(text: str, says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        constraint(text)


def test_an_objective_that_is_none() -> None:
    with pytest.raises(ProfileError, match="There is no objective 'speed'"):
        search(catalog.model("llama3-8b"), H100, CORE, like(), "speed")


def test_interrupted_it_answers_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = searching.chunks

    def cut(*given: object) -> object:
        for number, part in enumerate(whole(*given)):  # type: ignore[arg-type]
            if number == 1:
                raise KeyboardInterrupt
            yield part

    monkeypatch.setattr(searching, "chunks", cut)
    found = search(catalog.model("llama3-70b"), H100, CORE, like())
    assert not found.complete
    assert found.plans
    assert found.tried < 39_000


def test_interrupted_at_once_it_blames_no_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*given: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(searching, "chunks", cut)
    assert search(catalog.model("llama3-70b"), H100, CORE, like()).empty == "Interrupted before any plan was tried."


def test_a_node_that_is_down_is_planned_without() -> None:
    (answer,) = planning.plans(Question(model="llama3-8b", clusters=("h100x64",), without=("n03",), batch=112))
    assert answer.gpus == 56
    assert answer.missing == ("n03",)
    assert all(set(METRICS) <= set(one.metrics) for one in answer.found.plans)
    with pytest.raises(ProfileError, match="no node of lab is left"):
        planning.plans(Question(model="llama3-8b", clusters=("lab",), without=("local",)))


def test_differences_are_explained_by_their_largest_terms() -> None:
    plan = like()
    deep = msgspec.structs.replace(plan, parallelism=Parallelism(tensor=4, pipeline=16))
    wide = msgspec.structs.replace(plan, parallelism=Parallelism(tensor=4, pipeline=4))
    model = catalog.model("llama3-70b")
    one, other = (predict(model, p, H100, CORE) for p in (wide, deep))
    seconds, terms = planning.difference(one, other)
    assert seconds == pytest.approx(other.iteration_s - one.iteration_s)
    assert {name for name, _ in terms[:2]} == {"compute_s", "bubble_s"}  # the head makes the last stage the slowest
    _, every = planning.difference(one, other, most=20)
    assert sum(value for _, value in every) == pytest.approx(seconds)


def test_every_shape_is_one_that_runs() -> None:
    found = shapes(catalog.model("mixtral-8x7b"), H100, like(), Options())
    assert len({(s.tensor, s.pipeline, s.context, s.expert) for s in found}) == len(found)
    assert all(s.tensor * s.pipeline * s.context * s.data == 64 for s in found)
    assert {s.expert for s in found} == {1, 2, 4, 8}


def test_alternatives_begin_with_what_runs_and_keep_its_memory_and_recompute() -> None:
    running = msgspec.structs.replace(like(), parallelism=Parallelism(tensor=8, pipeline=4, zero=1))
    rows = alternatives(catalog.model("llama3-70b"), H100, running)
    assert rows[0].label == "TP8 PP4 mb1"
    assert len({row.label for row in rows}) == len(rows) == 6
    found = [row.prediction for row in rows]
    assert not any(isinstance(p, str) for p in found)
    times = [p.iteration_s for p in found[1:] if not isinstance(p, str)]
    assert times == sorted(times)
    for p in found:
        assert not isinstance(p, str)
        assert p.fits
        assert p.plan.parallelism.zero == 1
        assert p.plan.optimizations.activation == "stash"
