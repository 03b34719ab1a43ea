"""The same family of models in growing size on several clusters: which leads where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.plan.search import Constraint, Ranked, search
from engine.profile import Cluster, Model, Plan, Stack

FAMILY = (
    # Layers, hidden, heads: the weak-scaling models of arXiv 2104.04473, table 1.
    (24, 2304, 24),
    (36, 4096, 32),
    (40, 6144, 48),
    (48, 8192, 64),
    (60, 10240, 80),
    (80, 12288, 96),
    (96, 16384, 128),
    (105, 20480, 128),
)


@dataclass(frozen=True)
class Size:
    """One model of a sweep: billions of weights, and the best plan of each cluster that has one."""

    billions: float
    best: dict[str, Ranked | None]

    @property
    def leader(self) -> str:
        """The cluster that trains it fastest per GPU."""
        rates = {name: r.metrics["tokens_per_s_per_gpu"] for name, r in self.best.items() if r}
        return max(rates, key=lambda name: rates[name], default="")

    def ratio(self, one: str, other: str) -> float | None:
        """Tokens/s a GPU of `one` over `other`; None where either has no plan."""
        a, b = self.best.get(one), self.best.get(other)
        return a.metrics["tokens_per_s_per_gpu"] / b.metrics["tokens_per_s_per_gpu"] if a and b else None


def sweep(clusters: Sequence[Cluster], stack: Stack, like: Plan, constraints: Sequence[Constraint] = ()) -> list[Size]:
    """The best plan of each cluster for GPT models from 2 to 530 billion weights."""
    out = []
    for layers, hidden, heads in FAMILY:
        model = Model(
            name=f"gpt-{layers}x{hidden}",
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            ffn=4 * hidden,
            gated_mlp=False,
            vocab=51200,
            tied_embeddings=True,
            seq=2048,
        )
        found = {c.name: search(model, c, stack, like, constraints=constraints, top=1) for c in clusters}
        out.append(Size(model.parameters / 1e9, {name: next(iter(f.plans), None) for name, f in found.items()}))
    return out


def overtakes(sizes: Sequence[Size], one: str, other: str) -> float | None:
    """Billions of weights at which `one` overtakes `other` per GPU, between two sizes of the sweep in proportion to
    their logarithms; None when it never does, or leads from the smallest size on."""
    both = [(size.billions, ratio) for size in sizes if (ratio := size.ratio(one, other)) is not None]
    for (small, behind), (large, ahead) in pairwise(both):
        if behind < 1 <= ahead:
            return float(small * (large / small) ** ((1 - behind) / (ahead - behind)))
    return None
