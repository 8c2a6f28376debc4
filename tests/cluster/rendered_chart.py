"""The chart's objects, as helm prints them without a cluster."""

import json
from typing import Any

import yaml
from operator_support import CHART
from testbed import tools
from testbed.processes import output


def rendered(
    *arguments: str, release: str = "x", namespace: str = "sys", **values: Any
) -> list[dict[str, Any]]:
    """Objects of the chart; `TestbedError` with helm's complaint if it refuses."""
    sets = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    where = [release, str(CHART), f"--namespace={namespace}"]
    printed = output([tools.find("helm"), "template", *where, *sets, *arguments])
    return [document for document in yaml.safe_load_all(printed) if document]
