"""The chart's alerts on an observed job: ``serve --observe --metrics`` and a real Prometheus."""

from pathlib import Path
from typing import Any

import yaml
from launch import free_port
from observed_ranks import STEPS, serve_while_ranks_report
from rendered_chart import rendered
from testbed.prometheus import Server, Target

TESTBEDS = ("api", "prometheus")
FIRING = 'ALERTS{alertname="PipeMorphLinkSlow",alertstate="firing"}'


def test_the_alert_of_a_slow_link_fires(tmp_path: Path) -> None:
    values: dict[str, Any] = {"enabled": True, "rules.PipeMorphLinkSlow.for": "1s"}
    made = rendered(**{f"metrics.alerts.{name}": value for name, value in values.items()})
    (rule,) = (each for each in made if each["kind"] == "PrometheusRule")
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(rule["spec"]))
    metrics = free_port()
    server = Server(tmp_path, [Target(metrics, {"job": "observed"})], [rules])
    found = list[Any]()

    def look() -> bool:
        found[:] = server.ask(FIRING)
        return bool(found)

    try:
        serve_while_ranks_report(tmp_path, STEPS + 1, look, "--metrics", f"127.0.0.1:{metrics}")
    finally:
        server.close()
    (alert,) = found
    labels = alert["metric"]
    assert (labels["namespace"], labels["name"]) == ("default", "observed"), labels
