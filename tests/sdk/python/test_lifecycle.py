"""Create, list, look at, prolong and end sandboxes."""

import datetime
import os
import subprocess
import sys
import time
import uuid

import httpx
import pytest
from e2b import Sandbox, SandboxQuery, SandboxState
from e2b.exceptions import AuthenticationException, NotFoundException, SandboxException, TimeoutException


def own(path, body=None):
    """A call of our own API, which E2B's SDKs have no method for."""
    headers = {"X-API-KEY": os.environ["E2B_API_KEY"]}
    answer = httpx.post(os.environ["E2B_API_URL"] + path, headers=headers, json=body or {}, timeout=60)
    assert answer.is_success, answer.text
    return answer.json()


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


def test_filters_by_state_and_pages_while_others_come_and_go():
    tag = uuid.uuid4().hex
    made = [Sandbox.create(metadata={"tag": tag}, timeout=120) for _ in range(3)]
    try:
        own(f"/v1/sandboxes/{made[1].sandbox_id}/pause")
        paused = listed(metadata={"tag": tag}, state=[SandboxState.PAUSED])
        assert [each.sandbox_id for each in paused] == [made[1].sandbox_id]
        assert paused[0].state == SandboxState.PAUSED
        running = listed(metadata={"tag": tag}, state=[SandboxState.RUNNING])
        assert {each.sandbox_id for each in running} == {made[0].sandbox_id, made[2].sandbox_id}

        pages = Sandbox.list(query=SandboxQuery(metadata={"tag": tag}), limit=2)
        first = [each.sandbox_id for each in pages.next_items()]
        assert first == [made[2].sandbox_id, made[1].sandbox_id]
        made[2].kill()
        with Sandbox.create(metadata={"tag": tag}, timeout=60):
            assert [each.sandbox_id for each in pages.next_items()] == [made[0].sandbox_id]
    finally:
        for each in made:
            each.kill()


def test_connect_lets_a_paused_one_run_on_where_it_was(fresh):
    fresh.files.write("/tmp/kept", "before")
    counting = fresh.commands.run("i=0; while sleep 0.1; do i=$((i+1)); echo $i > /tmp/count; done", background=True)
    boot = fresh.commands.run("cat /proc/sys/kernel/random/boot_id").stdout
    end = fresh.get_info().end_at
    assert own(f"/v1/sandboxes/{fresh.sandbox_id}/pause")["state"] == "paused"
    assert fresh.get_info().state == SandboxState.PAUSED
    assert fresh.is_running() is False, "a health check tells, and does not wake it"
    assert fresh.get_info().state == SandboxState.PAUSED
    assert fresh.get_info().end_at == end, "its time goes on counting"

    again = Sandbox.connect(fresh.sandbox_id, timeout=10)
    assert again.get_info().state == SandboxState.RUNNING
    assert again.get_info().end_at >= end, "connect never shortens"
    assert again.is_running()
    assert again.files.read("/tmp/kept") == "before"
    assert again.commands.run("cat /proc/sys/kernel/random/boot_id").stdout == boot
    assert counting.pid in [each.pid for each in again.commands.list()]
    guest = float(again.commands.run("date +%s.%N").stdout)
    assert abs(guest - time.time()) < 5, "its clock was set"


def test_a_call_wakes_a_paused_one(fresh):
    own(f"/v1/sandboxes/{fresh.sandbox_id}/pause")
    assert fresh.commands.run("echo awake").stdout == "awake\n"
    assert fresh.get_info().state == SandboxState.RUNNING


@pytest.mark.newest
def test_pause_of_e2b_is_refused_with_what_to_do_instead(fresh):
    with pytest.raises(SandboxException, match="not available"):
        fresh.pause()
    assert fresh.is_running()


@pytest.mark.newest
@pytest.mark.parametrize("version", ["HTTP1", "HTTP2"])
def test_create_and_run_over_either_version_of_http(version):
    """Over TLS the SDK negotiates HTTP/2; without, it is told here, in a process of its own because it keeps its connections."""
    script = f"""
import e2b.api.client_sync as client
from pyqwest import HTTPVersion
plain = client.SyncHTTPTransport
made = []
def pinned(**options):
    made.append(options)
    return plain(**{{**options, "http_version": HTTPVersion.{version}}})
client.SyncHTTPTransport = pinned
from e2b import Sandbox
with Sandbox.create(timeout=60) as sandbox:
    assert sandbox.commands.run("echo over").stdout == "over\\n"
    assert sandbox.sandbox_id in [each.sandbox_id for each in Sandbox.list().next_items()]
assert made, "the SDK makes its transport in another way"
print("{version}")
"""
    outcome = subprocess.run(
        [sys.executable, "-c", script], env=dict(os.environ), capture_output=True, text=True, timeout=120
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.strip() == version
