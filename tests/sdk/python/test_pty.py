"""Terminals."""

import threading

import pytest
from e2b import CommandExitException, PtySize


def collect(handle):
    """Reads a terminal in the background; gives the growing output and the thread."""
    seen = bytearray()

    def read():
        try:
            handle.wait(on_pty=seen.extend)
        except CommandExitException:
            pass

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return seen, thread


def test_a_terminal_takes_input_has_a_size_and_can_be_resized(sandbox, eventually):
    handle = sandbox.pty.create(PtySize(rows=24, cols=80), envs={"MARK": "seven"}, cwd="/tmp", timeout=60)
    seen, thread = collect(handle)
    sandbox.pty.send_stdin(handle.pid, b'stty size; echo "<$MARK>"; pwd; tty\n')
    eventually(lambda: b"24 80" in seen and b"<seven>" in seen and b"/dev/pts/" in seen, limit=20, what="the answers")
    assert b"\r\n/tmp\r\n" in seen
    sandbox.pty.resize(handle.pid, PtySize(rows=50, cols=132))
    sandbox.pty.send_stdin(handle.pid, b"stty size\n")
    eventually(lambda: b"50 132" in seen, limit=10, what="the new size")
    sandbox.pty.send_stdin(handle.pid, b"exit\n")
    thread.join(10)
    assert not thread.is_alive(), "the terminal did not end with its shell"


def test_control_c_interrupts_the_foreground_job_only(sandbox, eventually):
    handle = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=60)
    seen, thread = collect(handle)
    sandbox.pty.send_stdin(handle.pid, b"echo be''gun; sleep 300\n")
    eventually(lambda: b"begun" in seen, limit=20, what="the job")
    # Only once it has become `sleep` is the job surely in the foreground; before, the shell may be the one interrupted.
    eventually(
        lambda: sandbox.commands.run("pgrep -f '^sleep 300$' || true").stdout, limit=20, what="the job in the foreground"
    )
    sandbox.pty.send_stdin(handle.pid, b"\x03")
    sandbox.pty.send_stdin(handle.pid, b"echo still he''re\n")
    eventually(lambda: b"still here" in seen, limit=10, what="the shell after the interrupt")
    assert handle.kill() is True
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.newest
def test_connect_to_a_terminal(sandbox, eventually):
    first = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=60)
    first.disconnect()
    again = sandbox.pty.connect(first.pid)
    seen, thread = collect(again)
    sandbox.pty.send_stdin(first.pid, b"echo re''joined\n")
    eventually(lambda: b"rejoined" in seen, limit=20, what="output over the second connection")
    assert sandbox.pty.kill(first.pid) is True
    thread.join(10)
    assert not thread.is_alive()
