"""The application: `import_path: serve_app.app:build_app`, with AppConfig as `args`."""

# Ray looks at the annotation object of the builder's argument, so annotations must not become strings in this module.
from typing import Any, cast

import ray
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from engine import AsyncEngine, EngineConfig

from .autoscaling import LanePolicy
from .block_router import LIVE_SETTINGS, BlockRouter
from .config import ActorOptions, AppConfig, EngineServerSettings
from .engine_server import EngineFactory, EngineServer
from .ingress import Ingress


def build_app(args: AppConfig) -> Application:
    """Ingress in front of EngineServer, BlockRouter beside them. Unknown keys and wrong values in `args` are errors."""
    return assemble(args)


def assemble(args: AppConfig, *, engine_factory: EngineFactory = AsyncEngine.from_checkpoint) -> Application:
    """The same with engines of another make."""
    router = _router(args)
    # The decorator's type hides that it returns a Deployment.
    ingress = cast(Deployment, Ingress).options(
        num_replicas=args.ingress.num_replicas,
        ray_actor_options=_actor_options(args.ingress.ray_actor_options, needs_gpu=False),
        max_ongoing_requests=args.ingress.max_ongoing_requests,
        graceful_shutdown_timeout_s=args.engine_server.graceful_shutdown_timeout_s,
    )
    return ingress.bind(
        _engine_server(args, router, engine_factory),
        router=router,
        model=args.checkpoint,
        revision=args.revision,
        model_id=args.served_model_id,
        settings=args.ingress,
        telemetry=args.telemetry,
    )


def _router(args: AppConfig) -> Application:
    routing = args.router.routing
    deployment = cast(Deployment, BlockRouter).options(
        num_replicas=1,
        ray_actor_options=_actor_options(args.router.ray_actor_options, needs_gpu=False),
        max_ongoing_requests=args.router.max_ongoing_requests,
        user_config={name: getattr(routing, name) for name in sorted(LIVE_SETTINGS)},
        # Nothing in it is worth waiting for: requests that wait there choose by themselves.
        graceful_shutdown_timeout_s=1.0,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2.0,
    )
    return deployment.bind(routing)


def _engine_server(args: AppConfig, router: Application, engine_factory: EngineFactory) -> Application:
    server = args.engine_server
    deployment = cast(Deployment, EngineServer).options(
        **_scale(server),
        ray_actor_options=_actor_options(server.ray_actor_options, needs_gpu=_needs_gpu(args.engine)),
        max_ongoing_requests=server.max_ongoing_requests,
        graceful_shutdown_timeout_s=server.graceful_shutdown_timeout_s,
        health_check_period_s=server.health_check_period_s,
        user_config=server.live.model_dump(),
    )
    return deployment.bind(
        args.checkpoint,
        revision=args.revision,
        engine_config=args.engine,
        router=router,
        settings=server,
        engine_factory=engine_factory,
        telemetry=args.telemetry,
    )


def _scale(server: EngineServerSettings) -> dict[str, Any]:
    """How many replicas there are, as options of a deployment."""
    scaling = server.autoscaling
    if scaling is None:
        return {"num_replicas": server.num_replicas}
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function=LanePolicy,
        policy_kwargs={"target_lane_use": scaling.target_lane_use, "max_queue_age_s": scaling.max_queue_age_s},
    )
    config = AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        upscale_delay_s=scaling.upscale_delay_s,
        downscale_delay_s=scaling.downscale_delay_s,
        look_back_period_s=scaling.look_back_period_s,
        policy=policy,
    )
    return {"num_replicas": None, "autoscaling_config": config}


def _needs_gpu(engine: EngineConfig) -> bool:
    if engine.device == "auto":
        # Ray hides GPUs from whoever did not reserve one, so ask the cluster instead of the driver.
        return ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1  # type: ignore[no-untyped-call]
    return engine.device.startswith("cuda")


def _actor_options(options: ActorOptions, *, needs_gpu: bool) -> dict[str, object]:
    chosen = options.model_dump(exclude_none=True)
    chosen.setdefault("num_gpus", 1 if needs_gpu else 0)
    return chosen
