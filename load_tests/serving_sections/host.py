"""The process that hosts the application under test: a Ray cluster of its own, deployed to as its input tells.

Each line in is a JSON object: AppConfig's `args`, and how this deployment differs from what ships. Each line out
answers one. It leaves when its input ends, and takes the cluster with it. Started by `hosting.Host`; not for people.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from serve_app.app import build_app
from serve_app.config import AppConfig

from .engines import MAKERS

NAME = "load-test"
OBJECT_STORE_BYTES = 200 * 2**20
"""Nothing large ever lies in it."""


def build(order: dict[str, Any]) -> Application:
    """The application that ships, with another engine, fewer replicas or without the router where an order says so.

    An order that differs only in `num_replicas` or `with_router` from the one before leaves the engines as they are.
    """
    app = build_app(AppConfig.model_validate(order["args"]))
    # The builder takes nothing but its settings, so what it has bound is changed before Serve reads it.
    ingress = app._bound_deployment
    values = (*ingress.init_args, *ingress.init_kwargs.values())
    parts = {part._bound_deployment.name: part for part in values if isinstance(part, Application)}
    engine = parts["EngineServer"]._bound_deployment
    if order.get("maker") is not None:
        engine.init_kwargs["engine_factory"] = maker(order["maker"], order.get("step_s"))
    if order.get("num_replicas") is not None:
        engine = engine.options(num_replicas=order["num_replicas"])
    with_router = order.get("with_router", True)
    if not with_router:
        # The engines keep theirs, and report to it.
        ingress.init_kwargs["router"] = None
    # Serve replaces every replica of a deployment whose version it does not know, and without a name each is new.
    engine_version = json.dumps([order["args"], order.get("maker"), order.get("step_s")], sort_keys=True)
    parts["EngineServer"]._bound_deployment = engine.options(version=engine_version, _internal=True)
    router = parts["BlockRouter"]._bound_deployment
    parts["BlockRouter"]._bound_deployment = router.options(version=engine_version, _internal=True)
    app._bound_deployment = ingress.options(version=f"{engine_version} {with_router}", _internal=True)
    return app


def maker(name: str, step_s: float | None) -> Callable[..., Any]:
    """What makes the replicas' engines."""
    return MAKERS[name] if step_s is None else functools.partial(MAKERS[name], step_s)


def main() -> int:
    """Serve until the input ends."""
    # Ray and what it imports also write to standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    options = json.loads(sys.stdin.readline())
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=os.cpu_count(),
        num_gpus=options["num_gpus"],
        object_store_memory=OBJECT_STORE_BYTES,
    )
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": options["port"]})
        print(json.dumps({"ok": True}), file=answers)
        for line in sys.stdin:
            began = time.monotonic()
            answer: dict[str, Any] = {"ok": True}
            try:
                serve.run(build(json.loads(line)), name=NAME, route_prefix="/")
            except Exception as error:
                # Whoever gave the order has to hear of it, whatever it is.
                traceback.print_exc()
                answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            print(json.dumps({**answer, "seconds": time.monotonic() - began}), file=answers)
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
