"""Times E2B's SDK: a create, a create with its first command, and the same command in a sandbox that has long been running.

Prints one line of JSON with milliseconds. The platform is named by the environment, as a user of the SDK would.

The SDK chooses HTTP/2 by TLS, and the platform's own port has no TLS. So for `--http 2` its transport is told to speak
HTTP/2 from the first byte; nothing else of it is changed, and what was really spoken is checked.
"""

import argparse
import functools
import json
import os
import time

import pyqwest

HTTP = {"1.1": pyqwest.HTTPVersion.HTTP1, "2": pyqwest.HTTPVersion.HTTP2}


def timed(call):
    begin = time.perf_counter()
    value = call()
    return value, (time.perf_counter() - begin) * 1000


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--http", choices=HTTP, required=True)
    arguments.add_argument("--n", type=int, required=True, help="sandboxes made")
    arguments.add_argument("--interval", type=float, required=True, help="seconds from one create to the next")
    options = arguments.parse_args()

    import e2b.api.client_sync as sdk
    from e2b import Sandbox

    version = HTTP[options.http]
    sdk.SyncHTTPTransport = functools.partial(with_version, sdk.SyncHTTPTransport, version)
    opts = {"http_version": options.http}

    running = Sandbox.create(timeout=600, **opts)
    try:
        for transport in list(sdk._pools.values()):
            with pyqwest.SyncClient(transport).stream("GET", os.environ["E2B_API_URL"] + "/health") as answer:
                if answer.http_version != version:
                    raise SystemExit(f"{answer.http_version} was spoken, not {version}")
        for _ in range(5):
            running.commands.run("true")
        create, create_run, warm = [], [], []
        next_create = time.monotonic()
        for _ in range(options.n):
            time.sleep(max(0.0, next_create - time.monotonic()))
            next_create = time.monotonic() + options.interval
            made, took = timed(lambda: Sandbox.create(timeout=600, **opts))
            try:
                create.append(took)
                create_run.append(took + timed(lambda: made.commands.run("true"))[1])
            finally:
                made.kill()
            warm.append(timed(lambda: running.commands.run("true"))[1])
    finally:
        running.kill()
    print(json.dumps({"create": create, "create_run": create_run, "warm": warm}))


def with_version(transport, version, **options):
    return transport(**{**options, "http_version": version})


main()
