"""The asynchronous half of the SDK: the same wire, other transports and the streaming watch."""

import asyncio

import pytest
from e2b import AsyncSandbox, CommandExitException, FilesystemEventType

pytestmark = pytest.mark.newest


async def test_commands_files_and_watch_in_one_sandbox():
    sandbox = await AsyncSandbox.create(timeout=120)
    try:
        result = await sandbox.commands.run("echo async")
        assert result.stdout == "async\n"
        with pytest.raises(CommandExitException):
            await sandbox.commands.run("exit 5")

        await sandbox.files.make_dir("/home/user/watched")
        seen = asyncio.Queue()
        watch = await sandbox.files.watch_dir("/home/user/watched", on_event=seen.put)
        await sandbox.files.write("/home/user/watched/a.txt", "content")
        async with asyncio.timeout(10):
            while True:
                event = await seen.get()
                if event.name == "a.txt" and event.type == FilesystemEventType.CREATE:
                    break
        await watch.stop()
        assert await sandbox.files.read("/home/user/watched/a.txt") == "content"

        handle = await sandbox.commands.run("read x; echo got $x", background=True, stdin=True)
        await sandbox.commands.send_stdin(handle.pid, "it\n")
        assert (await handle.wait()).stdout == "got it\n"
    finally:
        assert await sandbox.kill()


async def test_twenty_commands_over_one_connection():
    sandbox = await AsyncSandbox.create(timeout=120)
    try:
        results = await asyncio.gather(*(sandbox.commands.run(f"echo {n}") for n in range(20)))
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(20)]
    finally:
        await sandbox.kill()
