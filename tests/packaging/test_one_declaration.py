"""A new option is one field: flag, keyword, API field, OpenAPI, help, handbook and digest follow from it.

The client is copied, a field is added to the text of one class, and a program looks at everything that has options.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from house.repository import ROOT

BEHIND = '''class WeightsOptions(FormatOptions):
    """Options of consolidated weights."""
'''
FIELD = """
    shade: Annotated[
        int | None, Option("Shade of the weights in DST.", Section.TARGET, label="Shade of weights")
    ] = Field(default=None, ge=1, le=9)
"""
PROGRAM = """
import inspect, io, json, sys, warnings
from contextlib import redirect_stdout
sys.path.insert(0, SCRIPTS)
warnings.simplefilter("ignore")
import reshard
from fastapi.testclient import TestClient
from keywords_module import keywords_module
from reference_pages import rest_page
from reshard.api.wire import convert_request
from reshard.functions import request_of
from reshard.cli.flags import ConversionFlags
from reshard.cli.main import run
from reshard.errors import RequestError
from reshard_engine.plan.planner import request_facts
from reshard_jobs.settings import JobSettings
from reshard_service.app import create_app
from reshard_service.pages.words import label_of, places_in
from reshard_service.settings import ServiceSettings

def shown(*words):
    out = io.StringIO()
    with redirect_stdout(out):
        assert run(words) == 0
    return out.getvalue()

named = {"source": "a", "target": "b", "to": "torch", "options": None}
flags, keyword, plain = (
    ConversionFlags(to="torch", shade=3).request("a", "b"),
    request_of({"shade": 3}, "", to_service=False, named=named),
    ConversionFlags(to="torch").request("a", "b"),
)
settings = ServiceSettings(jobs=JobSettings(database_url=DATABASE))
body = {"source": SOURCE, "target": TARGET, "to": "safetensors", "options": {"weights": {"shade": 3}}}
with TestClient(create_app(settings)) as api:
    schemas = api.get("/openapi.json").json()["components"]["schemas"]
    statuses = [
        api.post("/v1/plans", json=body | {"options": {"weights": {"shade": shade}}}).status_code for shade in (3, 10)
    ]
try:
    reshard.plan("a", "b", to="torch", shade=10)
except RequestError as error:
    refused = error.message
print(json.dumps({
    "field": flags.options.given(),
    "same": flags == keyword == convert_request("a", "b", "torch", {"shade": 3}),
    "help": [shown(command, "--help") for command in ("convert", "plan", "submit")],
    "signatures": ["shade" in inspect.signature(f).parameters for f in (reshard.plan, reshard.convert)],
    "docs": [inspect.getdoc(f) for f in (reshard.plan, reshard.convert)],
    "keywords": keywords_module(),
    "schema": schemas["WeightsOptions"]["properties"].get("shade"),
    "statuses": statuses,
    "refused": refused,
    "rest": [line for line in rest_page().splitlines() if "`shade`" in line],
    "digest": request_facts(flags) != request_facts(plain),
    "label": label_of("options.weights.shade"),
    "places": places_in("see --shade"),
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("declared")
    shutil.copytree(ROOT / "client", place / "client", ignore=shutil.ignore_patterns("__pycache__"))
    options = place / "client" / "reshard" / "options.py"
    text = options.read_text()
    assert text.count(BEHIND) == 1
    options.write_text(text.replace(BEHIND, BEHIND + FIELD))
    program = "\n".join(
        [
            f"SCRIPTS = {str(ROOT / 'scripts')!r}",
            f"DATABASE = 'sqlite:///{place}/jobs.db'",
            f"SOURCE, TARGET = {str(ROOT / 'tests' / 'data' / 'zero2_tiny')!r}, {str(place / 'out')!r}",
            PROGRAM,
        ]
    )
    env = os.environ | {"PYTHONPATH": str(place / "client"), "COLUMNS": "120", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_flag_keyword_and_argument_of_the_client_fill_the_field(found: dict[str, Any]) -> None:
    assert found["field"] == {"weights": {"shade": 3}}
    assert found["same"]
    assert found["refused"] == "shade is above 9"


def test_help_shows_the_flag(found: dict[str, Any]) -> None:
    for page in found["help"]:
        (line,) = [line for line in page.splitlines() if "--shade" in line]
        assert line.split() == ["--shade", "N", "Shade", "of", "the", "weights", "in", "DST."]


def test_signature_docstring_and_types_have_the_keyword(found: dict[str, Any]) -> None:
    assert found["signatures"] == [True, True]
    assert all("\n    shade: Shade of the weights in the target.\n" in text for text in found["docs"])
    assert found["keywords"].count("    shade: int | None\n") == 1, "in what functions and clients have in common"


def test_the_api_shows_and_takes_the_field(found: dict[str, Any]) -> None:
    bounds = {"maximum": 9, "minimum": 1, "type": "integer"}
    assert bounds in found["schema"]["anyOf"]
    good, bad = found["statuses"]
    assert good in (200, 202), "a plan, or the job of one on a machine that is busy"
    assert bad == 422


def test_the_handbook_and_the_pages_have_it(found: dict[str, Any]) -> None:
    assert found["rest"] == ["| `shade` | integer or null |  | Shade of the weights in the target. |"]
    assert found["label"] == "Shade of weights"
    assert found["places"] == ["options.weights.shade"]


def test_the_plan_s_digest_has_it(found: dict[str, Any]) -> None:
    assert found["digest"]
