"""rackside_trainers: the hook in PyTorch loops and in trainers that own theirs. One file beside rackside_hook.py,
Python 3.8 or newer; no framework is imported before its function is called.

    hook = ddp(job="pretrain", microbatch=8, global_batch=256)          # or fsdp(...): your own loop, see rackside_hook
    huggingface(trainer, job="pretrain")                                # transformers.Trainer; then trainer.train()
    Trainer(callbacks=[lightning(job="pretrain", batch=8, items=count)])                # Lightning
    live = deepspeed(engine, job="pretrain", equal_tokens=True)         # then: for batch in live.pieces(loader): ...
    training.get_forward_backward_func = megatron(training.get_forward_backward_func, job="pretrain")
    torchtitan(trainer, job="pretrain")                                 # torchtitan's Trainer; then trainer.train()

The trainers keep their loader, its order, their gradient accumulation, learning rate schedule and count of steps; each
batch of the loader runs in pieces of the microbatch that the console asks for. So the largest microbatch is the
loader's batch, and `microbatch=` begins with a smaller one. Changes and pauses take effect between optimizer steps.

Training stays the same up to rounding. Where a trainer's way with the loss, or its parallelism, would make it anything
else, no change of the microbatch is offered, only a pause; why is warned of once, on rank 0. Dropout is drawn anew for
each forward pass: with it a change is offered only for `dropout=True`, and is then the same training, not the same
numbers. No adapter sees a loss inside the model that is no sum over samples, such as the balancing loss of a mixture of
experts: say `obstacle="why"` there, and a change is not offered.

Moving samples between ranks is offered by `ddp` alone: a trainer's loader has dealt them out before the step begins.
Further arguments (directory, tokens_per_sample, plan, device, ...) go to the Hook.
"""

import contextlib
import functools
import inspect
import sys
import time
import warnings

from rackside_hook import Hook

FRAMEWORKS = ("ddp", "fsdp", "huggingface", "lightning", "deepspeed", "megatron", "torchtitan")
SHARED = "several processes share a data-parallel rank"
AVERAGED = "it averages over microbatches, whatever the tokens in each"


def ddp(job, microbatch, global_batch, **options):
    """A Hook for your own loop under DistributedDataParallel, after init_process_group: microbatch, split and pause.

    Exact if the loss is a sum divided by the tokens of the global batch and multiplied by the number of ranks, since
    DDP averages over them, and if a rank without a microbatch runs any sample with its loss multiplied by 0.
    """
    rank, ranks, store = _ranks()
    options = dict({"framework": "ddp", "rank": rank, "world_size": ranks, "store": store}, **options)
    return Hook(job, microbatch, global_batch, **options)


def fsdp(job, microbatch, global_batch, **options):
    """The same under FSDP, without the split: FSDP gathers parameters in every pass, so each rank must run as many."""
    return ddp(job, microbatch, global_batch, **dict({"framework": "fsdp"}, **dict(options, rebalance=False)))


def huggingface(trainer, job, global_loss=False, **options):
    """Attach to a transformers.Trainer, before `trainer.train()`. Returns the callback that it adds.

    Exact for models that divide their loss by `num_items_in_batch`, the tokens of the whole batch, and not offered for
    others; with a `compute_loss` of your own, say `global_loss=True` if it does. Not offered under FSDP, DeepSpeed and
    DataParallel. (A callback that doubles gradient accumulation instead makes ranks diverge silently when it is called
    off an optimizer's boundary.) The loss told is the one logged last.
    """
    from transformers import Trainer, TrainerCallback

    live = Live("transformers", job, options)
    whole_step = trainer.training_step

    def training_step(model, inputs, num_items_in_batch=None):
        # Without the number the loss is a mean over what is run at once: then nothing may be cut.
        parts = live.cut(inputs, "" if num_items_in_batch is not None else "the Trainer counts no items")
        total = 0.0
        for piece in parts[:-1]:
            with trainer.accelerator.no_sync(model):
                total = total + whole_step(model, piece, num_items_in_batch)
        live.hook.before_sync()
        return total + whole_step(model, parts[-1], num_items_in_batch)

    class RacksideCallback(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            kind = trainer.accelerator.distributed_type.value
            own = type(trainer).compute_loss is not Trainer.compute_loss
            summed = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
            live.open(
                trainer._train_batch_size,
                args.gradient_accumulation_steps,
                model,
                (kind != "NO" and not kind.startswith("MULTI_"), "it is not tried under Accelerate's %s" % kind),
                (args.n_gpu > 1, "DataParallel splits the batch itself"),
                (getattr(trainer.accelerator, "parallelism_config", None) is not None, SHARED),
                (own and not global_loss, "your compute_loss may not use num_items_in_batch (global_loss=True)"),
                (trainer.label_smoother is not None, "label smoothing takes a mean, too, in some releases"),
                (not (own or summed), "this model's loss is a mean over what is run at once"),
            )

        def on_step_begin(self, *arguments, **kwargs):
            live.begin()

        def on_step_end(self, *arguments, **kwargs):
            live.end()

        def on_log(self, args, state, control, logs=None, **kwargs):
            live.loss = (logs or {}).get("loss", live.loss)

    trainer.training_step = training_step
    callback = RacksideCallback()
    trainer.add_callback(callback)
    return callback


def lightning(job, batch, items=None, **options):
    """A callback for Lightning's Trainer. `batch`: samples in a batch of one rank's loader.

    `items(batch)` says how many terms the mean in your training_step's loss is over, for instance
    `lambda batch: int((batch["labels"] != -100).sum())`: pieces are weighed by it, since Lightning does not know it.
    Exact with it, not offered without; nor with manual optimization, nor under other strategies than a single device
    and DDP. What your training_step logs is logged for each piece.
    """
    # Both names may be installed, and neither takes the other's callbacks: the one that the script uses.
    package = sys.modules.get("pytorch_lightning")
    if package is None:
        import lightning.pytorch as package

    live = Live("lightning", job, options)

    class RacksideCallback(package.Callback):
        def on_train_start(self, trainer, module):
            strategies = [kind.__name__ for kind in type(trainer.strategy).__mro__]
            tried = {"SingleDeviceStrategy", "DDPStrategy"} & set(strategies)
            live.reached = -1
            made = live.open(
                batch,
                trainer.accumulate_grad_batches,
                module,
                (items is None, "the callback was not told what a batch's loss is the mean over (items=...)"),
                (not module.automatic_optimization, "with manual optimization the script owns the step"),
                (not tried, "it is not tried under %s" % strategies[0]),
            )
            if made:
                _cut_strategy(trainer, module, live, items)

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step != live.reached:  # else it accumulates: no boundary
                live.reached = trainer.global_step
                live.begin()

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            told = isinstance(outputs, dict) and "loss" in outputs
            if told and live.total is not None:
                outputs["loss"] = live.total
            if trainer.global_step != live.reached:
                if told and live.hook.rank == 0:  # a device is waited for only where the loss is told
                    live.loss = float(outputs["loss"]) * trainer.accumulate_grad_batches
                live.end()

    return RacksideCallback()


def _cut_strategy(trainer, module, live, items):
    """Run the strategy's training step and backward piece by piece.

    Lightning clears gradients between the two, so the first piece's forward is all that the step may do; the backward
    then goes through the rest. Only the last piece's backward synchronises.
    """
    strategy = trainer.strategy
    whole_step, whole_backward = strategy.training_step, strategy.backward
    quiet = getattr(strategy, "block_backward_sync", contextlib.nullcontext)
    rest = []

    def weighed(output, weight):
        return dict(output, loss=output["loss"] * weight) if isinstance(output, dict) else output * weight

    def training_step(batch, *arguments):
        live.total = None
        del rest[:]
        parts = live.cut(batch)
        counts = [items(piece) for piece in parts] if len(parts) > 1 else [1]
        # A mean over no term is not a number: such a piece is left out, unless the whole batch is like that.
        parts = [(piece, count / float(sum(counts))) for count, piece in zip(counts, parts) if count]  # noqa: B905
        if len(parts) < 2:
            return whole_step(batch, *arguments)
        rest.extend((piece, weight, arguments) for piece, weight in parts[1:])
        with quiet():
            return weighed(whole_step(parts[0][0], *arguments), parts[0][1])

    def backward(loss, optimizer, *arguments, **named):
        if not rest:
            live.hook.before_sync()
            return whole_backward(loss, optimizer, *arguments, **named)
        live.total = loss.detach().clone()
        with quiet():
            whole_backward(loss, optimizer, *arguments, **named)
        while rest:
            piece, weight, step_arguments = rest.pop(0)
            with quiet() if rest else contextlib.nullcontext():
                # What the module logs is checked against the name of the phase it logs in.
                phase, module._current_fx_name = module._current_fx_name, "training_step"
                output = weighed(whole_step(piece, *step_arguments), weight)
                module._current_fx_name = phase
                loss = (output["loss"] if isinstance(output, dict) else output) / trainer.accumulate_grad_batches
                live.total += loss.detach()
                if not rest:
                    live.hook.before_sync()
                loss = whole_backward(loss, optimizer, *arguments, **named)
        return loss

    strategy.training_step, strategy.backward = training_step, backward


def deepspeed(engine, job, batch=None, equal_tokens=False, **options):
    """Attach to a DeepSpeed engine; a change goes through its own setters of micro batch and accumulation.

        live = deepspeed(engine, job="pretrain", equal_tokens=True)
        for batch in live.pieces(loader): loss = engine(batch); engine.backward(loss); engine.step()

    `batch`: samples in each batch of the loader (drop_last=True), if not the engine's micro batch; `pieces` cuts them.
    DeepSpeed averages over microbatches: exact with `equal_tokens=True`, when all samples count the same number of
    tokens, or the loss is a sum divided by the tokens of the global batch and `scale_wrt_gas=False`; else not offered.
    Nor with its pipeline engine, which sizes its buffers once, nor with model parallelism.
    """
    size, ranks = engine.train_micro_batch_size_per_gpu(), _ranks()[1]
    share = size * engine.gradient_accumulation_steps()
    batch = batch or size
    if share % batch:
        raise ValueError("Batches of %d do not add up to the %d samples of a step." % (batch, share))
    live = Live("deepspeed", job, options)
    whole_backward, whole_step = engine.backward, engine.step

    def begin():
        live.begin()
        if not live.obstacle and live.size != engine.train_micro_batch_size_per_gpu():
            engine.set_train_micro_batch_size(live.size)
            engine.set_train_batch_size(share * ranks)
            # The setters leave the microbatches run so far, and DeepSpeed finds the optimizer's boundary by dividing
            # those by the accumulation: without this the next step would end early or late.
            engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()

    @functools.wraps(whole_backward)
    def backward(*arguments, **named):
        if engine.is_gradient_accumulation_boundary():
            live.hook.before_sync()
        return whole_backward(*arguments, **named)

    @functools.wraps(whole_step)
    def step(*arguments, **named):
        ends = engine.is_gradient_accumulation_boundary()
        result = whole_step(*arguments, **named)
        if ends:
            live.end()
            begin()
        return result

    live.open(
        batch,
        share // batch,
        engine.module,
        (not equal_tokens, AVERAGED),
        (hasattr(engine, "train_batch"), "its pipeline engine sizes its buffers once"),
        (engine.dp_world_size != ranks, SHARED),
        begin=size,
    )
    begin()
    engine.backward, engine.step = backward, step
    return live


def megatron(get_forward_backward_func, job, equal_tokens=False, arguments=None, **options):
    """Megatron-LM's `get_forward_backward_func`, with the hook in what it returns. In the pretraining script:

        from megatron.training import training
        training.get_forward_backward_func = megatron(training.get_forward_backward_func, job="pretrain",
                                                      arguments=get_args)

    Megatron's num_microbatches_calculator asserts that its count never falls, so no halving by it could be taken back:
    count, sampler and consumed samples stay as they are, and each of its microbatches runs in pieces. Exact with
    `--calculate-per-token-loss`, or with `equal_tokens=True` when no token is masked; else not offered, since Megatron
    averages over microbatches. `arguments` is its `get_args`: with tensor parallelism, all but the first of those
    ranks read the microbatch's size there.
    """
    live = Live("megatron", job, options)

    def opened(call):
        from megatron.core import parallel_state as state
        from megatron.core.utils import get_model_config

        model = call["model"][0] if isinstance(call["model"], list) else call["model"]
        inner = state.get_model_parallel_group(), state.get_context_parallel_group()
        first = all(group.rank() == 0 for group in inner)
        live.place = state.get_data_parallel_rank(), state.get_data_parallel_world_size(), first
        tensor = state.get_tensor_model_parallel_world_size() > 1
        per_token = equal_tokens or getattr(get_model_config(model), "calculate_per_token_loss", False)
        live.open(
            call["micro_batch_size"],
            call["num_microbatches"],
            model,
            (not per_token, AVERAGED),
            (tensor and arguments is None, "ranks of tensor parallelism read the microbatch's size in get_args()"),
        )

    @functools.wraps(get_forward_backward_func)
    def get(*given, **named):
        whole = get_forward_backward_func(*given, **named)

        @functools.wraps(whole)
        def forward_backward(**call):
            if call.get("forward_only"):
                return whole(**call)
            if not live.hook:
                opened(call)
            live.end()
            live.begin()
            return whole(**_megatron_call(live, call, arguments))

        return forward_backward

    return get


def _megatron_call(live, call, arguments):
    """The call's arguments with each microbatch in pieces."""
    passes = call["num_microbatches"] * (call["micro_batch_size"] // live.size)
    forward_step, left = call["forward_step_func"], [passes]

    def forward(*given, **named):
        left[0] -= 1
        if left[0] == 0:
            live.hook.before_sync()
        # Megatron's training loop counts consumed samples by the configured size: ours is there for a pass only.
        found = arguments() if arguments else live
        configured, found.micro_batch_size = getattr(found, "micro_batch_size", 0), live.size
        try:
            return forward_step(*given, **named)
        finally:
            found.micro_batch_size = configured

    def feed(batches):  # a rank of a middle stage reads no data; Megatron's own iterator offers next() alone
        return None if batches is None else live.pieces(iter(lambda: next(batches), None))

    feeds = call["data_iterator"]
    feeds = [feed(batches) for batches in feeds] if isinstance(feeds, list) else feed(feeds)
    forward = functools.wraps(forward_step)(forward)
    call = dict(call, num_microbatches=passes, micro_batch_size=live.size)
    return dict(call, data_iterator=feeds, forward_step_func=forward)


def torchtitan(trainer, job, **options):
    """Attach to torchtitan's Trainer, before `trainer.train()`. Returns it.

    Exact, since its loss is a sum over tokens divided by those of the global batch; all ranks run as many pieces, as
    FSDP wants. Not offered with pipeline parallelism and CUDA graphs, which fix the batch's shape
    (`--training.disable_cuda_graphs`), nor in releases without `global_valid_tokens`.
    """
    dims, training = trainer.parallel_dims, trainer.config.training
    live, degree = Live("torchtitan", job, options), dims.dp_replicate * dims.dp_shard
    rank, processes, _ = _ranks()
    # Data-parallel ranks are outermost in torchtitan's mesh: the processes of one are neighbours.
    shared = max(1, processes // degree)
    live.place = rank // shared, degree, rank % shared == 0
    whole_step, whole_pass = trainer.train_step, trainer.forward_backward_step
    live.open(
        training.local_batch_size,
        trainer.gradient_accumulation_steps,
        trainer.model_parts[0],
        ("global_valid_tokens" not in inspect.signature(whole_pass).parameters, AVERAGED + " in this release"),
        (dims.pp_enabled, "pipeline parallelism cuts the batch itself"),
        (not getattr(training, "disable_cuda_graphs", True), "CUDA graphs fix the batch's shape"),
    )
    left = [0]

    def train_step(*arguments, **named):
        live.begin()
        left[0] = trainer.gradient_accumulation_steps
        result = whole_step(*arguments, **named)
        live.end()
        return result

    def forward_backward_step(**named):
        left[0] -= 1
        total = 0.0
        parts = live.cut({"input_dict": named.pop("input_dict"), "labels": named.pop("labels")})
        for number, piece in enumerate(parts):
            if left[0] <= 0 and number == len(parts) - 1:
                live.hook.before_sync()
            total = total + whole_pass(**dict(named, **piece)).detach()
        return total

    trainer.train_step, trainer.forward_backward_step = train_step, forward_backward_step
    return trainer


class Live(object):
    """One process's hook in a trainer's loop: it begins steps, and cuts the trainer's batches into microbatches.

    `place`: this process's data-parallel rank, their number, and whether it is the rank's first process.
    """

    def __init__(self, framework, job, options):
        self.hook, self.place, self.size, self.loss, self.total, self.reached = None, None, 0, None, None, -1
        self._options = dict(options, job=job, framework=framework)
        self.obstacle, self._dropout = self._options.pop("obstacle", ""), self._options.pop("dropout", False)
        self._began, self._took, self._never = None, None, True

    def open(self, batch, passes, model, *obstacles, begin=None):
        """Make the hook, for `passes` batches of `batch` samples a step on each rank; the first obstacle that holds is
        why no change is offered. Once for a process (then True): a second hook would read the first one's commands."""
        if self.hook:
            return False
        rank, ranks, store = _ranks()
        rank, ranks, first = self.place or (rank, ranks, True)
        found = [self.obstacle] + [why for holds, why in obstacles if holds] + [self._inexact(model)]
        self.obstacle = next(filter(None, found), "")
        wanted = self._options.pop("microbatch", batch)
        begin = begin or (batch if self.obstacle else wanted)
        self._never = bool(self.obstacle) and begin == batch
        fits = [begin] if self.obstacle else [m for m in range(1, batch + 1) if batch % m == 0]
        total = batch * passes * ranks
        options = dict(self._options, microbatch=begin, global_batch=total, fits=fits, rebalance=False)
        self.hook = Hook(rank=rank, world_size=ranks, store=store, follows=not first, **options)
        if self.obstacle and rank == 0 and first:
            text = "rackside: the console can pause this job but not change its microbatch, since %s."
            warnings.warn(text % self.obstacle, RuntimeWarning, 3)
        return True

    def _inexact(self, model):
        """A layer whose result depends on which samples run together, or is drawn anew in each pass."""
        for name, module in model.named_modules():
            kind = type(module).__name__
            if "BatchNorm" in kind:
                return "%s normalises over the samples that run together" % (name or kind)
            names = ("p",) if "Dropout" in kind else ("dropout", "attention_dropout")
            drawn = [getattr(module, name, 0) for name in names]
            if not self._dropout and any(isinstance(p, float) and p > 0 for p in drawn):
                return "%s has dropout, which is drawn anew in each pass (dropout=True)" % (name or kind)
        return ""

    def begin(self):
        """Between two optimizer steps, on every rank: tell of the one that ended, take the settings of the next."""
        self.size = self.hook.step(loss=self.loss, step_time_s=self._took).microbatch
        self._took, self._began = None, time.monotonic()

    def end(self):
        """The optimizer has stepped: what comes before the next step, an evaluation say, is not the step's time."""
        if self._began is not None:
            self._took, self._began = time.monotonic() - self._began, None

    def cut(self, batch, obstacle=""):
        """A batch in pieces of the microbatch, or whole where that cannot be."""
        if self._never:
            return [batch]
        tensors = []
        walk(batch, tensors.append)
        total = len(tensors[0]) if tensors else 0
        if obstacle or {len(tensor) for tensor in tensors} != {total}:
            why = obstacle or "its tensors do not share a first dimension"
            warnings.warn("rackside: a batch runs whole, since %s." % why, RuntimeWarning, 3)
            return [batch]
        if total <= self.size:
            return [batch]
        return [walk(batch, lambda tensor, i=i: tensor[i : i + self.size]) for i in range(0, total, self.size)]

    def pieces(self, batches):
        """The loader's batches, each in pieces of the size that holds when it is asked for; none is taken ahead."""
        for batch in batches:
            for piece in self.cut(batch):
                yield piece


def _ranks():
    """This process's rank, how many there are, and their key-value store; 0, 1, None without a process group."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return 0, 1, None
    return dist.get_rank(), dist.get_world_size(), dist.PrefixStore("hook", dist.distributed_c10d._get_default_store())


def walk(batch, leaf):
    """The same structure of dicts, lists and tuples, with `leaf` of each tensor, and of each list of plain values."""
    several = isinstance(batch, (list, tuple))
    plain = several and batch and all(isinstance(value, (str, int, float)) for value in batch)
    if plain or len(getattr(batch, "shape", ())) > 0:
        return leaf(batch)
    if hasattr(batch, "items"):
        return {name: walk(value, leaf) for name, value in batch.items()}
    if not several:
        return batch
    found = [walk(value, leaf) for value in batch]
    return type(batch)(*found) if hasattr(batch, "_fields") else type(batch)(found)
