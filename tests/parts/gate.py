"""Two ranks' training runs as a test holds them: how much they train, where they wait for it, where one dies."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

RANKS, SEQUENCE, VOCABULARY, WIDTH = 2, 12, 48, 16
LOADED, PASSES = 4, 2
"""Samples in a batch of one rank's loader, and such batches in a step."""
SHARE = LOADED * PASSES
EVALUATED, SAVED, DEADLY = 5, 8, 3
"""An evaluation and a checkpoint follow these steps; in this one a rank dies."""
DIES = {"ddp": 0}
"""The rank that dies, if not 1: the one that holds the store and serves the hook."""


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(text)
    new.replace(path)


def read(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


class Gate:
    """Where the hooked run waits for its test, and where a rank dies; notes what each pass is given."""

    def __init__(self, options: argparse.Namespace, run: str) -> None:
        self.folder, self.rank, self.framework = Path(options.folder), options.rank, options.framework
        self.waits, self.deadly = run == "hooked", run == "dying"
        self.samples, self.number = 0, 0
        self.order: list[int] = []
        self.sizes: dict[int, list[int]] = {}

    def wait(self, name: str, number: int) -> None:
        if not self.waits:
            return
        if self.rank == 0:
            write(self.folder / f"{name}-reached", str(number))
        while read(self.folder / f"{name}-allowed") < number:
            time.sleep(0.01)

    def watch(self, module: Any) -> Any:
        """Wait in the forward passes of `module`; the step is told by `begin`, or by the samples so far."""

        def forward(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            tokens = named["input_ids"] if "input_ids" in named else positional[0]
            if not module.training:
                self.wait("evaluation", 1)
                return
            step = self.number or self.samples // SHARE + 1
            if self.deadly and self.rank == DIES.get(self.framework, 1) and step == DEADLY:
                os.kill(os.getpid(), signal.SIGKILL)
            self.wait("step", step)
            self.samples += len(tokens)
            self.order += [int(row[0] * VOCABULARY + row[1]) for row in tokens]
            self.sizes.setdefault(step, []).append(len(tokens))

        module.register_forward_pre_hook(forward, with_kwargs=True)
        return module
