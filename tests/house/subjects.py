"""Subjects of tests: `pytest -m dcp` runs the tests of one, wherever they lie."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import pytest

SUBJECTS: Mapping[str, str] = {
    "adapters": r"adapter|peft|lora",
    "cli": r"_cli_|test_help|install_words|test_start|fix_commands|test_fixes",
    "dashboard": r"dashboard|page_words|overview",
    "dcp": r"dcp|accelerate|lightning|titan|torchao|fsdp",
    "deepspeed": r"deepspeed|zero|universal|oracle/test_(convert|harness)|parallel|megatron|autoep|autotp",
    "deployment": r"helm|compose|deployment|image|kubernetes|slurm|airflow|dlrover|autoscaling|service_examples",
    "docs": r"document|test_pages|tutorial|test_site|notebook|first_lines",
    "ensure": r"ensure",
    "parallel": r"parallel|megatron|autoep|autotp|regrouping|rule_layers",
    "pickles": r"pickle|corpus|second_wall",
    "pictures": r"picture|test_layouts",
    "s3": r"s3|object_store|hostile_stores|one_upload|http_faults",
    "service": r"^tests/(integration|contract|browser|acceptance)/|job|webhook|lease|event_(feed|stream)|route_scopes",
    "tenants": r"tenant|quota|token|oidc|access|audit|route_scopes",
    "verify": r"^tests/integrity/|verif|silent_corruption|read_back",
    "webhooks": r"webhook",
    "weights": r"weights|safetensors|slim|neutral|transformers",
    "workers": r"^tests/distributed/|shared_(job|chaos|step|check)|many_workers|test_ensure_callers|test_helpers",
}
"""What the path and the name of a test say, in lower case, when it is of a subject."""


def subjects_of(nodeid: str) -> list[str]:
    """The subjects of a test: a test can have several, or none."""
    return [subject for subject, words in SUBJECTS.items() if re.search(words, nodeid.lower())]


def mark_subjects(items: Iterable[pytest.Item]) -> None:
    """Give each test the markers of its subjects."""
    for item in items:
        for subject in subjects_of(item.nodeid):
            item.add_marker(subject)
