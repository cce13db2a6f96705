"""A block-diffusion engine for interpretable language models: token ids in, token ids and concepts out."""

from .admission import check_request
from .async_engine import AsyncEngine
from .config import ConceptConfig, EngineConfig, ModelConfig
from .core import Engine, EngineStats
from .errors import (
    Aborted,
    CheckpointError,
    ConceptNotFound,
    EngineError,
    EngineStopped,
    InvalidConfig,
    InvalidRequest,
    InvalidValue,
    NonFiniteLogits,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    RequestTooLarge,
    Unsupported,
)
from .load import EngineLoad, RunningLoad
from .metrics import NullRecorder, Recorder
from .output import (
    BlockFinished,
    BlockStarted,
    Commit,
    Committed,
    ConceptContribution,
    Event,
    Finished,
    FinishReason,
    Output,
    ResolvedIntervention,
    Started,
    TokenAttribution,
)
from .request import (
    AttributionParams,
    GenerateRequest,
    Intervention,
    Policy,
    SamplingParams,
    SteeringParams,
    Suppression,
    WeightOverride,
)
from .runner.capacity import plan_memory
from .runner.memory import MemoryPlan
from .scheduling import PrefixChanges, prefix_keys

__all__ = [
    "Aborted",
    "AsyncEngine",
    "AttributionParams",
    "BlockFinished",
    "BlockStarted",
    "CheckpointError",
    "Commit",
    "Committed",
    "ConceptConfig",
    "ConceptContribution",
    "ConceptNotFound",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineLoad",
    "EngineStats",
    "EngineStopped",
    "Event",
    "FinishReason",
    "Finished",
    "GenerateRequest",
    "Intervention",
    "InvalidConfig",
    "InvalidRequest",
    "InvalidValue",
    "MemoryPlan",
    "ModelConfig",
    "NonFiniteLogits",
    "NullRecorder",
    "Output",
    "Policy",
    "PrefixChanges",
    "PromptTooLong",
    "QueueFull",
    "Recorder",
    "RequestFailed",
    "RequestTooLarge",
    "ResolvedIntervention",
    "RunningLoad",
    "SamplingParams",
    "Started",
    "SteeringParams",
    "Suppression",
    "TokenAttribution",
    "Unsupported",
    "WeightOverride",
    "check_request",
    "plan_memory",
    "prefix_keys",
]
