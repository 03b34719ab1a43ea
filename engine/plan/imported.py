"""A training framework's launch words as a plan, and the model where they tell it."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.profile import Model, Plan, ProfileError


@dataclass(frozen=True)
class Imported:
    """What was read: a plan, a model where its shape was told, and what was understood of nothing."""

    plan: Plan
    model: Model | None
    form: str
    unused: tuple[str, ...]


def read(words: Sequence[str]) -> Imported:
    """A command line: Megatron-LM's arguments, or the overrides of a NeMo recipe."""
    options = _options(words)
    if any(key.startswith(("model.", "train.", "ddp.", "dist.")) for key in options):
        return _nemo(options)
    if any("parallel-size" in key or key in ("micro-batch-size", "num-layers") for key in options):
        return _megatron(options)
    raise ProfileError(
        "This is no command line that is known: it has none of Megatron-LM's arguments (such as "
        "--tensor-model-parallel-size 8) and no NeMo overrides (such as model.tensor_model_parallel_size=8)."
    )


def read_text(text: str, label: str) -> Imported:
    """A file: DeepSpeed's JSON, torchtitan's TOML, or a command line with continuations."""
    stripped = text.strip()
    if stripped.startswith("{"):
        try:
            return _deepspeed(json.loads(stripped))
        except ValueError as error:
            raise ProfileError(f"{label}: this is not valid JSON: {error}.") from None
    if re.search(r"^\[(parallelism|training|experimental)\]", stripped, re.MULTILINE):
        try:
            return _torchtitan(tomllib.loads(stripped))
        except tomllib.TOMLDecodeError as error:
            raise ProfileError(f"{label}: this is not valid TOML: {error}.") from None
    try:
        return read(shlex.split(stripped.replace("\\\n", " "), comments=True))
    except ValueError as error:
        raise ProfileError(f"{label}: these are no words of a command line: {error}.") from None


def _megatron(options: Mapping[str, str]) -> Imported:
    used = _Used(options)
    pipeline, layers = used.count("pipeline-model-parallel-size", 1), used.count("num-layers", 0)
    per_chunk = used.count("num-layers-per-virtual-pipeline-stage", 0)
    chunks = used.count("num-virtual-stages-per-pipeline-rank", 1)
    if per_chunk and layers:
        chunks = max(1, layers // (pipeline * per_chunk))
    strategy = used.text("data-parallel-sharding-strategy")
    ends = used.flag("account-for-embedding-in-pipeline-split") | used.flag("account-for-loss-in-pipeline-split")
    granularity = used.text("recompute-granularity") or ("selective" if used.flag("recompute-activations") else "")
    recomputed = {"full": "recompute", "selective": "selective"}.get(granularity, "stash")
    method, _ = used.text("recompute-method"), used.text("recompute-num-layers")
    fp8 = used.text("fp8-format") or used.text("fp8")
    sixteen = "fp16" if used.flag("fp16") else "bf16" if used.flag("bf16") else "fp32"
    states = 1 if used.flag("use-distributed-optimizer") else 0
    sharded = {"optim_grads": 2, "optim_grads_params": 3}.get(strategy, states)
    used.flag("use-megatron-fsdp")
    overlap = used.flag("overlap-grad-reduce")
    inside = used.flag("use-tp-pp-dp-mapping")
    used.flag("overlap-param-gather"), used.flag("tp-comm-overlap")
    plan = {
        "name": "imported",
        "parallelism": {
            "tensor": used.count("tensor-model-parallel-size", 1),
            "pipeline": pipeline,
            "context": used.count("context-parallel-size", 1),
            "expert": used.count("expert-model-parallel-size", 1),
            "interleave": chunks,
            "sequence_parallel": used.flag("sequence-parallel"),
            "zero": sharded,
            "stages": "ends" if ends else "even",
            "order": "tp-cp-pp-dp" if inside else "tp-cp-dp-pp",
        },
        "optimizations": {
            "activation": "alternate" if recomputed == "recompute" and method == "block" else recomputed,
            "overlap": overlap,
            "microbatch": used.count("micro-batch-size", 1),
        },
        "precision": "fp8" if fp8 else sixteen,
        "global_batch": used.count("global-batch-size", 128),
        "sequence": used.count("seq-length", 0) or None,
    }
    return Imported(_plan(plan), _megatron_model(used, layers), "Megatron-LM", used.unused())


def _megatron_model(used: _Used, layers: int) -> Model | None:
    hidden, heads = used.count("hidden-size", 0), used.count("num-attention-heads", 0)
    gated, vocab = used.flag("swiglu"), used.count("padded-vocab-size", 0) or used.count("vocab-size", 0)
    experts, groups = used.count("num-experts", 1), used.count("num-query-groups", 0)
    used.flag("group-query-attention")
    usual = -(-8 * hidden // 192) * 64 if gated else 4 * hidden
    ffn = used.count("ffn-hidden-size", usual)
    ffn = used.count("moe-ffn-hidden-size", ffn) if experts > 1 else ffn
    untied, topk = used.flag("untie-embeddings-and-output-weights"), used.count("moe-router-topk", 2)
    head_dim = used.count("kv-channels", 0) or None
    if not (layers and hidden and heads):
        return None
    return Model(
        name="imported",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=groups or heads,
        ffn=ffn,
        gated_mlp=gated,
        vocab=vocab or 50304,
        tied_embeddings=not untied,
        seq=used.count("seq-length", 2048),
        experts=experts,
        topk=topk if experts > 1 else 1,
        head_dim=head_dim,
    )


def _nemo(options: Mapping[str, str]) -> Imported:
    used = _Used(options)
    granularity = used.text("model.recompute_granularity")
    used.text("model.recompute_method"), used.text("model.recompute_num_layers")
    strategy = used.text("ddp.data_parallel_sharding_strategy")
    used.flag("ddp.use_megatron_fsdp")
    sharded = 1 if used.flag("ddp.use_distributed_optimizer") else 0
    ends = used.flag("model.account_for_embedding_in_pipeline_split")
    ends |= used.flag("model.account_for_loss_in_pipeline_split")
    overlap = used.flag("ddp.overlap_grad_reduce")
    used.flag("ddp.overlap_param_gather")
    sequence = used.count("model.seq_length", 0) or used.count("dataset.sequence_length", 0)
    used.count("dataset.sequence_length", 0)
    plan = {
        "name": "imported",
        "parallelism": {
            "tensor": used.count("model.tensor_model_parallel_size", 1),
            "pipeline": used.count("model.pipeline_model_parallel_size", 1),
            "context": used.count("model.context_parallel_size", 1),
            "expert": used.count("model.expert_model_parallel_size", 1),
            "interleave": used.count("model.virtual_pipeline_model_parallel_size", 1),
            "sequence_parallel": used.flag("model.sequence_parallel"),
            "zero": {"optim_grads": 2, "optim_grads_params": 3}.get(strategy, sharded),
            "stages": "ends" if ends else "even",
            "order": "tp-cp-pp-dp" if used.flag("dist.use_tp_pp_dp_mapping") else "tp-cp-dp-pp",
        },
        "optimizations": {
            "activation": {"full": "recompute", "selective": "selective"}.get(granularity, "stash"),
            "overlap": overlap,
            "microbatch": used.count("train.micro_batch_size", 1),
        },
        "global_batch": used.count("train.global_batch_size", 128),
        "sequence": sequence or None,
    }
    return Imported(_plan(plan), None, "NeMo Megatron-Bridge", used.unused())


def _torchtitan(config: Mapping[str, Any]) -> Imported:
    flat = {f"{s}.{k}": str(v) for s, keys in config.items() if isinstance(keys, Mapping) for k, v in keys.items()}
    used = _Used(flat)
    shard = used.whole("parallelism.data_parallel_shard_degree", -1)
    replicate = used.whole("parallelism.data_parallel_replicate_degree", 1)
    pipeline = used.count("parallelism.pipeline_parallel_degree", 1)
    schedule = used.text("parallelism.pipeline_parallel_schedule")
    local = used.count("training.local_batch_size", 1)
    cut = used.count("parallelism.pipeline_parallel_microbatch_size", 1)
    mode, option = used.text("activation_checkpoint.mode"), used.text("activation_checkpoint.selective_ac_option")
    selective = "alternate" if option.isdigit() else "selective"
    sharded = shard != 1
    data = shard * replicate if shard > 0 else None
    compiled = used.flag("compile.enable")
    batch = used.whole("training.global_batch_size", -1)
    plan = {
        "name": "imported",
        "parallelism": {
            "tensor": used.count("parallelism.tensor_parallel_degree", 1),
            "pipeline": pipeline,
            "data": data,
            "context": used.count("parallelism.context_parallel_degree", 1),
            "expert": used.count("parallelism.expert_parallel_degree", 1),
            "interleave": 2 if schedule.startswith("Interleaved") and pipeline > 1 else 1,
            "zero": 3 if sharded else 0,
            "zero_group": shard if shard > 1 and replicate > 1 else None,
        },
        "optimizations": {
            "activation": {"full": "recompute", "selective": selective}.get(mode, "stash"),
            "microbatch": cut if pipeline > 1 else local,
            "async_tensor": used.flag("parallelism.enable_async_tensor_parallel"),
        },
        "stack": "torchtitan-compile" if compiled else "torchtitan-eager",
        "global_batch": batch if batch > 0 else local * (data or 1),
        "sequence": used.count("training.seq_len", 0) or None,
    }
    return Imported(_plan(plan), None, "torchtitan", used.unused())


def _deepspeed(config: Any) -> Imported:
    if not isinstance(config, Mapping):
        raise ProfileError("This JSON is no DeepSpeed configuration: it is not an object.")
    zero, tensor = _section(config, "zero_optimization"), _section(config, "tensor_parallel")
    micro, steps = _whole(config, "train_micro_batch_size_per_gpu"), _whole(config, "gradient_accumulation_steps")
    batch = _whole(config, "train_batch_size")
    known = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization"}
    known |= {"tensor_parallel", "bf16", "fp16"}
    if micro is None and batch is None:
        raise ProfileError("This DeepSpeed configuration gives no batch as a number ('auto' cannot be predicted).")
    offloaded = _section(zero, "offload_optimizer").get("device") in ("cpu", "nvme")
    each = (micro or 1) * (steps or 1)
    data = batch // each if batch and micro and steps and batch % each == 0 else None
    half = next((name for name in ("bf16", "fp16") if _section(config, name).get("enabled") is True), "fp32")
    plan = {
        "name": "imported",
        "parallelism": {"tensor": tensor.get("autotp_size", 1), "data": data, "zero": zero.get("stage", 0)},
        "optimizations": {
            "microbatch": micro or 1,
            "overlap": bool(zero.get("overlap_comm", True)),
            "optimizer_bytes": 0.0 if offloaded else 12.0,
        },
        "precision": half,
        "stack": "deepspeed-offload" if offloaded else "deepspeed",
        "global_batch": batch or each,
    }
    return Imported(_plan(plan), None, "DeepSpeed", tuple(sorted(str(k) for k in config if k not in known)))


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _whole(config: Mapping[str, Any], name: str) -> int | None:
    found = config.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


def _plan(values: Mapping[str, Any]) -> Plan:
    try:
        return msgspec.convert(values, Plan)
    except msgspec.ValidationError as error:
        raise ProfileError(f"What was read is no plan: {str(error).replace('`', chr(39))}.") from None


def _options(words: Sequence[str]) -> dict[str, str]:
    """`--name value`, `--flag`, `--name=value` and `a.b=c`; what stands alone is the program and its files."""
    out: dict[str, str] = {}
    words = list(words)
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            after = words[index + 1] if index + 1 < len(words) else ""
            takes = after and not after.startswith("--") and not re.fullmatch(r"[\w.]+\.[\w.]+=.*", after)
            out[name.replace("_", "-") if "." not in name else name] = value if equals else after if takes else ""
        elif re.fullmatch(r"\+*[\w]+\.[\w.]+=.*", word):
            name, _, value = word.lstrip("+").partition("=")
            out[name] = value
    return out


class _Used:
    """Options, and which of them were understood."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options, self._seen = options, set[str]()

    def text(self, name: str) -> str:
        self._seen.add(name)
        value = self._options.get(name, "")
        return "" if value in ("null", "None", "none") else value

    def flag(self, name: str) -> bool:
        present = name in self._options
        return present and self.text(name).lower() not in ("false", "0", "no")

    def whole(self, name: str, default: int) -> int:
        value = self.text(name)
        if not value:
            return default
        try:
            return int(value)
        except ValueError:
            raise ProfileError(f"{name} is '{value}', which is not a whole number.") from None

    def count(self, name: str, default: int) -> int:
        value = self.whole(name, default)
        if value < 1 and value != default:
            raise ProfileError(f"{name} is {value}; it must be at least 1.")
        return value

    def unused(self) -> tuple[str, ...]:
        return tuple(sorted(set(self._options) - self._seen))
