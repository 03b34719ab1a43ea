"""An example trainer: a small transformer under PyTorch DistributedDataParallel, with the hook in its loop.

    python -m engine.job.example.train_ddp --job demo --steps 200 --global-batch 32 --microbatch 8

It meets the conditions under which a live change leaves training the same up to rounding: fixed samples for each step,
the loss divided by the tokens of the whole global batch, no randomness but what is keyed by sample, and one gradient
synchronisation a step, also on a rank that has no microbatch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
except ImportError:
    sys.exit("This example needs PyTorch: pip install 'rackside[torch]' (the CPU build is enough).")

from rackside_hook import Hook

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 32, 4, 2


class Transformer(nn.Module):
    """A causal language model small enough for a laptop."""

    def __init__(self, sequence: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(sequence, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(sequence))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.places.weight
        found: torch.Tensor = self.head(self.layers(hidden, mask=self.mask))
        return found


def sample(step: int, index: int, sequence: int) -> torch.Tensor:
    """Sample `index` of step `step`: the same tokens whichever rank asks. A noisy ramp, so that there is something to
    learn."""
    dice = torch.Generator().manual_seed(1_000_003 * step + index)
    start = torch.randint(VOCABULARY, (1,), generator=dice)
    noise = torch.randint(0, 2, (sequence + 1,), generator=dice)
    return (start + torch.arange(sequence + 1) + noise) % VOCABULARY


def connect(rank: int, world: int, options: argparse.Namespace) -> Any:
    """Join the process group; returns the key-value store that its ranks share."""
    limit = timedelta(seconds=options.timeout_s)
    if options.port is None:  # started by torchrun
        dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world, timeout=limit)
        return dist.distributed_c10d._get_default_store()
    store = dist.TCPStore("127.0.0.1", options.port, is_master=False)
    group = dist.PrefixStore("group", store)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=world, timeout=limit)
    return dist.PrefixStore("hook", store)


def train(rank: int, world: int, options: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    store = connect(rank, world, options)
    torch.manual_seed(7)
    torch.set_default_dtype(getattr(torch, options.dtype))
    model = DistributedDataParallel(Transformer(options.sequence))
    # Another order of summation changes gradients by float32's rounding. Momentum keeps a difference that small; Adam
    # divides by the gradient's own size, so where a gradient is near zero its rounding becomes a whole step (measured:
    # 5e-5 of the parameters after 40 steps, against 1.5e-8 here).
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hook = Hook(
        job=options.job,
        microbatch=options.microbatch,
        global_batch=options.global_batch,
        rank=rank,
        world_size=world,
        store=store,
        directory=options.hook_directory,
        tokens_per_sample=options.sequence,
        device=os.environ.get("LOCAL_RANK", str(rank)),
    )
    settings, log = hook.step(), []
    while settings.step <= options.steps:
        began = time.perf_counter()
        loss = one_step(model, optimizer, hook, settings, rank, world, options)
        log.append([settings.step, settings.microbatch, list(settings.microbatches)])
        if options.step_s and (not options.slow_file or os.path.exists(options.slow_file)):
            time.sleep(max(0.0, options.step_s - (time.perf_counter() - began)))
        took = time.perf_counter() - began
        settings = hook.step(loss=loss, tokens=options.global_batch * options.sequence, step_time_s=took)
    if rank == 0 and options.save:
        torch.save([p.detach() for p in model.parameters()], options.save)
    if options.log:
        with open(f"{options.log}.{rank}", "w") as file:
            json.dump(log, file)
    hook.close()
    dist.barrier()
    dist.destroy_process_group()


def one_step(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    hook: Hook,
    settings: Any,
    rank: int,
    world: int,
    options: argparse.Namespace,
) -> float:
    """Accumulate this rank's microbatches, synchronise once, update. Returns this rank's share of the loss."""
    mine = list(settings.samples(rank))
    batches = [mine[i : i + settings.microbatch] for i in range(0, len(mine), settings.microbatch)]
    tokens = options.global_batch * options.sequence
    total = 0.0
    optimizer.zero_grad()
    for number, indices in enumerate(batches or [[0]]):
        last = number == max(0, len(batches) - 1)
        with nullcontext() if last else model.no_sync():
            data = torch.stack([sample(settings.step, i, options.sequence) for i in indices])
            logits = model(data[:, :-1])
            # DDP averages over ranks, so the sum over all tokens is scaled by the number of ranks; a rank without
            # microbatches takes part in the synchronisation with nothing.
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten(), reduction="sum")
            loss = loss * (world / tokens) * (1.0 if batches else 0.0)
            if last:
                hook.before_sync()
            loss.backward()
            total += float(loss.detach())
    optimizer.step()
    return total


def main() -> None:
    """Start the ranks, or be one where torchrun has started them."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--job", default="example")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--microbatch", type=int, default=8)
    options.add_argument("--global-batch", type=int, default=32)
    options.add_argument("--sequence", type=int, default=16)
    options.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    options.add_argument("--step-s", type=float, default=0.0, help="a step takes at least this long")
    options.add_argument("--slow-file", help="--step-s is kept only as long as this file is there")
    options.add_argument("--timeout-s", type=float, default=1800.0, help="of the process group")
    options.add_argument("--hook-directory", help="where the hook's socket goes; default: the hook's own")
    options.add_argument("--save", help="write the final parameters to this file")
    options.add_argument("--log", help="write each step's settings, as every rank had them, to this file and its rank")
    given = options.parse_args()
    if "RANK" in os.environ:
        given.port = None
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), given)
        return
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given.port = master.port
    mp.spawn(train, args=(given.ranks, given), nprocs=given.ranks)


if __name__ == "__main__":
    main()
