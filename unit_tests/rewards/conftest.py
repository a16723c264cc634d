"""Fixtures of the tests that run programs in the sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from rewards.sandbox import run as sandbox


@pytest.fixture(params=["namespaces", "limits_only"])
def isolation(request: pytest.FixtureRequest) -> Any:
    if request.param == "namespaces":
        request.getfixturevalue("namespaces")
    return request.param


@pytest.fixture
def namespaces() -> str:
    try:
        sandbox.check("namespaces")
    except ValueError as error:
        pytest.skip(str(error))
    return "namespaces"
