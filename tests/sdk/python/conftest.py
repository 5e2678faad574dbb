"""Fixtures of the SDK suite.

The platform under test is named by the environment, as a user of the SDK would: `E2B_API_URL`, `E2B_SANDBOX_URL` (both the
one origin of `space up`) and `E2B_API_KEY`. Each test module shares one sandbox; tests that break theirs take `fresh`.
"""

import os
import time
from importlib.metadata import version

import pytest
from e2b import Sandbox

NEWEST = tuple(int(part) for part in version("e2b").split(".")[:2]) >= (2, 60)


def pytest_configure(config):
    missing = [name for name in ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_API_KEY") if not os.environ.get(name)]
    if missing:
        raise pytest.UsageError(f"set {', '.join(missing)} to a running platform (`space up` prints them)")


def pytest_collection_modifyitems(config, items):
    if not NEWEST:
        kept = [item for item in items if "newest" not in item.keywords]
        config.hook.pytest_deselected(items=[item for item in items if "newest" in item.keywords])
        items[:] = kept


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox.create(timeout=600, metadata={"suite": "python"}, envs={"GREETING": "hello world"})
    yield made
    made.kill()


@pytest.fixture
def fresh():
    made = Sandbox.create(timeout=300)
    yield made
    made.kill()


def wait_until(check, limit=10.0, what="the condition"):
    """Polls `check` until it gives something true, at most `limit` seconds, and returns that."""
    deadline = time.monotonic() + limit
    while True:
        found = check()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {limit} s")
        time.sleep(0.05)


@pytest.fixture
def eventually():
    return wait_until
