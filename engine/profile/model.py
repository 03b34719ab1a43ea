"""A transformer as a cost model sees it: shapes, no weights."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from engine.profile.document import Record
from engine.profile.hardware import Count


class Model(Record, frozen=True):
    """A decoder-only transformer. `ffn` is one expert's width where there are experts; `seq` the usual length;
    `head_dim` where it is not hidden / heads; `dense_layers` leading layers without experts."""

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
    shared_experts: Annotated[int, Meta(ge=0)] = 0
    dense_layers: Annotated[int, Meta(ge=0)] = 0
    head_dim: Count | None = None

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def mlp_matrices(self) -> int:
        """Matrices of one MLP: two, or three when it is gated."""
        return 3 if self.gated_mlp else 2

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention with grouped queries."""
        return 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: attention, MLP (all experts and the shared ones), router, two norms."""
        mlp = self.mlp_matrices * self.hidden * self.ffn * (self.experts + self.shared_experts)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.attention_parameters + mlp + router + 2 * self.hidden

    @property
    def dense_layer_parameters(self) -> int:
        """Weights of a leading layer without experts, taken as wide as the experts that one token meets."""
        wide = (self.topk + self.shared_experts if self.experts > 1 else 1) * self.ffn
        return self.attention_parameters + self.mlp_matrices * self.hidden * wide + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights, embedding and head included once when tied."""
        tables = 1 if self.tied_embeddings else 2
        body = (self.layers - self.dense_layers) * self.layer_parameters
        body += self.dense_layers * self.dense_layer_parameters
        return body + tables * self.embedding_parameters + self.hidden
