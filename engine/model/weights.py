"""Checkpoint files to modules and back. Strict: nothing missing, nothing left over, every shape as expected.

The public names (`transformer.blocks.N.attn.c_attn`, `unknown_head.*`, ...) live in this module only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..config import ModelConfig
from ..errors import CheckpointError
from .steerling import SteerlingModel
from .transformer import Rotary

VOCAB_MULTIPLE = 64
"""Rows of embedding and lm_head are padded to a multiple of this on load."""

# Ours -> theirs, applied in order to the dotted parameter name.
_RENAMES = (
    (r"^transformer\.embedding\.", "transformer.tok_emb."),
    (r"^transformer\.final_norm\.", "transformer.ln_f."),
    (r"^transformer\.layers\.(\d+)\.attention_norm\.", r"transformer.blocks.\1.ln_1."),
    (r"^transformer\.layers\.(\d+)\.mlp_norm\.", r"transformer.blocks.\1.ln_2."),
    (r"^transformer\.layers\.(\d+)\.attention\.qkv\.", r"transformer.blocks.\1.attn.c_attn."),
    (r"^transformer\.layers\.(\d+)\.attention\.output\.", r"transformer.blocks.\1.attn.c_proj."),
    (r"^transformer\.layers\.(\d+)\.attention\.(q|k)_norm\.", r"transformer.blocks.\1.attn.\2_norm."),
    (r"^transformer\.layers\.(\d+)\.mlp\.up\.", r"transformer.blocks.\1.mlp.c_fc."),
    (r"^transformer\.layers\.(\d+)\.mlp\.down\.", r"transformer.blocks.\1.mlp.c_proj."),
    (r"^discovered_head\.", "unknown_head."),
    (r"_head\.embedding_table\.", "_head.concept_embedding."),
    (r"_head\.coefficient\.", "_head.embedding_coef."),
    (r"_head\.basis\.", "_head.embedding_basis."),
    (r"_head\.predictor\.", "_head.concept_predictor."),
    (r"_head\.query\.", "_head.concept_query_projection."),
)
_EMBEDDING = "transformer.tok_emb.weight"
_LM_HEAD = "transformer.lm_head.weight"
_INDEX_FILE = "model.safetensors.index.json"
# Hub wrappers hold the model in an attribute of this name.
_WRAPPER_PREFIX = "model."
# Integers and 8-bit floats are quantised weights, whose scales this loader knows nothing of.
_DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}


def public_name(name: str) -> str:
    """The checkpoint's name of one of our parameters."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def load_model(
    path: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SteerlingModel:
    """Read a checkpoint folder (config.json and safetensors, single or sharded) straight to the device.

    `progress` is called with bytes that were read of the files' tensors and are to be read in all. Raises InvalidConfig
    for config.json and CheckpointError for its tensors.
    """
    folder = Path(path)
    config = ModelConfig.from_json(folder)
    with torch.device("meta"):
        model = SteerlingModel(config, vocab_multiple=VOCAB_MULTIPLE)
    with ExitStack() as stack:
        stored = _open_tensors(folder, stack, device)
        parameters = dict(_named_parameters(model))
        sources = _match(parameters, stored, config)
        sizes = {name: _stored_bytes(stored[source], source) for name, source in sources.items()}
        done, total = 0, sum(sizes.values())
        progress(done, total)
        for name, parameter in parameters.items():
            tensor = stored[sources[name]].get_tensor(sources[name].stored_name)
            # On the CPU it is a view of the file, and whoever rewrote that would change a running model.
            tensor = tensor.to(dtype, copy=device.type == "cpu")
            _set_parameter(model, name, _padded(tensor, parameter.shape))
            done += sizes[name]
            progress(done, total)
    if config.weight_sharing:
        model.transformer.lm_head.weight = model.transformer.embedding.weight
    _materialise_buffers(model, config, device)
    return model.requires_grad_(False).eval()


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """What the tensors of a checkpoint are, all of them as its config.json asks."""

    num_tensors: int
    num_parameters: int
    dtypes: tuple[str, ...]
    """As the files name them."""
    is_finite: bool
    """Every value was read and is a finite number; False where values were not asked for."""


def check_checkpoint(
    path: str | Path, *, reads_values: bool = False, progress: Callable[[int, int], None] = lambda done, total: None
) -> CheckpointSummary:
    """Hold a checkpoint's tensors against its config.json, from the headers of its files; no model is built.

    `reads_values` also looks for values that are not finite, one tensor in memory at a time. `progress` is called with
    tensors done and in all. Raises InvalidConfig or CheckpointError with everything that is wrong.
    """
    folder = Path(path)
    config = ModelConfig.from_json(folder)
    with torch.device("meta"):
        model = SteerlingModel(config, vocab_multiple=VOCAB_MULTIPLE)
    broken, num_parameters, dtypes = [], 0, set()
    with ExitStack() as stack:
        stored = _open_tensors(folder, stack, torch.device("cpu"))
        sources = _match(dict(_named_parameters(model)), stored, config)
        for number, source in enumerate(sorted(sources.values()), start=1):
            view = stored[source].get_slice(source.stored_name)
            num_parameters += math.prod(view.get_shape())
            dtypes.add(view.get_dtype())
            if reads_values and not stored[source].get_tensor(source.stored_name).isfinite().all():
                broken.append(f"{source} holds values that are not finite")
            progress(number, len(sources))
    if broken:
        raise CheckpointError(f"the checkpoint cannot be served: {_listed(broken)}")
    return CheckpointSummary(len(sources), num_parameters, tuple(sorted(dtypes)), is_finite=reads_values)


def save_checkpoint(
    model: SteerlingModel, config_json: Mapping[str, Any], path: str | Path, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config.json and model.safetensors under the public names; a tied lm_head is left out."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    ModelConfig.from_dict(config_json)
    vocab_size = model.config.vocab_size
    tensors: dict[str, Tensor] = {}
    for name, parameter in _named_parameters(model):
        tensor = parameter.detach().to("cpu", dtype)
        if public_name(name) in (_EMBEDDING, _LM_HEAD):
            tensor = tensor[:vocab_size]
        tensors[public_name(name)] = tensor.contiguous().clone()
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config_json), indent=2) + "\n", encoding="utf-8")


class _Stored(str):
    """A public tensor name that remembers how its file spells it."""

    stored_name: str


def _open_tensors(folder: Path, stack: ExitStack, device: torch.device) -> dict[_Stored, Any]:
    """Every stored tensor's public name -> the open file that holds it."""
    index_file = folder / _INDEX_FILE
    if index_file.is_file():
        weight_map = _read_index(index_file)
        files = sorted({folder / name for name in weight_map.values()})
    else:
        weight_map = {}
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"no *.safetensors in {folder}; a checkpoint holds config.json beside them")
    spelled: dict[str, Any] = {}
    for file in files:
        if weight_map and not file.is_file():
            raise CheckpointError(f"{_INDEX_FILE} names {file.name}, which is not in {folder}")
        try:
            handle = stack.enter_context(safe_open(str(file), framework="pt", device=str(device)))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        for name in handle.keys():  # noqa: SIM118 (not a dict)
            if name in spelled:
                raise CheckpointError(f"tensor {name} is stored twice, again in {file.name}")
            if weight_map and weight_map.get(name) != file.name:
                raise CheckpointError(f"tensor {name} is in {file.name}, which {_INDEX_FILE} does not say")
            spelled[name] = handle
    absent = sorted(set(weight_map) - set(spelled))
    if absent:
        raise CheckpointError(f"{_INDEX_FILE} names tensors that no file holds: {_listed(absent)}")
    is_wrapped = all(name.startswith(_WRAPPER_PREFIX) for name in spelled)
    stored: dict[_Stored, Any] = {}
    for name, handle in spelled.items():
        public = _Stored(name.removeprefix(_WRAPPER_PREFIX) if is_wrapped else name)
        public.stored_name = name
        stored[public] = handle
    return stored


def _stored_bytes(handle: Any, source: _Stored) -> int:
    """What a tensor takes in its file, by the file's header."""
    view = handle.get_slice(source.stored_name)
    shape: list[int] = view.get_shape()
    return math.prod(shape) * _DTYPE_BYTES[view.get_dtype()]


def _read_index(file: Path) -> dict[str, str]:
    """Which file each tensor is in, by the index; every file a plain name in the index's folder."""
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a safetensors index: {error!r}") from error
    is_map = isinstance(weight_map, dict) and len(weight_map) > 0
    if not is_map or not all(isinstance(name, str) and Path(name).name == name for name in weight_map.values()):
        raise CheckpointError(f"{file} is not a safetensors index: weight_map must map tensors to files beside it")
    return dict(weight_map)


def _match(parameters: Mapping[str, Tensor], stored: Mapping[_Stored, Any], config: ModelConfig) -> dict[str, _Stored]:
    """Which stored tensor fills each parameter; one CheckpointError that names everything wrong."""
    by_name = {str(name): name for name in stored}
    tied = {_EMBEDDING, _LM_HEAD} if config.weight_sharing else set()
    sources: dict[str, _Stored] = {}
    problems: list[str] = []
    used: set[str] = set()
    for name, parameter in parameters.items():
        wanted = public_name(name)
        candidates = [_EMBEDDING, _LM_HEAD] if wanted in tied else [wanted]
        found = [candidate for candidate in candidates if candidate in by_name]
        used.update(found)
        if not found:
            either = " (or the tied " + _LM_HEAD + ")" if wanted in tied else ""
            problems.append(f"missing {wanted}{either}")
            continue
        sources[name] = by_name[found[0]]
        shape = list(parameter.shape)
        if wanted in (_EMBEDDING, _LM_HEAD):
            shape[0] = config.vocab_size
        for candidate in found:
            view = stored[by_name[candidate]].get_slice(by_name[candidate].stored_name)
            actual = list(view.get_shape())
            if view.get_dtype() not in _DTYPE_BYTES:
                problems.append(f"{candidate} is stored as {view.get_dtype()}, not as {', '.join(_DTYPE_BYTES)}")
            if actual != shape:
                problems.append(f"{candidate} has shape {actual}, config.json asks for {shape}")
        if len(found) == 2 and not problems and not _equal(stored, by_name, found):
            problems.append(f"{_EMBEDDING} and {_LM_HEAD} differ though config.json says weight_sharing: true")
    problems += [f"unexpected {name}" for name in sorted(set(by_name) - used)]
    if problems:
        raise CheckpointError(f"the checkpoint does not match its config.json: {_listed(problems)}")
    return sources


def _equal(stored: Mapping[_Stored, Any], by_name: Mapping[str, _Stored], names: list[str]) -> bool:
    first, second = (stored[by_name[name]].get_tensor(by_name[name].stored_name) for name in names)
    return torch.equal(first, second)


def _listed(items: list[str], most: int = 8) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each distinct parameter once, so tied weights appear under the embedding's name."""
    yield from model.named_parameters(remove_duplicate=True)


def _padded(tensor: Tensor, shape: torch.Size) -> Tensor:
    if tensor.shape == shape:
        return tensor
    padded = tensor.new_zeros(shape)
    padded[: tensor.shape[0]] = tensor
    return padded


def _set_parameter(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner_name), leaf, nn.Parameter(tensor, requires_grad=False))


def _materialise_buffers(model: SteerlingModel, config: ModelConfig, device: torch.device) -> None:
    # Rotary tables are computed, not stored, and must be float32 whatever the model's dtype.
    if config.use_rope:
        model.transformer.rotary = Rotary(config).to(device)
