"""A transformer as a cost model sees it: shapes, no weights."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from engine.profile.document import Record
from engine.profile.hardware import Count


class Model(Record, frozen=True):
    """A decoder-only transformer. `ffn` is one expert's width where there are experts; `seq` the usual length."""

    name: str
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    ffn: Count
    gated_mlp: bool
    vocab: Count
    tied_embeddings: bool
    seq: Count
    experts: Count = 1
    topk: Annotated[int, Meta(ge=1)] = 1

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def mlp_matrices(self) -> int:
        """Matrices of one MLP: two, or three when it is gated."""
        return 3 if self.gated_mlp else 2

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: attention (grouped queries), MLP (all experts), two norms."""
        kv = self.kv_heads * self.head_size
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv
        mlp = self.mlp_matrices * self.hidden * self.ffn * self.experts
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + mlp + router + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights, embedding and head included once when tied."""
        tables = 1 if self.tied_embeddings else 2
        return self.layers * self.layer_parameters + tables * self.embedding_parameters + self.hidden
