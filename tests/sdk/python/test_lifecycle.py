"""Create, list, look at, prolong and end sandboxes."""

import datetime
import uuid

import pytest
from e2b import Sandbox, SandboxQuery, SandboxState
from e2b.exceptions import AuthenticationException, NotFoundException, SandboxException, TimeoutException


def listed(**query):
    pages = Sandbox.list(query=SandboxQuery(**query) if query else None)
    found = []
    while pages.has_next:
        found += pages.next_items()
    return found


def test_create_reports_a_running_sandbox(sandbox):
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.state == SandboxState.RUNNING
    assert info.metadata["suite"] == "python"
    assert info.cpu_count >= 1 and info.memory_mb >= 128
    assert info.started_at < info.end_at
    now = datetime.datetime.now(datetime.timezone.utc)
    assert abs((info.started_at - now).total_seconds()) < 300
    assert sandbox.is_running()


def test_list_finds_it_and_filters_by_metadata(sandbox):
    assert sandbox.sandbox_id in [each.sandbox_id for each in listed()]
    tag = uuid.uuid4().hex
    with Sandbox.create(metadata={"tag": tag, "odd": "a&b=c d/ü"}, timeout=60) as other:
        found = listed(metadata={"tag": tag})
        assert [each.sandbox_id for each in found] == [other.sandbox_id]
        assert found[0].metadata["odd"] == "a&b=c d/ü"
        assert [each.sandbox_id for each in listed(metadata={"odd": "a&b=c d/ü", "tag": tag})] == [other.sandbox_id]
    assert listed(metadata={"tag": tag}) == []


def test_list_pages():
    tag = uuid.uuid4().hex
    made = [Sandbox.create(metadata={"tag": tag}, timeout=60) for _ in range(3)]
    try:
        pages = Sandbox.list(query=SandboxQuery(metadata={"tag": tag}), limit=2)
        first = pages.next_items()
        assert len(first) == 2 and pages.has_next
        second = pages.next_items()
        assert len(second) == 1 and not pages.has_next
        assert {each.sandbox_id for each in first + second} == {each.sandbox_id for each in made}
    finally:
        for each in made:
            each.kill()


def test_kill_ends_it_and_is_idempotent():
    made = Sandbox.create(timeout=60)
    assert made.commands.run("echo alive").stdout == "alive\n"
    assert made.kill() is True
    assert made.kill() is False
    assert made.is_running() is False
    assert made.sandbox_id not in [each.sandbox_id for each in listed()]
    # The SDK tells "gone" from "unreachable" by the words of the answer.
    with pytest.raises(TimeoutException, match="was not found"):
        made.commands.run("true")
    with pytest.raises(NotFoundException):
        made.get_info()


def test_set_timeout_moves_the_end_both_ways(sandbox):
    now = datetime.datetime.now(datetime.timezone.utc)
    sandbox.set_timeout(1800)
    assert 1700 < (sandbox.get_info().end_at - now).total_seconds() < 1900
    sandbox.set_timeout(600)
    assert 500 < (sandbox.get_info().end_at - now).total_seconds() < 700


def test_connect_gives_the_same_sandbox_and_never_shortens_its_life(sandbox):
    sandbox.set_timeout(900)
    before = sandbox.get_info().end_at
    again = Sandbox.connect(sandbox.sandbox_id, timeout=30)
    assert again.sandbox_id == sandbox.sandbox_id
    assert again.commands.run("echo $GREETING").stdout == "hello world\n"
    assert again.get_info().end_at >= before
    sandbox.set_timeout(600)


def test_a_sandbox_ends_at_its_timeout(eventually):
    made = Sandbox.create(timeout=2)
    assert made.is_running()
    eventually(lambda: not made.is_running(), limit=10, what="the end by timeout")
    eventually(
        lambda: made.sandbox_id not in [each.sandbox_id for each in listed()], limit=5, what="leaving the list"
    )


def test_metrics_are_plausible(sandbox, eventually):
    metrics = eventually(lambda: sandbox.get_metrics(), limit=15, what="a first metric")
    last = metrics[-1]
    assert last.cpu_count >= 1
    assert 0 < last.mem_used <= last.mem_total
    assert 0 < last.disk_used <= last.disk_total


def test_environment_of_create_reaches_every_command(sandbox):
    assert sandbox.commands.run("printenv GREETING").stdout == "hello world\n"


def test_unknown_template_is_a_clear_error():
    with pytest.raises(SandboxException, match="(?i)template.*no-such-template"):
        Sandbox.create("no-such-template", timeout=60)


@pytest.mark.parametrize("bad", ["doesnotexist00000000", "../../etc/passwd", "A" * 300])
def test_unknown_and_malformed_ids_are_errors_not_accidents(bad):
    with pytest.raises(SandboxException):
        Sandbox.connect(bad)


def test_a_wrong_key_is_an_authentication_error():
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_" + "0" * 40, timeout=60)


def test_a_sandbox_is_private_to_its_token(sandbox):
    import httpx
    import os

    answer = httpx.post(
        os.environ["E2B_SANDBOX_URL"] + "/process.Process/List",
        headers={
            "E2b-Sandbox-Id": sandbox.sandbox_id,
            "E2b-Sandbox-Port": "49983",
            "Content-Type": "application/json",
            "X-Access-Token": "wrong",
        },
        content=b"{}",
    )
    assert answer.status_code == 401


@pytest.mark.newest
def test_an_idempotency_key_gives_the_same_sandbox_once():
    key = uuid.uuid4().hex
    first = Sandbox.create(timeout=60, idempotency_key=key)
    try:
        second = Sandbox.create(timeout=60, idempotency_key=key)
        assert second.sandbox_id == first.sandbox_id
    finally:
        first.kill()
