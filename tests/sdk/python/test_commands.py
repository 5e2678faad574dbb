"""Foreground, background and streamed commands."""

import time

import pytest
from e2b import CommandExitException
from e2b.exceptions import AuthenticationException as AuthenticationError
from e2b.exceptions import NotFoundException, SandboxException, TimeoutException


def test_foreground_gives_output_and_exit_code(sandbox):
    result = sandbox.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)


def test_a_non_zero_exit_is_an_exception_with_everything_in_it(sandbox):
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.run("echo partial; echo why >&2; exit 42")
    assert caught.value.exit_code == 42
    assert caught.value.stdout == "partial\n"
    assert caught.value.stderr == "why\n"


def test_an_unknown_command_exits_127(sandbox):
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.run("no-such-command-here")
    assert caught.value.exit_code == 127


def test_streaming_callbacks_come_while_the_command_runs(sandbox):
    seen, errors = [], []
    result = sandbox.commands.run(
        "for i in 1 2 3; do echo line $i; echo err $i >&2; sleep 0.3; done",
        on_stdout=lambda text: seen.append((time.monotonic(), text)),
        on_stderr=errors.append,
    )
    assert "".join(text for _, text in seen) == result.stdout == "line 1\nline 2\nline 3\n"
    assert "".join(errors) == "err 1\nerr 2\nerr 3\n"
    assert seen[-1][0] - seen[0][0] > 0.4, "all output came at once: it was buffered"


def test_background_returns_at_once_and_can_be_waited_for(sandbox):
    started = time.monotonic()
    handle = sandbox.commands.run("sleep 1; echo late", background=True)
    assert time.monotonic() - started < 1
    assert handle.pid > 0
    assert handle.wait().stdout == "late\n"


def test_stdin_reaches_the_command_and_can_be_closed(sandbox):
    handle = sandbox.commands.run("cat; echo end", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "first\n")
    sandbox.commands.send_stdin(handle.pid, "zweite Zeile ü\n")
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "first\nzweite Zeile ü\nend\n"


def test_without_stdin_the_command_sees_end_of_file(sandbox):
    assert sandbox.commands.run("cat; echo done", timeout=5).stdout == "done\n"


def test_environment_values_arrive_exactly(sandbox):
    hostile = "quotes '\" $HOME `id` \\ new\nline \t ü 🙂 " + "x" * 20_000
    result = sandbox.commands.run('printf %s "$ODD"', envs={"ODD": hostile, "EMPTY": ""})
    assert result.stdout == hostile
    assert sandbox.commands.run("echo ${ODD-unset}").stdout == "unset\n"


def test_environment_of_a_command_wins_over_that_of_the_sandbox(sandbox):
    assert sandbox.commands.run("echo $GREETING", envs={"GREETING": "mine"}).stdout == "mine\n"


def test_working_directory(sandbox):
    assert sandbox.commands.run("pwd", cwd="/usr/lib").stdout == "/usr/lib\n"
    assert sandbox.commands.run("pwd").stdout == "/home/user\n"
    with pytest.raises(SandboxException, match="no-such-directory"):
        sandbox.commands.run("pwd", cwd="/no-such-directory")


def test_user(sandbox):
    assert sandbox.commands.run("id -un; echo $HOME; echo $USER").stdout == "user\n/home/user\nuser\n"
    assert sandbox.commands.run("id -un; echo $HOME", user="root").stdout == "root\n/root\n"
    assert sandbox.commands.run("sudo id -un").stdout == "root\n"
    with pytest.raises((AuthenticationError, SandboxException)):
        sandbox.commands.run("id", user="nobody-of-that-name")


def test_a_timeout_kills_the_command(sandbox, eventually):
    started = time.monotonic()
    with pytest.raises(TimeoutException):
        sandbox.commands.run("echo begun; exec sleep 301", timeout=1)
    assert time.monotonic() - started < 6
    eventually(lambda: not running(sandbox, "sleep 301"), limit=5, what="the death of the command")


def test_list_shows_what_runs_and_kill_ends_it(sandbox, eventually):
    handle = sandbox.commands.run("exec sleep 302", background=True)
    mine = [each for each in sandbox.commands.list() if each.pid == handle.pid]
    assert len(mine) == 1
    assert mine[0].cmd == "/bin/bash" and mine[0].args == ["-l", "-c", "exec sleep 302"]
    assert sandbox.commands.kill(handle.pid) is True
    with pytest.raises(CommandExitException) as caught:
        handle.wait()
    assert caught.value.exit_code != 0
    assert sandbox.commands.kill(handle.pid) is False
    eventually(
        lambda: handle.pid not in [each.pid for each in sandbox.commands.list()],
        limit=5,
        what="leaving the process list",
    )


def test_connect_to_a_running_command_from_elsewhere(sandbox):
    handle = sandbox.commands.run("read line; echo got $line; exit 3", background=True, stdin=True)
    handle.disconnect()
    again = sandbox.commands.connect(handle.pid)
    sandbox.commands.send_stdin(handle.pid, "it\n")
    with pytest.raises(CommandExitException) as caught:
        again.wait()
    assert (caught.value.exit_code, caught.value.stdout) == (3, "got it\n")


def test_connect_to_an_ended_command_still_gives_its_end(sandbox, eventually):
    handle = sandbox.commands.run("exit 7", background=True)
    with pytest.raises(CommandExitException):
        handle.wait()
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.connect(handle.pid).wait()
    assert caught.value.exit_code == 7


def test_unknown_process_is_not_found(sandbox):
    with pytest.raises(NotFoundException):
        sandbox.commands.connect(4_000_000).wait()
    with pytest.raises(NotFoundException):
        sandbox.commands.send_stdin(4_000_000, "x")
    assert sandbox.commands.kill(4_000_000) is False


def test_bytes_that_are_no_utf8_do_not_break_the_stream(sandbox):
    result = sandbox.commands.run(r"printf 'a\377b\303'; printf '\274c'")
    assert result.stdout == "a\ufffdb\u00fcc"


def running(sandbox, words):
    """Whether a process of that command line lives, found without tools that the template may lack."""
    found = sandbox.commands.run(
        "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f 2>/dev/null; echo; done", user="root"
    ).stdout
    return any(line.strip().endswith(words) and "cmdline" not in line for line in found.splitlines())
