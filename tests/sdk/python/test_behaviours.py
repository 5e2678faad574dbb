"""What users of such systems count on: each test is a fault that people really met, turned round."""

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from e2b import CommandExitException, Sandbox
from e2b.exceptions import NotEnoughSpaceException, TimeoutException

from test_commands import running

pytestmark = pytest.mark.newest


def test_a_command_ends_with_its_leader_though_a_child_holds_its_output(sandbox):
    started = time.monotonic()
    result = sandbox.commands.run("sleep 303 & echo leader done")
    assert result.stdout == "leader done\n"
    assert time.monotonic() - started < 5
    sandbox.commands.run("kill %1 2>/dev/null; pkill -x sleep || true", user="root")


def test_a_timeout_reaches_children_that_left_the_session(sandbox, eventually):
    with pytest.raises(TimeoutException):
        sandbox.commands.run(
            "setsid sleep 304 & (setsid setsid sleep 305 &) ; nohup sleep 306 & sleep 307", timeout=1.5
        )
    for words in ("sleep 304", "sleep 305", "sleep 306", "sleep 307"):
        eventually(lambda words=words: not running(sandbox, words), limit=5, what=f"the death of {words}")


def test_a_kill_reaches_descendants(sandbox, eventually):
    handle = sandbox.commands.run("setsid sleep 308 & echo up; wait", background=True)
    eventually(lambda: running(sandbox, "sleep 308"), limit=5, what="the child")
    assert handle.kill()
    eventually(lambda: not running(sandbox, "sleep 308"), limit=5, what="the death of the child")


def test_five_megabytes_of_output_arrive_whole(sandbox):
    program = "import sys\nfor i in range(327680): sys.stdout.write('%015d\\n' % i)"
    result = sandbox.commands.run(f'python3 -c "{program}"', timeout=60)
    expected = "".join("%015d\n" % i for i in range(327680))
    assert len(result.stdout) == 5 << 20
    assert hashlib.sha256(result.stdout.encode()).digest() == hashlib.sha256(expected.encode()).digest()


def test_the_clock_is_right(sandbox):
    before = time.time()
    guest = float(sandbox.commands.run("date +%s.%N").stdout)
    assert before - 0.5 < guest < time.time() + 0.5


def test_fifty_sandboxes_share_no_randomness_and_no_identity():
    def identity(_):
        with Sandbox.create(timeout=120) as made:
            return made.commands.run(
                "cat /proc/sys/kernel/random/uuid; openssl rand -hex 16 2>/dev/null || od -An -N16 -tx1 /dev/urandom;"
                "cat /etc/machine-id; cat /run/space/token; echo; date +%s.%N"
            ).stdout.split("\n")

    with ThreadPoolExecutor(4) as pool:
        lines = list(pool.map(identity, range(50)))
    for at, what in enumerate(("uuid", "random bytes", "machine id", "token")):
        values = [each[at] for each in lines]
        assert all(values), what
        assert len(set(values)) == 50, f"{what} repeats"


def test_orphans_leave_no_zombies(sandbox, eventually):
    sandbox.commands.run("for i in $(seq 300); do (setsid sh -c 'sleep 0.2 & exit 0' &) ; done", timeout=60)

    def zombies():
        return sandbox.commands.run("cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z ' || true").stdout.strip()

    eventually(lambda: zombies() == "0", limit=20, what="no zombies")


def test_a_fork_bomb_leaves_the_daemon_answering(fresh, eventually):
    handle = fresh.commands.run("bomb() { bomb | bomb & }; bomb; sleep 2", background=True, timeout=20)
    time.sleep(2)  # The point in time does not matter: it must answer at any.
    started = time.monotonic()
    assert fresh.is_running()
    assert any(each.pid == handle.pid for each in fresh.commands.list())
    assert time.monotonic() - started < 10
    fresh.files.write("/tmp/still-here", "yes")
    assert fresh.files.read("/tmp/still-here") == "yes"
    handle.kill()
    eventually(lambda: answers(fresh), limit=20, what="a new command after the bomb")


def answers(sandbox):
    try:
        return sandbox.commands.run("echo alive", timeout=5).stdout == "alive\n"
    except Exception:
        return False


def test_a_full_disk_is_a_typed_error_and_the_daemon_lives(fresh):
    fresh.commands.run(
        "fallocate -l $(( $(df --output=avail -B1 /home/user | tail -1) - 1048576 )) /home/user/filler", user="root"
    )
    with pytest.raises(NotEnoughSpaceException):
        fresh.files.write("/home/user/one-more", b"x" * (64 << 20))
    assert fresh.commands.run("echo alive").stdout == "alive\n"
    fresh.commands.run("rm /home/user/filler", user="root")
    fresh.files.write("/home/user/one-more", b"x" * 1024)


def test_a_memory_hog_ends_alone_with_a_typed_cause(fresh):
    with pytest.raises(CommandExitException) as caught:
        fresh.commands.run("python3 -c 'b = []\nwhile True: b.append(b\"x\" * (16 << 20))'", timeout=60)
    assert caught.value.exit_code != 0
    assert "memory" in (caught.value.error or "").lower(), caught.value.error
    assert fresh.commands.run("echo alive").stdout == "alive\n"


def test_one_stuck_command_disturbs_no_other(sandbox):
    # Nobody reads this stream: it must fill up and stop by itself, and hold nobody else up.
    stuck = sandbox.commands.run("yes", background=True, timeout=60)
    for n in range(5):
        assert sandbox.commands.run(f"echo {n}").stdout == f"{n}\n"
    assert stuck.kill()


def test_many_commands_at_once(sandbox):
    with ThreadPoolExecutor(16) as pool:
        outputs = list(pool.map(lambda n: sandbox.commands.run(f"echo {n}").stdout, range(32)))
    assert outputs == [f"{n}\n" for n in range(32)]
