"""A real Prometheus with the scrape configuration and the alerts that ship, for tests."""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType

import httpx
import yaml

from tests.processes import free_port

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "prometheus"
START_TIMEOUT_S = 60.0


def is_installed() -> bool:
    return shutil.which("prometheus") is not None


class Prometheus:
    """A process of its own, that scrapes every second what `discovery`, a list of ports that Ray writes, names."""

    def __init__(self, folder: Path, discovery: Path) -> None:
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(FOLDER / file) for file in config["rule_files"]]
        (ray,) = config["scrape_configs"]
        (found,) = ray["file_sd_configs"]
        assert found["files"] == ["/tmp/ray/prom_metrics_service_discovery.json"]
        found |= {"files": [str(discovery)], "refresh_interval": "1s"}
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
        self._log = (folder / "log.txt").open("wb")
        self._process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], stdout=self._log, stderr=subprocess.STDOUT
        )

    def __enter__(self) -> Prometheus:
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/-/ready").status_code == 200 and self.query("up"):
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        self.__exit__(None, None, None)
        raise AssertionError(f"Prometheus did not start, or found nothing:\n{Path(self._log.name).read_text()[-4000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def query(self, expr: str) -> list[float]:
        """Values of an expression now, one a series; fails where it is not understood."""
        response = httpx.post(f"{self.url}/api/v1/query", data={"query": expr}, timeout=30)
        assert response.status_code == 200, f"{expr}: {response.text}"
        return [float(item["value"][1]) for item in response.json()["data"]["result"]]

    def has_number(self, expr: str) -> bool:
        """Whether an expression finds a series whose value is a number."""
        return any(math.isfinite(value) for value in self.query(expr))

    def alerts(self) -> set[str]:
        """Names of alerts that fire or are about to."""
        found = httpx.get(f"{self.url}/api/v1/alerts", timeout=30).json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in found}
