"""The files in deploy/ parse, and the commands, options, paths and users in them are there and agree."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from typing import Any

import pytest

from flexspec.cli.main import build_parser
from repository import ROOT

DEPLOY = ROOT / "deploy"


def container_steps() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Containerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(words[0], words[1]) for words in (line.split(" ", 1) for line in lines)]


def arguments() -> dict[str, list[str]]:
    steps = dict(container_steps())
    unit = systemd_unit()
    (container,) = pod()["containers"]
    return {
        "Containerfile": json.loads(steps["CMD"]),
        "flexspec.service": shlex.split(unit["Service"]["ExecStart"])[1:],
        "kubernetes.yaml": container["args"],
    }


def systemd_unit() -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((DEPLOY / "flexspec.service").read_text())
    return unit


def pod() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["spec"]["selector"]["matchLabels"]
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def test_commands_parse_and_serve_on_the_port_that_is_probed() -> None:
    for name, words in arguments().items():
        args = build_parser(words[0]).parse_args(words)
        assert (args.command, args.port) == ("serve", 8000), name


def test_the_container_has_what_it_copies_and_runs_without_rights() -> None:
    steps = container_steps()
    known = {
        "FROM",
        "WORKDIR",
        "COPY",
        "RUN",
        "ENV",
        "VOLUME",
        "USER",
        "EXPOSE",
        "STOPSIGNAL",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    }
    assert {step for step, _ in steps} <= known and steps[0][0] == "FROM"
    last = dict(steps)
    assert json.loads(last["ENTRYPOINT"]) == ["flexspec"] and last["USER"] == "10001:10001"
    check = json.loads(last["HEALTHCHECK"].split("CMD ", 1)[1])
    compile(check[2], "HEALTHCHECK", "exec")
    assert ":8000/health" in check[2] and f"FLEXSPEC_CACHE={last['VOLUME']} " in last["ENV"]
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert [name for name in kept if not (ROOT / name).exists()] == []


def test_the_unit_writes_only_to_its_cache_and_does_not_restart_user_errors() -> None:
    service = systemd_unit()["Service"]
    assert service["Environment"] == f"FLEXSPEC_CACHE=/var/cache/{service['CacheDirectory']}"
    assert service["ProtectSystem"] == "strict" and service["RestartPreventExitStatus"] == "2"


def test_the_pod_probes_health_and_mounts_what_it_names() -> None:
    spec = pod()
    (container,) = spec["containers"]
    (port,) = container["ports"]
    for kind in ("startup", "readiness", "liveness"):
        assert container[f"{kind}Probe"]["httpGet"] == {"path": "/health", "port": port["name"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
    assert mounts["cache"] == dict(container_steps())["VOLUME"] and container["args"][1].startswith(mounts["model"])
    assert f"{spec['securityContext']['runAsUser']}:" in dict(container_steps())["USER"]
