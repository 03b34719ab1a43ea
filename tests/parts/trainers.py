"""Small training jobs in real frameworks, two ranks each, for the tests of rackside_trainers.

    echo huggingface DIR | python -m tests.parts.trainers

Each rank trains untouched, then from the same start with the hook, and saves both ends; then once more, and one rank
dies in it. The hooked run goes no further than the step that DIR/step-allowed names, so that a test need not race it;
DIR/step-reached says which step it stands in.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.parts.gate import RANKS, Gate, read, write
from tests.parts.training_loops import ddp, deepspeed, fsdp, huggingface, lightning, megatron, torchtitan


def join(options: argparse.Namespace) -> None:
    """Make the process group, as torchrun would have it; rank 0 holds the store."""
    import torch.distributed as dist

    port, leads = Path(options.folder) / "port", options.rank == 0
    if leads:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        write(port, str(store.port))
    else:
        while not read(port):
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", read(port), is_master=False)
    os.environ.update(
        {"RANK": str(options.rank), "LOCAL_RANK": str(options.rank), "WORLD_SIZE": str(RANKS), "GROUP_RANK": "0"}
        | {"LOCAL_WORLD_SIZE": str(RANKS), "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    )
    limit = timedelta(seconds=options.timeout_s)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=RANKS, timeout=limit)


Loop = Callable[[argparse.Namespace, Gate, str], Any]
LOOPS: dict[str, tuple[Loop, str]] = {
    "ddp": (ddp, "torch"),
    "fsdp": (fsdp, "torch.distributed.fsdp"),
    "huggingface": (huggingface, "transformers.trainer"),
    "lightning": (lightning, "lightning.pytorch"),
    "deepspeed": (deepspeed, "deepspeed"),
    "deepspeed-zero3": (deepspeed, "deepspeed"),
    "megatron": (megatron, "megatron.core"),
    "torchtitan": (torchtitan, "torch.distributed.fsdp"),
}
"""Each loop with what it imports."""
LATE = {
    "huggingface": ["accelerate", "transformers.models.llama.modeling_llama", "transformers.integrations"],
    "deepspeed-zero3": ["deepspeed.runtime.zero.stage3", "deepspeed.ops", "deepspeed.comm.torch"],
    "deepspeed": ["deepspeed.runtime.zero.stage_1_and_2", "deepspeed.ops", "deepspeed.comm.torch"],
    "megatron": ["megatron.core.transformer", "megatron.core.pipeline_parallel"],
}
"""What the ranks would else import by themselves, each again."""


def difference(plain: list[Any], touched: list[Any]) -> float:
    """Relative, over all parameters."""
    size = sum(float((p.double() ** 2).sum()) for p in plain)
    off = sum(float(((p - q).double() ** 2).sum()) for p, q in zip(plain, touched, strict=True))
    return float((off / size) ** 0.5)


def one_rank(options: argparse.Namespace) -> None:
    import torch.distributed as dist

    join(options)
    ends, parameters = {}, {}
    for run, job in (("plain", ""), ("hooked", "job"), ("dying", "dying")):
        gate = Gate(options, run)
        found, told = LOOPS[options.framework][0](options, gate, job)
        parameters[run] = [p.detach().clone() for p in found]
        ends[run] = {"told": told, "order": gate.order, "sizes": gate.sizes}
        if run == "hooked":
            ends["difference"] = difference(parameters["plain"], parameters["hooked"])
            write(Path(options.folder) / f"end.{options.rank}", json.dumps(ends))
            dist.barrier()


def both_ranks(options: argparse.Namespace) -> None:
    """Import the framework, then be its two ranks; DIR/exits says how each ended."""
    os.setsid()
    folder = Path(options.folder)
    write(folder / "pid", str(os.getpid()))
    with (folder / "errors").open("wb") as errors:
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    for module in [LOOPS[options.framework][1], *LATE.get(options.framework, ())]:
        importlib.import_module(module)
    ranks = []
    for options.rank in range(RANKS):
        ranks.append(forked(one_rank, options))
    exits = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    write(folder / "exits", json.dumps(exits))


def forked(what: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    """The process that does `what`, and no more."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        what(options)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """PyTorch is imported once, for all the jobs that are asked for: `framework folder`, one a line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout-s", type=float, default=60.0)
    options = parser.parse_args()
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor

    torch.set_num_threads(1)
    for line in sys.stdin:
        options.framework, options.folder = line.split()
        os.waitpid(forked(both_ranks, options), 0)


if __name__ == "__main__":
    main()
