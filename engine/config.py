"""ModelConfig (what config.json says) and EngineConfig (how to run it). Both frozen, validated once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .checks import is_number, is_whole, shown
from .errors import InvalidConfig

NormOrder = Literal["pre", "post"]
MlpType = Literal["swiglu", "standard"]
Activation = Literal["gelu", "relu", "silu"]
Batching = Literal["independent", "lockstep"]

# Keys that Hugging Face tooling adds to config.json and that describe no part of the model.
_FOREIGN_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "instruct",
        "model_type",
        "name_or_path",
        "torch_dtype",
        "transformers_version",
    }
)
# Settings of the training code that change nothing at inference.
_IGNORED_KEYS = frozenset({"concept", "inject_alpha", "inject_layer", "max_concepts", "store_unknown_weights"})

_CONCEPT_SPELLING = {
    "n_unknown_concepts": "n_discovered",
    "use_attention_unknown": "use_attention_discovered",
    "use_unknown": "use_discovered",
    "factorize_unknown": "factorize_discovered",
    "unknown_topk": "discovered_topk",
    "apply_topk_to_unknown": "apply_topk_to_discovered",
}
_PUBLIC_SPELLING = {ours: public for public, ours in _CONCEPT_SPELLING.items()}

# The nested layout carries no special-token ids: these are Steerling's published ones.
_PUBLISHED_IDS = {
    "eos_token_id": 100257,
    "pad_token_id": 100277,
    "bos_token_id": 100278,
    "endofchunk_token_id": 100279,
    "mask_token_id": 100280,
}
_PUBLISHED_INSTRUCT_IDS = {"start_header_id": 100281, "end_header_id": 100282, "eot_id": 100283}
_PUBLISHED_VOCAB_SIZE = {False: 100281, True: 100284}


# Beyond these no checkpoint exists, and to build a model for one would take all memory or for ever.
_MOST_LAYERS = 1024
_LARGEST_SIZE = 2**24
_MOST_LANES = 2**16
_MOST_PAGES = 2**31
_MOST_BYTES = 2**50

_TYPE_NAMES = {bool: "true or false", float: "a number", int: "a whole number", str: "text", NoneType: "null"}


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidConfig(message)


def _check_types(config: Any) -> None:
    """Raise InvalidConfig for a field whose value is not of its declared type; true is no number."""
    hints = get_type_hints(type(config))
    for item in fields(config):
        value, hint = getattr(config, item.name), hints[item.name]
        if get_origin(hint) is Literal:
            is_right = value in get_args(hint)
            rule = f"one of {', '.join(get_args(hint))}"
        else:
            kinds = get_args(hint) or (hint,)
            is_right = any(_is_of(value, kind) for kind in kinds)
            rule = " or ".join(_TYPE_NAMES.get(kind, kind.__name__) for kind in kinds)
        _check(is_right, f"{_label(config, item.name)} is {shown(value)}; it must be {rule}")


def _is_of(value: object, kind: type) -> bool:
    if kind is int:
        return is_whole(value)
    return is_number(value) if kind is float else isinstance(value, kind)


def _check_range(config: Any, names: tuple[str, ...], low: float, high: float = _LARGEST_SIZE) -> None:
    """Raise InvalidConfig for a field outside [low, high]; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None:
            limit = f"at least {low}" if value < low else f"at most {high}"
            _check(low <= value <= high, f"{_label(config, name)} is {shown(value)}; it must be {limit}")


def _label(config: Any, name: str) -> str:
    """The field's name as config.json has it; both sections have a block_size."""
    return f"concept {_PUBLIC_SPELLING.get(name, name)}" if isinstance(config, ConceptConfig) else name


@dataclass(frozen=True, kw_only=True, slots=True)
class ConceptConfig:
    """Shape and switches of the known and discovered heads."""

    n_concepts: int = 33732
    """Known concepts."""
    n_discovered: int = 101196
    """Discovered concepts (`n_unknown_concepts` in config.json)."""
    concept_dim: int = 4096
    """Width of a concept embedding; equals the model's width."""
    use_attention_known: bool = False
    """Known weights from a query against the embeddings instead of a linear predictor."""
    use_attention_discovered: bool = False
    """The same for the discovered head (`use_attention_unknown`)."""
    topk_known: int | None = 32
    """Known concepts reported, and active unless `topk_known_features` says otherwise. None: all."""
    topk_known_features: int | None = 32
    """Known concepts whose embeddings form the known features. None: `topk_known`."""
    use_discovered: bool = True
    """The checkpoint has a discovered head (`use_unknown`)."""
    factorize_discovered: bool = True
    """Discovered embeddings and predictor are low-rank products (`factorize_unknown`)."""
    factorize_rank: int = 256
    discovered_topk: int | None = 128
    """Discovered concepts that are active and reported (`unknown_topk`). None: all active, 64 reported."""
    apply_topk_to_discovered: bool = True
    """Only the top concepts are active; otherwise all are (`apply_topk_to_unknown`)."""
    use_epsilon_correction: bool = True
    """Tokens are chosen from the hidden state itself, so concept heads only explain."""
    topk_on_logits: bool = False
    """Rank concepts by logit instead of by sigmoid; the order is the same."""
    block_size: int = 4096
    """Concepts scored at a time, which bounds memory (`concept_block_size` in the flat layout)."""
    pad_multiple: int = 16
    """Concept rows are stored padded to a multiple of this; padding is never active."""

    def __post_init__(self) -> None:
        _check_types(self)
        _check_range(self, ("n_concepts", "concept_dim", "block_size", "factorize_rank", "pad_multiple"), 1)
        _check_range(self, ("topk_known", "topk_known_features", "discovered_topk"), 1)
        if self.use_discovered:
            _check_range(self, ("n_discovered",), 1)

    @property
    def num_active_known(self) -> int:
        """Known concepts whose embeddings form the known features."""
        if self.topk_known is None:
            return self.n_concepts
        return min(self.topk_known_features or self.topk_known, self.n_concepts)

    @property
    def num_reported_known(self) -> int:
        """Known concepts that attribution reports."""
        return min(self.topk_known or self.n_concepts, self.num_active_known)

    @property
    def num_reported_discovered(self) -> int:
        """Discovered concepts that attribution reports; 0 without a discovered head."""
        if not self.use_discovered:
            return 0
        # 64 is the reference attributor's default for a head without a top-k.
        return min(self.discovered_topk or 64, self.n_discovered)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape, switches and special tokens of a checkpoint."""

    vocab_size: int
    """Tokens that exist, special ones included, without padding."""
    n_layers: int = 32
    n_head: int = 32
    n_embd: int = 4096
    block_size: int = 4096
    """Context: positions a sequence may have."""
    n_kv_heads: int | None = 4
    """None: as many as query heads."""
    diff_block_size: int = 64
    """Positions in a block."""
    use_rms_norm: bool = True
    norm_eps: float = 1e-5
    """Of RMSNorm; LayerNorm always uses 1e-5, as in the reference."""
    norm_order: NormOrder = "post"
    use_qk_norm: bool = True
    use_rope: bool = True
    rope_base: float = 500000.0
    rope_full_precision: bool = True
    """Rotate in float32 whatever the model's dtype."""
    mlp_type: MlpType = "swiglu"
    activation: Activation = "gelu"
    """Of the standard MLP."""
    mlp_ratio: int = 4
    intermediate_size: int | None = None
    """None: mlp_ratio * n_embd."""
    use_bias: bool = False
    clip_qkv: float | None = 10.0
    """Clamp queries, keys and values to plus or minus this."""
    weight_sharing: bool = True
    """tok_emb and lm_head are one tensor."""
    concept: ConceptConfig = ConceptConfig()
    mask_token_id: int
    eos_token_id: int
    """End of text: never chosen, fills the canvas right of an end token."""
    pad_token_id: int
    bos_token_id: int | None = None
    endofchunk_token_id: int | None = None
    start_header_id: int | None = None
    end_header_id: int | None = None
    eot_id: int | None = None
    """End of turn, of instruct checkpoints: ends the text."""

    def __post_init__(self) -> None:
        _check_types(self)
        _check_range(self, ("n_layers",), 1, _MOST_LAYERS)
        sizes = ("vocab_size", "n_head", "n_embd", "block_size", "diff_block_size", "mlp_ratio", "intermediate_size")
        _check_range(self, sizes, 1)
        _check_range(self, ("norm_eps",), 0.0, 1.0)
        _check_range(self, ("rope_base",), 1.0, 1e15)
        _check_range(self, ("clip_qkv",), 1e-6, 1e15)
        _check(
            self.n_embd % self.n_head == 0, f"n_embd is {self.n_embd}; it must be a multiple of n_head {self.n_head}"
        )
        kv_heads = self.num_kv_heads
        _check(
            kv_heads >= 1 and self.n_head % kv_heads == 0,
            f"n_kv_heads is {kv_heads}; it must divide n_head {self.n_head}",
        )
        _check(not self.use_rope or self.head_dim % 2 == 0, f"head width is {self.head_dim}; rotary needs an even one")
        _check(
            self.concept.concept_dim == self.n_embd,
            f"concept_dim is {self.concept.concept_dim}; it must equal n_embd {self.n_embd}",
        )
        for name in _SPECIAL_ID_NAMES:
            value = getattr(self, name)
            _check(
                value is None or 0 <= value < self.vocab_size,
                f"{name} is {value}; it must lie in [0, {self.vocab_size})",
            )
        # A position that holds the mask is one to fill, and a banned token can end no text.
        for name in _SPECIAL_ID_NAMES:
            is_mask = name != "mask_token_id" and getattr(self, name) == self.mask_token_id
            _check(not is_mask, f"{name} and mask_token_id are both {self.mask_token_id}; they must differ")
        _check(
            self.eot_id not in self.banned_token_ids,
            f"eot_id is {self.eot_id}, which as eos_token_id or pad_token_id is never chosen; they must differ",
        )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.n_head if self.n_kv_heads is None else self.n_kv_heads

    @property
    def mlp_width(self) -> int:
        """Width of the MLP's hidden layer."""
        return self.mlp_ratio * self.n_embd if self.intermediate_size is None else self.intermediate_size

    @property
    def needs_heads_for_tokens(self) -> bool:
        """True when tokens are chosen from concept features, so heads must run before lm_head."""
        # Without a discovered head the reference composes (hidden - known) + known, which is hidden.
        return self.concept.use_discovered and not self.concept.use_epsilon_correction

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Tokens that are never chosen: end of text, mask and padding."""
        return tuple(sorted({self.eos_token_id, self.mask_token_id, self.pad_token_id}))

    def end_token_ids(self, stop_token_ids: Iterable[int], *, ignore_eos: bool) -> frozenset[int]:
        """Tokens that end a text where they stand: a request's own, and end of turn unless it is ignored."""
        own = set() if self.eot_id is None or ignore_eos else {self.eot_id}
        return frozenset(own | set(stop_token_ids)) - set(self.banned_token_ids)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read either layout of config.json: flat (as on the hub) or with a nested `concept`.

        Raises InvalidConfig for an unknown key, a missing id or a value out of range.
        """
        if not isinstance(raw, Mapping):
            raise InvalidConfig(f"config.json holds {shown(raw)}; it must hold an object")
        is_nested = "concept" in raw
        if raw.get("interpretable") is False:
            raise InvalidConfig("config.json says interpretable: false; only checkpoints with concept heads are served")
        model = {key: value for key, value in raw.items() if key not in _FOREIGN_KEYS and key != "interpretable"}
        if is_nested:
            concept = model.pop("concept") or {}
            if not isinstance(concept, Mapping):
                raise InvalidConfig(f"concept is {shown(concept)}; it must be an object")
            _fill_published_ids(model, is_instruct=bool(raw.get("instruct", False)))
        else:
            concept = {key: model.pop(key) for key in list(model) if key in _FLAT_CONCEPT_KEYS}
            if "concept_block_size" in concept:
                concept["block_size"] = concept.pop("concept_block_size")
        concept = {_CONCEPT_SPELLING.get(key, key): value for key, value in concept.items() if key not in _IGNORED_KEYS}
        model = {key: value for key, value in model.items() if key not in _IGNORED_KEYS}
        if concept.get("n_discovered", 0) is None:
            concept.pop("n_discovered")
        _reject_unknown(concept, ConceptConfig, "concept ")
        _reject_unknown(model, ModelConfig, "")
        missing = [name for name in ("vocab_size", *_REQUIRED_ID_NAMES) if model.get(name) is None]
        if missing:
            raise InvalidConfig(f"config.json lacks {', '.join(missing)}")
        return cls(**model, concept=ConceptConfig(**concept))

    @classmethod
    def from_json(cls, path: str | Path) -> ModelConfig:
        """Read config.json, given itself or its folder."""
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise InvalidConfig(f"no config.json at {file}; name a folder that holds a checkpoint")
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            # ValueError: no JSON, no UTF-8, or a number of thousands of digits.
            raise InvalidConfig(f"{file} is not valid JSON: {error}") from error
        return cls.from_dict(raw)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How one engine runs one checkpoint."""

    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda where there is one. An engine runs on the first GPU that its process sees."""
    dtype: str = "auto"
    """`float32`, `bfloat16`, `fp8`, or `auto`: bfloat16 on cuda, float32 on cpu. fp8 is bfloat16 with float8 products
    in the layers and lm_head; it needs torchao and a GPU of compute capability 8.9 or more."""
    deterministic: bool = False
    """Bit-equal results on one GPU model and build, whatever else is in the batch, how prompts are cut into passes, and
    what was cached or preempted. Costs speed: products sum in an order of our own."""
    num_pages: int | None = None
    """Pages in the KV cache; a page holds one block. None: as many as memory allows, see gpu_memory_fraction."""
    gpu_memory_fraction: float = 0.9
    """Share of the GPU's memory that weights, pages and lanes may take when num_pages is None. They take less where a
    pass of max_rows needs more than the rest."""
    max_rows: int = 32
    """Rows in a pass, of all kinds together."""
    max_prefill_rows: int | None = None
    """Of these, at most so many prefill rows, so that a long prompt does not delay others. None: max_rows."""
    max_lanes: int | None = None
    """Sequences that run at once; a guided one takes two. None: max_rows."""
    max_waiting: int = 4096
    """Requests that may wait for a lane before QueueFull."""
    max_analyses: int = 256
    """Analyses of text under way at once before QueueFull; each gets a slice of work between passes in turn."""
    input_attribution_context: int | None = None
    """Longest prompt and max_tokens, together, of a trace that is replayed or attributed to its inputs. On a GPU,
    memory is kept for a slice of that work: a state for each layer and position, and the inside of one layer. None: the
    model's context. 0: nothing is kept, and traces are refused."""
    share_prefixes: bool = True
    """Let sequences with equal prefixes share the pages of their sealed blocks."""
    score_cache_bytes: int = 2**26
    """Host memory for scores of complete blocks, kept for texts that begin alike, whichever request they came with. The
    least recently used go first. A block of 64 takes 1.2 KiB, and 0.75 KiB more for each of `num_logprobs`. 0: each
    text is scored as a whole."""
    batching: Batching = "independent"
    """`independent`: each request moves through its blocks at its own pace. `lockstep`: all wait for the slowest at
    each block, for comparison."""
    draft_row_limit: int = 4
    """The `lossless` policy adds draft rows only to passes that have no more rows than this with them: while the
    device is bound by reading weights, a row more costs next to nothing. 0: no drafts. Each two rows cost the memory of
    a lane and a page; more than max_rows counts as max_rows."""
    async_scheduling: bool | None = None
    """Plan and launch the next pass while this one runs, and read results one pass late, so that the device never
    waits for the host. None: on a GPU."""
    use_graphs: bool = True
    """On a GPU, capture passes as CUDA graphs. False runs them kernel by kernel, for profiling and debugging."""
    compile_cache_dir: str | None = None
    """Where compiled GPU kernels are kept, so that a restart is ready sooner. None: Triton's own place in the home
    directory."""
    profile_dir: str | None = None
    """Write a torch profiler trace of `profile_steps` steps into this folder. None: no trace."""
    profile_steps: int = 20
    """Steps in that trace."""
    profile_after: int = 10
    """Steps before it begins."""
    explain_interval_s: float = 0.05
    """Explaining commits begins at the latest this long after they are read, or when their block ends; with async
    scheduling they are handed out one step after that."""

    def __post_init__(self) -> None:
        _check_types(self)
        _check(
            self.dtype in ("auto", "float32", "bfloat16", "fp8"),
            f"dtype is {self.dtype!r}; it must be auto, float32, bfloat16 or fp8",
        )
        _check(
            not (self.deterministic and self.dtype == "fp8"),
            "deterministic is true and dtype is fp8, whose products depend on the batch; use dtype bfloat16, or leave "
            "deterministic out",
        )
        _check_range(self, ("max_rows", "max_prefill_rows", "max_lanes"), 1, _MOST_LANES)
        _check_range(self, ("num_pages", "max_waiting", "max_analyses", "profile_steps"), 1, _MOST_PAGES)
        _check_range(self, ("profile_after", "draft_row_limit", "input_attribution_context"), 0, _MOST_PAGES)
        _check_range(self, ("score_cache_bytes",), 0, _MOST_BYTES)
        # A finished block seals in the pass that begins the next one: two rows of one sequence.
        _check(self.max_rows >= 2, f"max_rows is {self.max_rows}; it must be at least 2, a denoise row and a seal row")
        _check(
            0 < self.gpu_memory_fraction <= 1,
            f"gpu_memory_fraction is {self.gpu_memory_fraction}; it must lie in (0, 1]",
        )
        _check(self.explain_interval_s >= 0, f"explain_interval_s is {self.explain_interval_s}; it must be at least 0")

    @property
    def prefill_row_limit(self) -> int:
        """Most prefill rows in a pass."""
        return min(self.max_prefill_rows or self.max_rows, self.max_rows)

    @property
    def num_lanes(self) -> int:
        """Sequences that run at once."""
        return self.max_lanes or self.max_rows


_FLAT_CONCEPT_KEYS = (
    ({field.name for field in fields(ConceptConfig)} - {"block_size"} - set(_CONCEPT_SPELLING.values()))
    | set(_CONCEPT_SPELLING)
    | {"concept_block_size"}
)
_REQUIRED_ID_NAMES = ("mask_token_id", "eos_token_id", "pad_token_id")
_SPECIAL_ID_NAMES = (*_PUBLISHED_IDS, *_PUBLISHED_INSTRUCT_IDS)


def _reject_unknown(values: Mapping[str, Any], kind: type, prefix: str) -> None:
    known = {field.name for field in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise InvalidConfig(f"config.json has {prefix}keys this engine does not know: {', '.join(unknown)}")


def _fill_published_ids(model: dict[str, Any], *, is_instruct: bool) -> None:
    model.setdefault("vocab_size", _PUBLISHED_VOCAB_SIZE[is_instruct])
    for name, token_id in _PUBLISHED_IDS.items():
        model.setdefault(name, token_id)
    if is_instruct:
        for name, token_id in _PUBLISHED_INSTRUCT_IDS.items():
            model.setdefault(name, token_id)
