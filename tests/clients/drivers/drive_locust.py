"""locust: a few users for a few seconds, from its command line, with the locustfile beside this."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import Checks

checks = Checks("locust")

with checks.part("three users for 5 s, plain and streamed"):
    command = [str(Path(sys.executable).with_name("locust")), "--headless", "--users", "3", "--spawn-rate", "3"]
    command += ["--run-time", "5s", "--stop-timeout", "30s", "--json", "--skip-log", "--host", checks.url]
    command += ["--locustfile", str(Path(__file__).with_name("locustfile.py"))]
    environment = {**os.environ, "SERVED_MODEL": checks.model}
    done = subprocess.run(command, capture_output=True, text=True, cwd=checks.scratch, env=environment, check=False)
    checks.equal(done.returncode, 0, "locust ends well")
    try:
        stats = {entry["name"]: entry for entry in json.loads(done.stdout)}
    except ValueError:
        raise RuntimeError(f"locust printed no statistics: {(done.stdout + done.stderr)[-1500:]}") from None
    checks.equal(set(stats), {"whole", "streamed"}, "both kinds were asked for")
    for name, entry in stats.items():
        checks.that(entry["num_requests"] >= 1, f"{name}: requests were answered", entry["num_requests"])
        checks.equal(entry["num_failures"], 0, f"{name}: none failed")

checks.finish()
