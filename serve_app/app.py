"""The application: `import_path: serve_app.app:build_app`, with AppConfig as `args`."""

# Ray looks at the annotation object of the builder's argument, so annotations must not become strings in this module.
from typing import cast

import ray
from ray.serve import Application, Deployment

from engine import EngineConfig

from .config import ActorOptions, AppConfig
from .engine_server import EngineServer
from .ingress import Ingress


def build_app(args: AppConfig) -> Application:
    """Ingress in front of EngineServer. Unknown keys and wrong values in `args` are errors."""
    server = args.engine_server
    # The decorator's type hides that it returns a Deployment.
    engine_server = (
        cast(Deployment, EngineServer)
        .options(
            num_replicas=server.num_replicas,
            ray_actor_options=_actor_options(server.ray_actor_options, needs_gpu=_needs_gpu(args.engine)),
            max_ongoing_requests=server.max_ongoing_requests,
            graceful_shutdown_timeout_s=server.graceful_shutdown_timeout_s,
        )
        .bind(
            args.checkpoint,
            revision=args.revision,
            engine_config=args.engine,
            coalesce_interval_s=server.coalesce_interval_s,
            warm_up_tokens=server.warm_up_tokens,
        )
    )
    ingress = cast(Deployment, Ingress).options(
        num_replicas=args.ingress.num_replicas,
        ray_actor_options=_actor_options(args.ingress.ray_actor_options, needs_gpu=False),
        max_ongoing_requests=args.ingress.max_ongoing_requests,
        graceful_shutdown_timeout_s=server.graceful_shutdown_timeout_s,
    )
    return ingress.bind(
        engine_server,
        model=args.checkpoint,
        revision=args.revision,
        model_id=args.served_model_id,
        settings=args.ingress,
    )


def _needs_gpu(engine: EngineConfig) -> bool:
    if engine.device == "auto":
        # Ray hides GPUs from whoever did not reserve one, so ask the cluster instead of the driver.
        return ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1  # type: ignore[no-untyped-call]
    return engine.device.startswith("cuda")


def _actor_options(options: ActorOptions, *, needs_gpu: bool) -> dict[str, object]:
    chosen = options.model_dump(exclude_none=True)
    chosen.setdefault("num_gpus", 1 if needs_gpu else 0)
    return chosen
