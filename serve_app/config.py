"""Settings of the application: what `args` of a deploy file may say. Reads the environment, as only `client_key` does
beside it.

Ray Serve ignores fields it does not know; here an unknown one is an error that names it.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from engine import EngineConfig

from .routing.policy import RoutingSettings

BUILDER = "serve_app.app:build_app"
"""`import_path` of the application in a deploy file."""
DEMO_CHECKPOINT = Path(__file__).resolve().parents[1] / "demo_model" / "steerling-demo"
"""The small trained model that ships beside this package."""


_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?")


class StrictModel(BaseModel):
    """Refuses unknown keys and never changes after it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _check_origin(origin: str) -> str:
    # As browsers send it; one that never matches would look like a fault of the server.
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise ValueError(
            "an origin is a scheme, a host in lower case and perhaps a port, without a path: https://example.org"
        )
    return origin


def _reject_unknown(value: Any, kind: type, name: str) -> Any:
    """Dataclasses take unknown keys in silence; nothing here does."""
    if isinstance(value, Mapping):
        known = {field.name for field in fields(kind)}
        unknown = sorted(str(key) for key in value if key not in known)
        if unknown:
            raise ValueError(f"{name} has unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return value


def _reject_unknown_engine_keys(value: Any) -> Any:
    return _reject_unknown(value, EngineConfig, "engine")


def _reject_unknown_routing_keys(value: Any) -> Any:
    return _reject_unknown(value, RoutingSettings, "routing")


class ActorOptions(StrictModel):
    """What Ray reserves for one replica."""

    num_cpus: float = Field(default=0, ge=0)
    """CPUs to reserve. 0 lets the application start on a machine of any size."""
    num_gpus: float | None = Field(default=None, ge=0)
    """GPUs to reserve. None: 1 where the engine's device asks for one or is `auto` and the cluster has one."""
    memory: float | None = Field(default=None, gt=0)
    """Bytes of memory to reserve."""
    accelerator_type: str | None = None
    """Only nodes with this accelerator."""
    resources: dict[str, float] | None = None
    """Custom resources to reserve."""


class AutoscalingSettings(StrictModel):
    """How many engine replicas there are, by lanes in use and time in the queue."""

    min_replicas: int = Field(default=1, ge=1)
    """Never fewer, also when nothing runs."""
    max_replicas: int = Field(default=1, ge=1)
    """Never more, however long the queue; each takes a GPU of its own."""
    target_lane_use: float = Field(default=0.8, gt=0, le=1)
    """Share of all lanes that should be in use. What is left takes what comes while a new replica loads."""
    max_queue_age_s: float = Field(default=1.0, ge=0)
    """A request that has waited in the router for longer brings another replica."""
    upscale_delay_s: float = Field(default=10.0, ge=0)
    """How long more replicas have to be wanted before they come."""
    downscale_delay_s: float = Field(default=300.0, ge=0)
    """How long fewer have to be wanted before some leave. Loading a checkpoint again takes minutes."""
    look_back_period_s: float = Field(default=15.0, gt=10)
    """What replicas say is averaged over this; they say it every 10 s."""

    @model_validator(mode="after")
    def _check_order(self) -> AutoscalingSettings:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}; it must be at least min_replicas {self.min_replicas}"
            )
        return self


class LiveEngineServerSettings(StrictModel):
    """`user_config` of EngineServer: what changes while requests run. Named under `deployments` of the deploy file, a
    change restarts nothing."""

    coalesce_interval_s: float = Field(default=0.05, ge=0)
    """Events leave the replica at once if they are a request's first or end a block, else this long after the last."""
    max_waiting: int | None = Field(default=None, ge=0)
    """Requests without a lease that may wait here for a lane before a 429. None: `engine.max_waiting`."""


class EngineServerSettings(LiveEngineServerSettings):
    """The deployment that hosts one engine a replica."""

    num_replicas: int = Field(default=1, ge=1)
    """Replicas, where there is no `autoscaling`; naming both is an error."""
    autoscaling: AutoscalingSettings | None = None
    """None: `num_replicas` for ever."""
    ray_actor_options: ActorOptions = ActorOptions()
    max_ongoing_requests: int = Field(default=8192, ge=1)
    """Above lanes plus `engine.max_waiting`, so that the engine's own queue is the one that says "full"."""
    report_interval_s: float = Field(default=0.02, ge=0)
    """Least time between two reports to the router; they are due where a block begins or ends."""
    heartbeat_s: float = Field(default=0.25, gt=0)
    """A replica with nothing to tell reports all the same, this often."""
    lease_grace_s: float = Field(default=0.1, ge=0)
    """A leased request is taken if a lane comes free within this; otherwise it goes back to the router."""
    health_check_period_s: float = Field(default=5.0, gt=0)
    """How often Serve looks; a replica whose engine stopped or hangs is replaced after three looks."""
    warm_up_tokens: int = Field(default=8, ge=0)
    """Tokens generated once before the replica says it is ready; 0 skips it."""
    graceful_shutdown_timeout_s: float = Field(default=20.0, ge=0)
    """How long running requests may go on when the replica is told to leave. An ingress replica has as long: the
    answers that it hands on last no shorter."""

    @model_validator(mode="after")
    def _check_number(self) -> EngineServerSettings:
        if self.autoscaling is not None and "num_replicas" in self.model_fields_set:
            raise ValueError(
                f"num_replicas is {self.num_replicas} and there is autoscaling, which would ignore it; leave one out"
            )
        return self

    @property
    def live(self) -> LiveEngineServerSettings:
        """Those that `user_config` may change."""
        return self.live_with({})

    def live_with(self, user_config: Mapping[str, Any]) -> LiveEngineServerSettings:
        """The same with what `user_config` names in place of what is said here; raises ValueError for bad ones."""
        said = {name: getattr(self, name) for name in LiveEngineServerSettings.model_fields}
        return LiveEngineServerSettings.model_validate({**said, **user_config})


class RouterSettings(StrictModel):
    """The deployment that keeps the queue: one replica, and no tokens pass through it."""

    ray_actor_options: ActorOptions = ActorOptions(num_gpus=0)
    routing: Annotated[RoutingSettings, BeforeValidator(_reject_unknown_routing_keys)] = RoutingSettings()
    """Limits and times, explained at RoutingSettings. `max_queue` and `max_queue_per_tenant` may also be named as
    `user_config` of BlockRouter under `deployments` of the deploy file, where a change restarts nothing."""
    max_ongoing_requests: int = Field(default=100_000, ge=1)
    """Above `routing.max_queue`, so that the router's own queue is the one that says "full"."""


class Limits(StrictModel):
    """What one HTTP request may ask for, beside what the model's context allows."""

    max_body_bytes: int = Field(default=4 * 2**20, ge=1)
    """Larger bodies get a 413."""
    max_prompts: int = Field(default=32, ge=1)
    """Choices of one request: its prompts, each `n` times."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens that one choice may ask for; who does not say gets no more either. None: what the model's context
    leaves."""
    max_embedding_inputs: int = Field(default=2048, ge=1)
    """Texts in one request for embeddings."""


class ApiKeySettings(StrictModel):
    """Where the keys are that clients must send as `authorization: Bearer KEY`; those of both places count.

    One key a line; empty lines and lines that begin with # say nothing.
    """

    file: str | None = Field(default=None, min_length=1)
    """A file that every ingress replica can read; it is read again when it changes."""
    environment: str | None = Field(default=None, min_length=1)
    """Name of an environment variable of the ingress replicas."""
    open_metrics: bool = True
    """Let `/metrics` be read without a key."""

    @model_validator(mode="after")
    def _check_place(self) -> ApiKeySettings:
        if self.file is None and self.environment is None:
            raise ValueError("api_keys names neither a file nor an environment variable; name one, or leave it out")
        return self


class CorsSettings(StrictModel):
    """Which web pages of other origins may call the API from a browser."""

    allowed_origins: tuple[Annotated[str, AfterValidator(_check_origin)], ...] = ()
    """Such as `https://example.org` or `http://localhost:3000`; `*` is every page. Empty: none."""
    max_age_s: int = Field(default=600, ge=0)
    """How long a browser may remember the answer."""

    @property
    def middleware_options(self) -> dict[str, Any]:
        """As Starlette's middleware takes them."""
        return {
            "allow_origins": self.allowed_origins,
            "allow_methods": ("GET", "HEAD", "POST", "DELETE"),
            "allow_headers": ("*",),
            "expose_headers": ("retry-after", "x-request-id"),
            "max_age": self.max_age_s,
        }


class IngressSettings(StrictModel):
    """The deployment that speaks HTTP."""

    num_replicas: int = Field(default=1, ge=1)
    """Replicas; with two or more, one may die."""
    ray_actor_options: ActorOptions = ActorOptions(num_gpus=0)
    max_ongoing_requests: int = Field(default=8192, ge=1)
    """HTTP requests at once in one replica, those that wait in the router's queue included."""
    ready_timeout_s: float = Field(default=2.0, gt=0)
    """How long `/ready` waits for an engine replica's answer."""
    connect_timeout_s: float = Field(default=2.0, gt=0)
    """How long a replica may take to say that it has a request. What it takes to serve it does not count."""
    router_timeout_s: float = Field(default=1.0, gt=0)
    """The same for the router. How long the request waits in its queue does not count."""
    analysis_timeout_s: float = Field(default=300.0, gt=0)
    """How long a client may wait for an embedding, a score or another analysis before a 504."""
    max_tries: int = Field(default=5, ge=1)
    """Replicas that are asked for one request, as long as nothing of it was sent, before it is an error."""
    router_retry_s: float = Field(default=0.5, gt=0)
    """Once the router has not answered, replicas are chosen without it; this often it is asked whether it is back."""
    limits: Limits = Limits()
    api_keys: ApiKeySettings | None = None
    """None: whoever reaches the port may use it."""
    cors: CorsSettings = CorsSettings()
    preset_dir: str | None = Field(default=None, min_length=1)
    """Folder of the steering presets, for all ingress replicas of a node. None: `glassblock/presets` under the user's
    state folder, `$XDG_STATE_HOME` or `~/.local/state`."""


class TelemetrySettings(StrictModel):
    """Traces of requests; metrics are always on."""

    trace_dir: str | None = None
    """Folder into which each process writes its spans as OTLP JSON lines. None: no tracing, at next to no cost."""
    trace_share: float = Field(default=1.0, ge=0, le=1)
    """Share of requests that are traced. A request with a `traceparent` is traced if that says so."""
    trace_file_bytes: int = Field(default=64 * 2**20, ge=2**16)
    """At this size a file begins anew; the one before is kept. So a process takes at most twice as much."""


class AppConfig(StrictModel):
    """`args` of the application `serve_app.app:build_app`."""

    model: str | None = None
    """Folder of a checkpoint, or a hub id such as `guidelabs/steerling-8b`. None: the demo model that ships."""
    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    model_id: str | None = Field(default=None, min_length=1)
    """Name that clients use. None: the last part of `model`."""
    engine: Annotated[EngineConfig, BeforeValidator(_reject_unknown_engine_keys)] = EngineConfig()
    """How each engine runs the checkpoint."""
    engine_server: EngineServerSettings = EngineServerSettings()
    router: RouterSettings = RouterSettings()
    ingress: IngressSettings = IngressSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @property
    def checkpoint(self) -> str:
        """Folder or hub id; an existing folder as an absolute path, since replicas run in folders of their own."""
        if self.model is None:
            return str(DEMO_CHECKPOINT)
        folder = Path(self.model).expanduser()
        return str(folder.resolve()) if folder.is_dir() else self.model

    @property
    def served_model_id(self) -> str:
        """The id under which `/v1/models` lists the model."""
        return self.model_id or Path(self.checkpoint).name


def preset_folder(settings: IngressSettings) -> Path:
    """Where presets are kept."""
    if settings.preset_dir is not None:
        return Path(settings.preset_dir).expanduser()
    state = os.environ.get("XDG_STATE_HOME", "")
    # A relative one counts as none, as the convention says.
    root = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    return root / "glassblock" / "presets"


def keys_in_environment(settings: ApiKeySettings) -> str:
    """What the environment variable of the keys holds. Raises ValueError if it is named and not there."""
    if settings.environment is None:
        return ""
    if settings.environment not in os.environ:
        raise ValueError(f"api_keys names the environment variable {settings.environment}, which is not set here")
    return os.environ[settings.environment]


def local_cluster_environment(marker: str) -> dict[str, str]:
    """Environment for a Ray cluster of our own on this machine, reachable from this machine only.

    `marker` is an assignment `NAME=value` that every process of the cluster inherits, by which they are found again.
    """
    environment = dict(os.environ)
    # An address of some other cluster must not capture ours.
    environment.pop("RAY_ADDRESS", None)
    name, _, value = marker.partition("=")
    root = str(Path(__file__).resolve().parents[1])
    search_path = [root, *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {
        name: value,
        "PYTHONPATH": os.pathsep.join(search_path),
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # On Linux this makes Ray's own processes use 127.0.0.1 instead of the network interface's address.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    if "RAY_AUTH_MODE" not in environment:
        # Replicas also take calls, as pickles, on a port of every network interface. A token that only this cluster
        # knows keeps others out, and keeps Ray from writing one of its own into the home folder.
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return environment
