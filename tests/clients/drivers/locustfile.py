"""Users that ask for completions, some of them streamed, and look at what comes back."""

from __future__ import annotations

import json
import os

from locust import HttpUser, constant, task

MAX_TOKENS = 20
BODY = {
    "model": os.environ["SERVED_MODEL"],
    "prompt": "an animal that",
    "max_tokens": MAX_TOKENS,
    "ignore_eos": True,
    "seed": 7,
}


class Reader(HttpUser):
    """Waits for an answer, then asks again."""

    wait_time = constant(0.1)

    @task
    def both(self) -> None:
        """A plain completion, then a streamed one."""
        self.whole()
        self.streamed()

    def whole(self) -> None:
        """A plain completion."""
        with self.client.post("/v1/completions", json=BODY, name="whole", catch_response=True) as response:
            if response.status_code != 200:
                response.failure(response.text)
            elif response.json()["usage"]["completion_tokens"] != MAX_TOKENS:
                response.failure(f"usage says {response.json()['usage']}")

    def streamed(self) -> None:
        """A streamed completion, read line by line."""
        body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
        with self.client.post(
            "/v1/completions", json=body, name="streamed", stream=True, catch_response=True
        ) as response:
            lines = [line.decode() for line in response.iter_lines() if line]
            if response.status_code != 200 or lines[-1] != "data: [DONE]":
                response.failure("\n".join(lines)[-500:])
            elif json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] != MAX_TOKENS:
                response.failure(lines[-2])
