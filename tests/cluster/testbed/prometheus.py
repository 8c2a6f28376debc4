"""Prometheus, and its own checker of rules, from Debian's package."""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from testbed import tools
from testbed.controlplane import free_ports
from testbed.processes import Process
from testbed.unpacked import find_prometheus


def find(name: str = "promtool") -> Path:
    """The program. Raises TestbedError if it is not there."""
    found = find_prometheus(name)
    if found is None:
        raise tools.not_ready("prometheus", f"{name} is neither on PATH nor unpacked")
    return found


class Target(NamedTuple):
    """Target at a port of this machine, with the labels that a ServiceMonitor or PodMonitor of the
    chart gives it."""

    port: int
    labels: Mapping[str, str]


class Server:
    """A Prometheus that scrapes its targets each second, and evaluates files with rules as often.
    Close it when done."""

    def __init__(self, folder: Path, targets: Sequence[Target], rules: Sequence[Path] = ()) -> None:
        (port,) = free_ports(1, "127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(each) for each in rules],
            "scrape_configs": [
                {
                    "job_name": str(number),
                    # A job's own namespace and name stay.
                    "honor_labels": True,
                    "static_configs": [
                        {"targets": [f"127.0.0.1:{each.port}"], "labels": dict(each.labels)}
                    ],
                }
                for number, each in enumerate(targets)
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        self._process = Process(
            "prometheus",
            [
                find("prometheus"),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
                "--query.lookback-delta=15s",
            ],
            folder / "prometheus.log",
        )
        self._process.start()
        self._process.wait_until("it answers", self._ready, 60.0)

    def ask(self, expression: str) -> list[Any]:
        """Result of a query now. Raises AssertionError with Prometheus's message."""
        result: list[Any] = self._get("query", query=expression)["result"]
        return result

    def close(self) -> None:
        self._process.stop()

    def _get(self, what: str, **query: str) -> dict[str, Any]:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)["data"]
                return found
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from None

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=10):
                return True
        except OSError:
            return False
