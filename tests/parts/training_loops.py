"""One small training loop in each framework, as its users write it, with the hook in it where a job is named."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rackside_hook import make_settings

from tests.parts.gate import (
    EVALUATED,
    LOADED,
    PASSES,
    RANKS,
    SAVED,
    SEQUENCE,
    SHARE,
    VOCABULARY,
    WIDTH,
    Gate,
)


def sample(index: int) -> dict[str, Any]:
    """Tokens that begin with their sample's number; how many of them count differs from sample to sample."""
    import torch

    noise = torch.Generator().manual_seed(index)
    tokens = torch.randint(VOCABULARY, (SEQUENCE,), generator=noise)
    tokens[0], tokens[1] = index // VOCABULARY % VOCABULARY, index % VOCABULARY
    labels = tokens.clone()
    labels[: index % 7] = -100
    return {"input_ids": tokens, "labels": labels}


def stacked(indices: Any) -> tuple[Any, Any]:
    import torch

    rows = [sample(i) for i in indices]
    return torch.stack([r["input_ids"] for r in rows]), torch.stack([r["labels"] for r in rows])


class Samples:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sample(index)


def loaded(options: argparse.Namespace) -> Iterator[Any]:
    """The batches of one rank's loader: ({"input": …}, labels)."""
    for base in range(options.rank * LOADED, RANKS * SHARE * options.steps, RANKS * LOADED):
        tokens, labels = stacked(range(base, base + LOADED))
        yield {"input": tokens}, labels


def small_model() -> Any:
    """Predicts the next token from the tokens so far; in float64, so that what is left is not rounding."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.GRU(WIDTH, WIDTH, batch_first=True)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, input_ids: Any) -> Any:
            found: Any = self.head(self.layers(self.tokens(input_ids))[0])
            return found

    torch.manual_seed(7)
    return Model().double()


def token_loss(logits: Any, labels: Any, reduction: str = "mean") -> Any:
    import torch

    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction=reduction
    )


def evaluate(model: Any) -> None:
    import torch

    model.eval()
    with torch.no_grad():
        model(stacked(range(LOADED))[0])
    model.train()


def between(step: int, gate: Gate, model: Any) -> None:
    """What a loop does after some steps."""
    if step == EVALUATED:
        evaluate(model)
    if step == SAVED:
        gate.wait("checkpoint", 1)


def plain_loop(options: argparse.Namespace, gate: Gate, job: str, framework: str) -> Any:
    """A loop of one's own; untouched, its settings are fixed."""
    import rackside_trainers
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = gate.watch(small_model())
    if framework == "ddp":
        wrapped: Any = DistributedDataParallel(model)
    else:
        fully_shard(model.layers)
        wrapped = fully_shard(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5, momentum=0.5)
    hook = None
    if job:
        make = getattr(rackside_trainers, framework)
        hook = make(job, microbatch=LOADED, global_batch=RANKS * SHARE, directory=options.folder)
    settings = hook.step() if hook else make_settings(1, LOADED, [PASSES] * RANKS)
    while settings.step <= options.steps:
        gate.number, base = settings.step, (settings.step - 1) * RANKS * SHARE
        mine = [base + i for i in settings.samples(options.rank)]
        batches = [stacked(mine[i : i + settings.microbatch]) for i in range(0, len(mine), settings.microbatch)]
        tokens = sum([(labels[:, 1:] != -100).sum() for _, labels in batches], torch.tensor(0))
        dist.all_reduce(tokens)
        optimizer.zero_grad()
        for number, (inputs, labels) in enumerate(batches):
            last = number == len(batches) - 1
            with wrapped.no_sync() if framework == "ddp" and not last else contextlib.nullcontext():
                loss = token_loss(wrapped(inputs), labels, "sum") * (RANKS / tokens)
                if last and hook:
                    hook.before_sync()
                loss.backward()
        optimizer.step()
        between(settings.step, gate, wrapped)
        settings = hook.step(loss=float(loss.detach())) if hook else settings._replace(step=settings.step + 1)
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in wrapped.parameters()], [options.steps]


def ddp(options: argparse.Namespace, gate: Gate, job: str) -> Any:
    return plain_loop(options, gate, job, "ddp")


def fsdp(options: argparse.Namespace, gate: Gate, job: str) -> Any:
    return plain_loop(options, gate, job, "fsdp")


def huggingface(options: argparse.Namespace, gate: Gate, job: str) -> Any:
    import rackside_trainers
    import torch
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    transformers.logging.set_verbosity_error()
    torch.manual_seed(7)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
    )
    model = gate.watch(LlamaForCausalLM(shape).double())

    class Saved(TrainerCallback):  # type: ignore[misc]
        def on_save(self, *_: Any, **__: Any) -> None:
            gate.wait("checkpoint", 1)

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(Path(options.folder) / "hf"),
            per_device_train_batch_size=LOADED,
            gradient_accumulation_steps=PASSES,
            max_steps=options.steps,
            use_cpu=True,
            optim="sgd",
            learning_rate=0.5,
            lr_scheduler_type="cosine",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=EVALUATED,
            save_strategy="steps",
            save_steps=SAVED,
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
        ),
        train_dataset=Samples(RANKS * SHARE * options.steps),
        eval_dataset=Samples(8),
        callbacks=[Saved()],
    )
    if job:
        rackside_trainers.huggingface(trainer, job, directory=options.folder)
    trainer.train()
    return [*model.parameters()], [trainer.lr_scheduler.get_last_lr(), trainer.state.global_step]


def lightning(options: argparse.Namespace, gate: Gate, job: str) -> Any:
    import lightning.pytorch as pl
    import rackside_trainers
    import torch

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = small_model()

        def training_step(self, batch: Any, _: int) -> Any:
            loss = token_loss(self.model(batch["input_ids"]), batch["labels"])
            self.log("loss", loss)
            return {"loss": loss, "more": 1}

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("validation", token_loss(self.model(batch["input_ids"]), batch["labels"]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def counted(batch: Any) -> int:
        return int((batch["labels"][:, 1:] != -100).sum())

    module = Module()
    gate.watch(module.model)

    class Saved(pl.Callback):  # type: ignore[misc]
        def on_save_checkpoint(self, *_: Any) -> None:
            gate.wait("checkpoint", 1)

    live = [rackside_trainers.lightning(job, LOADED, counted, directory=options.folder)] if job else []
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=pl.strategies.DDPStrategy(process_group_backend="gloo"),
        devices=RANKS,
        accumulate_grad_batches=PASSES,
        max_steps=options.steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=EVALUATED * PASSES,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        default_root_dir=options.folder,
        callbacks=[Saved(), pl.callbacks.ModelCheckpoint(options.folder, every_n_train_steps=SAVED), *live],
    )
    data = Samples(RANKS * SHARE * options.steps)
    share = torch.utils.data.DistributedSampler(data, RANKS, options.rank, shuffle=False)
    trainer.fit(
        module,
        torch.utils.data.DataLoader(data, LOADED, sampler=share),
        torch.utils.data.DataLoader(Samples(8), LOADED),
    )
    return [*module.parameters()], [trainer.optimizers[0].param_groups[0]["lr"], trainer.global_step]


def deepspeed(options: argparse.Namespace, gate: Gate, job: str) -> Any:
    import deepspeed as ds
    import rackside_trainers
    import torch

    # Its shared-memory collective is compiled at the first start, for a minute; gloo's own does as well.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    model = gate.watch(small_model().float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    engine, *_ = ds.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": LOADED,
            "gradient_accumulation_steps": PASSES,
            "zero_optimization": {"stage": 3 if options.framework == "deepspeed-zero3" else 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    batches = (  # every token counts
        stacked(range(base + options.rank * LOADED, base + options.rank * LOADED + LOADED))[0]
        for base in range(0, RANKS * SHARE * options.steps, RANKS * LOADED)
    )
    pieces = batches
    if job:
        live = rackside_trainers.deepspeed(engine, job, equal_tokens=True, directory=options.folder)
        pieces = live.pieces(batches)
    steps = 0
    for tokens in pieces:
        engine.backward(token_loss(engine(tokens), tokens))
        engine.step()
        if engine.global_steps > steps:
            steps = engine.global_steps
            between(steps, gate, engine)
    told = [engine.global_steps, engine.train_batch_size(), engine.global_samples]
    parameters = [p.detach().clone() for p in model.parameters()]
    engine.destroy()
    return parameters, told


def torchtitan(options: argparse.Namespace, gate: Gate, job: str) -> Any:
    """A stand-in with torchtitan's own interface, over a model sharded by FSDP2 as torchtitan's are: it needs a GPU."""
    from types import SimpleNamespace

    import rackside_trainers
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    class Trainer:
        def __init__(self) -> None:
            model = gate.watch(small_model())
            for part in (model.layers, model.head):
                fully_shard(part)
            self.model_parts = [fully_shard(model)]
            self.model_parts[0].set_gradient_divide_factor(1.0)
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
            self.gradient_accumulation_steps = PASSES
            self.parallel_dims = SimpleNamespace(dp_replicate=1, dp_shard=RANKS, pp_enabled=False)
            self.config = SimpleNamespace(training=SimpleNamespace(local_batch_size=LOADED, disable_cuda_graphs=True))

        def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: Any) -> Any:
            loss = token_loss(self.model_parts[0](input_dict["input"]), labels, "sum") / global_valid_tokens
            loss.backward()
            return loss

        def train_step(self, data_iterator: Iterator[Any]) -> None:
            self.optimizer.zero_grad()
            batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
            tokens = sum((labels[:, 1:] != -100).sum() for _, labels in batches)
            dist.all_reduce(tokens)
            for inputs, labels in batches:
                self.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=tokens)
            self.optimizer.step()

        def train(self) -> None:
            data = loaded(options)
            for step in range(1, options.steps + 1):
                self.train_step(data)
                between(step, gate, self.model_parts[0])

    trainer = Trainer()
    if job:
        rackside_trainers.torchtitan(trainer, job, directory=options.folder)
    trainer.train()
    return [p.full_tensor() for p in trainer.model_parts[0].parameters()], [options.steps]


def megatron(options: argparse.Namespace, gate: Gate, job: str) -> Any:
    """megatron-core's own schedule, parallel state and count of microbatches. Its CUDA tensors are made on the CPU, and
    gradients are summed here, since Megatron's DDP is for GPUs alone; the loop stands in for Megatron-LM's.
    """
    import rackside_trainers
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import (
        get_num_microbatches,
        init_num_microbatches_calculator,
        unset_num_microbatches_calculator,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.core.transformer import TransformerConfig
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            return called(*args, **kwargs)

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    unset_num_microbatches_calculator()
    init_num_microbatches_calculator(options.rank, None, RANKS * SHARE, LOADED, RANKS)
    model = gate.watch(small_model())

    def finalize(_: Any, tokens: Any, **__: Any) -> None:
        dist.all_reduce(tokens)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= tokens

    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1, calculate_per_token_loss=True)
    model.config, model.set_input_tensor = config, lambda _: None
    model.config.finalize_model_grads_func = finalize
    model.model_type = None
    arguments = argparse.Namespace(micro_batch_size=LOADED, consumed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)

    def forward_step(data: Iterator[Any], module: Any) -> Any:
        inputs, labels = next(data)
        assert len(labels) == arguments.micro_batch_size

        def loss(logits: Any) -> Any:
            total = token_loss(logits, labels, "sum")
            return total, (labels[:, 1:] != -100).sum().int(), {"lm loss": total.detach()}

        return module(inputs["input"]), loss

    get = get_forward_backward_func
    if job:
        get = rackside_trainers.megatron(get, job, arguments=lambda: arguments, directory=options.folder)

    def run(data: Iterator[Any], passes: int, forward_only: bool) -> None:
        get()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=passes,
            seq_length=SEQUENCE,
            micro_batch_size=arguments.micro_batch_size,
            forward_only=forward_only,
        )

    data = RerunDataIterator(loaded(options))
    with OnCpu():
        for step in range(1, options.steps + 1):
            optimizer.zero_grad()
            run(data, get_num_microbatches(), False)
            optimizer.step()
            arguments.consumed += RANKS * arguments.micro_batch_size * get_num_microbatches()
            if step == EVALUATED:
                model.eval()
                with torch.no_grad():
                    run(loaded(options), 1, True)
                model.train()
            elif step == SAVED:
                gate.wait("checkpoint", 1)
    return [*model.parameters()], [arguments.consumed, get_num_microbatches()]
