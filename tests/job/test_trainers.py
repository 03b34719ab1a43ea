"""Live changes to jobs in real frameworks: the same parameters at the end, at the steps that were acknowledged."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rackside_hook
import rackside_trainers

from engine.job import CommandState
from engine.job.protocol import PauseEvent
from tests.parts.gate import DIES, RANKS, SHARE, read, write
from tests.parts.jobs import Attached, attached
from tests.parts.missing import need
from tests.parts.trainers import LOOPS
from tests.parts.waiting import until

STEPS = 20


class Job:
    """Two ranks at their gates."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def allow(self, name: str, number: int = 1) -> None:
        write(self.folder / f"{name}-allowed", str(number))

    async def stands(self, name: str, number: int = 1) -> None:
        """Until rank 0 waits there; the job may have ended instead, which is said."""

        def there() -> bool:
            assert not (self.folder / "exits").exists(), (self.folder / "errors").read_text()[-4000:]
            return read(self.folder / f"{name}-reached") >= number

        await until(there, 90, f"{name} {number}")

    async def exits(self) -> list[int]:
        await until((self.folder / "exits").exists, 90, "both ranks end")
        found: list[int] = json.loads((self.folder / "exits").read_text())
        return found

    async def sends(self, console: Attached, command_id: str, do: str, **values: Any) -> asyncio.Task[CommandState]:
        """Sent, and taken by the hook, but not in force: the job stands still."""
        task = asyncio.create_task(console.does(command_id, do, **values))
        await asyncio.sleep(0)  # the command goes first
        console.client._send({"ask": command_id})
        await until(lambda: any(getattr(m, "id", "") == command_id for m in console.told) or task.done())
        return task


@pytest.fixture(scope="module")
def trainers() -> Iterator[subprocess.Popen[str]]:
    """What starts jobs; PyTorch is imported in it once."""
    command = [sys.executable, "-m", "tests.parts.trainers"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@contextmanager
def started(trainers: subprocess.Popen[str], framework: str, folder: Path) -> Iterator[Job]:
    folder.mkdir(mode=0o700)
    assert trainers.stdin is not None
    trainers.stdin.write(f"{framework} {folder}\n")
    trainers.stdin.flush()
    try:
        yield Job(folder)
    finally:
        if (folder / "pid").exists() and not (folder / "exits").exists():
            os.killpg(read(folder / "pid"), signal.SIGKILL)


def installed(module: str) -> bool:
    """Looked up by its first name: finding a submodule would import its parents here."""
    return importlib.util.find_spec(module.split(".")[0]) is not None


@pytest.mark.parametrize("framework", LOOPS)
async def test_a_job_changed_live_ends_as_the_untouched_one(
    framework: str, trainers: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Halved, halved during an evaluation, paused during a checkpoint, doubled, split where that is offered; then a
    console that vanishes, and, in a job of its own, a rank that dies."""
    need(installed(LOOPS[framework][1]), LOOPS[framework][1])
    folder = tmp_path / "job"
    with started(trainers, framework, folder) as job:
        job.allow("step", 2)
        await job.stands("step", 3)
        async with attached(folder / "job.sock") as console:
            assert console.greeting.can[:1] == ("microbatch",)
            halved = await job.sends(console, "halved", "microbatch", microbatch=2)
            assert not halved.done()
            job.allow("step", 6)
            await job.stands("evaluation")
            assert ((await halved).state, (await halved).step) == ("applied", 4)
            again = await job.sends(console, "again", "microbatch", microbatch=1)
            assert not again.done(), "nothing changes in an evaluation"
            job.allow("evaluation")
            await job.stands("step", 7)
            assert ((await again).state, (await again).step) == ("applied", 7)
            job.allow("step", 9)
            await job.stands("checkpoint")
            paused = await job.sends(console, "paused", "pause", seconds=200)
            job.allow("checkpoint")
            assert ((await paused).state, (await paused).step) == ("applied", 10)
            await until(lambda: any(isinstance(m, PauseEvent) for m in console.told), 30)
            assert read(folder / "step-reached") == 9, "it stands before step 10"
            assert (await console.does("resumed", "resume")).state == "applied"
            await job.stands("step", 10)
            doubled = await job.sends(console, "doubled", "microbatch", microbatch=2)
            odd = await job.sends(console, "odd", "microbatch", microbatch=3)
            job.allow("step", 10)
            assert ((await doubled).state, (await doubled).step) == ("applied", 11)
            assert "Microbatch 3 does not fit" in ((await odd).reason or "")
            await job.stands("step", 11)
            uneven = await job.sends(console, "uneven", "rebalance", microbatches=[7, 1])
            job.allow("step", 13)
            assert (await uneven).state == ("applied" if framework == "ddp" else "rejected")
            await job.stands("step", 14)
            await job.sends(console, "vanishes", "microbatch", microbatch=1)
        job.allow("step", STEPS)
        exits = await job.exits()
        dies = DIES.get(framework, 1)
        assert (exits[dies], exits[1 - dies]) == (-signal.SIGKILL, 1), "the one that is left ends by an error"
    ends = [json.loads((folder / f"end.{rank}").read_text()) for rank in range(RANKS)]
    for end in ends:
        plain, touched = end["plain"], end["hooked"]
        print(f"{framework}: {end['difference']:.1e}")
        most = 1e-5 if framework.startswith("deepspeed") else 1e-12  # in float32, the others in float64
        assert end["difference"] < most
        assert plain["told"] == touched["told"]
        sizes = {int(step): given for step, given in touched["sizes"].items()}
        largest = {1: 4, 3: 4, 4: 2, 6: 2, 7: 1, 10: 1, 11: 2, 14: 2, 15: 1, STEPS: 1}
        assert {step: max(sizes[step]) for step in largest} == largest
        if framework != "ddp":
            assert plain["order"] == touched["order"], "each rank keeps its samples, in their order"
            assert {sum(given) for given in sizes.values()} == {SHARE}
    if framework == "ddp":
        assert [len(end["hooked"]["sizes"]["12"]) for end in ends] == [7, 1]


def test_it_is_one_stdlib_file_for_old_pythons_beside_the_hook() -> None:
    tree = ast.parse(Path(rackside_trainers.__file__).read_text(), feature_version=(3, 8))
    top = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    roots = {n.module if isinstance(n, ast.ImportFrom) else n.names[0].name.split(".")[0] for n in top}
    assert roots - {"rackside_hook"} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("framework", rackside_trainers.FRAMEWORKS)
def test_rackside_hook_prints_the_adapters(framework: str) -> None:
    command = [sys.executable, "-m", "tui.cli", "hook", "--for", framework]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert printed.stdout == Path(rackside_trainers.__file__).read_text()


def test_an_unknown_trainer_is_told_in_a_sentence() -> None:
    command = [sys.executable, "-m", "tui.cli", "hook", "--for", "jax"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert printed.returncode == 2
    assert "no adapter for jax; there are ddp, fsdp, huggingface" in printed.stderr
    assert "Traceback" not in printed.stderr


class Layer:
    """What a model and its modules show of themselves."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def named_modules(self) -> list[tuple[str, Any]]:
        return [("", self), ("inner", self)]


class Dropout(Layer):
    pass


class BatchNorm1d(Layer):
    pass


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (Layer(), {"obstacle": "experts are balanced by microbatch"}, "experts are balanced"),
        (Dropout(p=0.1), {}, "dropout, which is drawn anew"),
        (Layer(attention_dropout=0.1), {}, "dropout, which is drawn anew"),
        (BatchNorm1d(), {"dropout": True}, "normalises over the samples that run together"),
    ],
)
def test_what_would_not_be_exact_is_not_offered(
    model: Layer, options: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rackside_trainers, "_ranks", lambda: (0, 1, None))
    os.chmod(tmp_path, 0o700)
    live = rackside_trainers.Live("any", "job", {"directory": str(tmp_path), "microbatch": 1, **options})
    with pytest.warns(RuntimeWarning, match=why):
        live.open(4, 2, model)
    assert live.hook._facts["can"] == ["pause", "resume"]
    live.begin()
    assert live.size == 4, "the loader's batch, whatever was wished for"
    assert live.cut([1, 2, 3, 4]) == [[1, 2, 3, 4]]
    live.hook.close()


def test_a_batch_is_cut_in_its_own_structure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Dropout that is allowed for, an odd last batch, texts beside arrays, and a batch that cannot be cut."""
    monkeypatch.setattr(rackside_trainers, "_ranks", lambda: (0, 1, None))
    os.chmod(tmp_path, 0o700)
    options = {"directory": str(tmp_path), "microbatch": 2, "dropout": True}
    live = rackside_trainers.Live("any", "job", options)
    live.open(4, 2, Dropout(p=0.1))
    assert live.hook.fits == [1, 2, 4]
    live.begin()
    rows = np.arange(6).reshape(3, 2)
    first, last = live.cut({"x": (rows, rows + 1), "names": ["a", "b", "c"], "scale": 2.0})
    assert (first["names"], last["names"]) == (["a", "b"], ["c"])
    assert [len(array) for array in (*first["x"], *last["x"])] == [2, 2, 1, 1]
    assert first["scale"] == last["scale"] == 2.0
    with pytest.warns(RuntimeWarning, match="do not share a first dimension"):
        assert len(live.cut([rows, rows[:2]])) == 1
    live.hook.close()


def a_trainer(name: str, **changes: Any) -> Callable[[str], Any]:
    """Attaches an adapter to what it looks at of a framework, with something changed."""
    model = Layer()

    def values(**found: Any) -> Any:
        for key in [k for k in changes if k in found]:
            found[key] = changes[key]
        return SimpleNamespace(**found)

    def huggingface(folder: str) -> Any:
        class Trainer:
            def compute_loss(self) -> None: ...

        kind = type("Trainer", (Trainer,), {"compute_loss": lambda self: None} if changes.get("own") else {})
        trainer = kind()
        kind_of = SimpleNamespace(value=changes.get("distributed", "MULTI_CPU"))
        trainer.__dict__.update(
            vars(
                values(
                    accelerator=SimpleNamespace(distributed_type=kind_of, parallelism_config=changes.get("parallel")),
                    model_accepts_loss_kwargs=True,
                    compute_loss_func=None,
                    label_smoother=None,
                )
            ),
            training_step=None,
            _train_batch_size=4,
            add_callback=lambda _: None,
        )
        sys.modules["transformers"] = values(Trainer=Trainer, TrainerCallback=object)
        callback = rackside_trainers.huggingface(trainer, "job", directory=folder)
        arguments = SimpleNamespace(gradient_accumulation_steps=2, n_gpu=changes.get("n_gpu", 1))
        callback.on_train_begin(arguments, None, None, model=model)

    def lightning(folder: str) -> Any:
        sys.modules["pytorch_lightning"] = values(Callback=object)
        items = changes.get("items", len)
        callback = rackside_trainers.lightning("job", 4, items, directory=folder)
        strategy = type(changes.get("strategy", "DDPStrategy"), (), {"training_step": None, "backward": None})()
        model.automatic_optimization = changes.get("automatic", True)
        callback.on_train_start(SimpleNamespace(strategy=strategy, accumulate_grad_batches=2), model)

    def deepspeed(folder: str) -> Any:
        engine = values(
            train_micro_batch_size_per_gpu=lambda: 4,
            gradient_accumulation_steps=lambda: 2,
            dp_world_size=1,
            backward=len,
            step=len,
            module=model,
        )
        if "train_batch" in changes:
            engine.train_batch = len
        rackside_trainers.deepspeed(engine, "job", equal_tokens=changes.get("equal", True), directory=folder)

    def torchtitan(folder: str) -> Any:
        trainer = values(
            parallel_dims=SimpleNamespace(dp_replicate=1, dp_shard=1, pp_enabled=changes.get("pipeline", False)),
            config=SimpleNamespace(training=values(local_batch_size=4, disable_cuda_graphs=True)),
            gradient_accumulation_steps=2,
            train_step=None,
            forward_backward_step=lambda input_dict, labels, global_valid_tokens: None,
            model_parts=[model],
        )
        rackside_trainers.torchtitan(trainer, "job", directory=folder)

    known = {"huggingface": huggingface, "lightning": lightning, "deepspeed": deepspeed, "torchtitan": torchtitan}
    return known[name]


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("huggingface", {}, ""),
        ("huggingface", {"own": True}, "your compute_loss may not use num_items_in_batch"),
        ("huggingface", {"distributed": "FSDP"}, "not tried under Accelerate's FSDP"),
        ("huggingface", {"n_gpu": 2}, "DataParallel splits the batch itself"),
        ("huggingface", {"parallel": object()}, "several processes share a data-parallel rank"),
        ("huggingface", {"label_smoother": len}, "label smoothing takes a mean"),
        ("huggingface", {"model_accepts_loss_kwargs": False}, "a mean over what is run at once"),
        ("lightning", {}, ""),
        ("lightning", {"items": None}, "not told what a batch's loss is the mean over"),
        ("lightning", {"automatic": False}, "the script owns the step"),
        ("lightning", {"strategy": "FSDPStrategy"}, "not tried under FSDPStrategy"),
        ("deepspeed", {}, ""),
        ("deepspeed", {"equal": False}, "averages over microbatches"),
        ("deepspeed", {"train_batch": True}, "pipeline engine"),
        ("deepspeed", {"dp_world_size": 2}, "several processes share a data-parallel rank"),
        ("torchtitan", {}, ""),
        ("torchtitan", {"pipeline": True}, "pipeline parallelism cuts the batch itself"),
        ("torchtitan", {"disable_cuda_graphs": False}, "CUDA graphs fix the batch's shape"),
        ("torchtitan", {"forward_backward_step": lambda input_dict, labels: None}, "averages over microbatches"),
    ],
)
def test_a_trainer_that_is_not_exact_is_told_why_and_can_be_paused(
    name: str, changes: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Any] = []

    def hook(**options: Any) -> Any:
        made.append(rackside_hook.Hook(**options))
        return made[0]

    monkeypatch.setattr(rackside_trainers, "_ranks", lambda: (0, 1, None))
    monkeypatch.setattr(rackside_trainers, "Hook", hook)
    for module in ("transformers", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, module, None)
    os.chmod(tmp_path, 0o700)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        a_trainer(name, **changes)(str(tmp_path))
    assert [why in str(w.message) for w in told] == [True] * bool(why)
    assert made[0]._facts["can"] == ["microbatch"] * (not why) + ["pause", "resume"]
    made[0].close()
