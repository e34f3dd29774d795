"""Dashboards, rules and scrape configuration speak of metrics that a scraped page really has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from cli.reference import ROOT
from common.telemetry.metrics import EdgeMetrics, WorkerMetrics, exposition

OBSERVABILITY = ROOT / "observability"
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
DASHBOARDS = sorted((OBSERVABILITY / "grafana" / "dashboards").glob("*.json"))


@pytest.fixture(scope="module")
def scraped() -> dict[str, set[str]]:
    """Sample names of both pages, with the labels each may carry."""
    edge, worker = EdgeMetrics(CollectorRegistry()), WorkerMetrics("demo")
    pages = (exposition(edge.registry) + exposition(worker.registry)).decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", pages, re.MULTILINE))
    labels = {item.name: set(item.labels) for item in (*edge.catalogue, *worker.catalogue)}
    return {
        name + suffix: labels[name] | ({"le"} if suffix == "_bucket" else set())
        for name, kind in kinds.items()
        for suffix in SUFFIXES.get(kind, ("",))
    }


def expressions() -> Iterator[tuple[str, str]]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.stem}: {panel['title']}", target["expr"]
    for group in load("prometheus/rules.yml")["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert", rule.get("record")), rule["expr"]


def load(path: str) -> Any:
    return yaml.safe_load((OBSERVABILITY / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_a_query_reads_metrics_and_labels_that_exist(where: str, expression: str, scraped: dict[str, set[str]]) -> None:
    names = re.findall(r"\b(?:vllm:|headrace_|http_)\w+", expression)
    assert names, f"{where} reads no metric of ours"
    assert [name for name in names if name not in scraped] == []
    # prometheus adds instance and job to every series it scrapes
    allowed = set.union(*(scraped[name] for name in names)) | {"instance", "job"}
    used = set(re.findall(r"(\w+)\s*=~?\s*\"", expression))
    used |= {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in group.split(",")}
    assert used - allowed == set()


def test_panels_have_a_unit_a_description_and_a_place_of_their_own() -> None:
    for path in DASHBOARDS:
        panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
        assert len(set(places)) == len(places)
        for panel in panels:
            if panel["type"] != "row":
                assert panel["description"].endswith(".")
                assert panel["fieldConfig"]["defaults"]["unit"]


def test_prometheus_scrapes_the_services_of_the_compose_file_on_their_ports() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    for job in load("prometheus/prometheus.yml")["scrape_configs"]:
        for lookup in job["dns_sd_configs"]:
            for name in lookup["names"]:
                dockerfile = (ROOT / services[name]["build"]["dockerfile"]).read_text(encoding="utf-8")
                assert f"EXPOSE {lookup['port']}" in dockerfile


def test_traces_go_from_the_collector_to_tempo_to_grafana() -> None:
    collector = load("otel-collector/config.yaml")
    host, port = collector["exporters"]["otlp"]["endpoint"].split(":")
    tempo = load("tempo/config.yaml")
    assert tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(f":{port}")
    sources = {
        source["type"]: source["url"]
        for source in load("grafana/provisioning/datasources/headrace.yaml")["datasources"]
    }
    assert sources["tempo"] == f"http://{host}:{tempo['server']['http_listen_port']}"


def test_compose_names_only_settings_that_exist() -> None:
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    text += "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docker").glob("*.Dockerfile"))
    known = (ROOT / "common" / "setting_names.txt").read_text(encoding="utf-8").upper()
    names = set(re.findall(r"^\s*(?:ENV )?HEADRACE_(\w+)[:=]", text, re.MULTILINE))
    assert names
    assert [name for name in names if f".{name}" not in known] == []
