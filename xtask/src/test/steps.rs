//! The steps of `cargo xtask test`, in their order.

use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::{Counts, Run, Step};
use crate::{
    bench,
    build::{self, Scope},
    check, demo, find_program,
    platform::{self, Platform},
    python,
    session::Interrupted,
    setup::{self, Purpose},
};

/// How long each fuzz target runs: enough to notice what is broken, little beside the compiling.
const FUZZ_SECONDS: u32 = 10;

/// All of them.
pub(crate) const ALL: &[Step] = &[
    Step {
        name: "setup",
        needs: &[],
        what: "install what is missing",
        run: setup,
    },
    Step {
        name: "hygiene",
        needs: &[],
        what: "house rules",
        run: |run| checked(run, "hygiene"),
    },
    Step {
        name: "links",
        needs: &[],
        what: "links in the documents",
        run: |run| checked(run, "links"),
    },
    Step {
        name: "errors",
        needs: &[],
        what: "every error code is documented",
        run: |run| checked(run, "errors"),
    },
    Step {
        name: "fmt",
        needs: &[],
        what: "formatting",
        run: |run| checked(run, "fmt"),
    },
    Step {
        name: "dependencies",
        needs: &[],
        what: "bans, licences, sources",
        run: |run| checked(run, "dependencies"),
    },
    Step {
        name: "build",
        needs: &["setup"],
        what: "the guest's daemon, all programs and all tests",
        run: build,
    },
    Step {
        name: "clippy",
        needs: &["setup"],
        what: "lints, warnings are errors",
        run: |run| checked(run, "clippy"),
    },
    Step {
        name: "unit",
        needs: &["build"],
        what: "tests inside the crates",
        run: unit,
    },
    Step {
        name: "fuzz",
        needs: &["setup"],
        what: "parsers of foreign bytes: their corpora, then ten seconds each",
        run: fuzz,
    },
    Step {
        name: "template",
        needs: &["build"],
        what: "the template that all later steps share",
        run: template,
    },
    Step {
        name: "integration",
        needs: &["template"],
        what: "tests of whole crates, on real machines",
        run: integration,
    },
    Step {
        name: "up",
        needs: &["template"],
        what: "a platform for the SDKs",
        run: up,
    },
    Step {
        name: "sdk-python",
        needs: &["up"],
        what: "E2B's newest Python SDK",
        run: sdk_python,
    },
    Step {
        name: "sdk-python-2.45",
        needs: &["up"],
        what: "E2B's Python SDK 2.45 (v1 calls)",
        run: sdk_python_old,
    },
    Step {
        name: "sdk-js",
        needs: &["up"],
        what: "E2B's newest JavaScript SDK",
        run: sdk_js,
    },
    Step {
        name: "demo",
        needs: &["up"],
        what: "HumanEval, a short run",
        run: humaneval,
    },
    Step {
        name: "down",
        needs: &["up"],
        what: "that platform stops in order",
        run: down,
    },
    Step {
        name: "bench",
        needs: &["template"],
        what: "a short look at every measurement",
        run: bench_smoke,
    },
    Step {
        name: "soak",
        needs: &["template"],
        what: "a short soak with kills: everything is back where it was",
        run: soak,
    },
];

fn setup(run: &mut Run<'_>) -> Result<Counts> {
    setup::ensure(run.session, Purpose::Test)?;
    Ok(Counts::success())
}

fn checked(run: &mut Run<'_>, name: &str) -> Result<Counts> {
    let check = check::ALL
        .iter()
        .find(|check| check.name == name)
        .context("there is no such check")?;
    (check.run)(run.session)?;
    Ok(Counts::success())
}

fn build(run: &mut Run<'_>) -> Result<Counts> {
    run.built = Some(build::all(run.session, Scope::Everything)?);
    Ok(Counts::success())
}

fn unit(run: &mut Run<'_>) -> Result<Counts> {
    cargo_tests(run, "unit", "kind(lib) | kind(bin)", &["--lib", "--bins"])
}

fn fuzz(run: &mut Run<'_>) -> Result<Counts> {
    Ok(Counts {
        passed: crate::fuzz::run_all(run.session, None, FUZZ_SECONDS)?,
        ..Counts::default()
    })
}

fn integration(run: &mut Run<'_>) -> Result<Counts> {
    cargo_tests(run, "integration", "kind(test)", &["--test", "*"])
}

/// Runs some of the workspace's tests with nextest, or with plain cargo where it is not installed.
fn cargo_tests(run: &mut Run<'_>, step: &str, filter: &str, targets: &[&str]) -> Result<Counts> {
    let mut cargo = run.session.cargo();
    if find_program("cargo-nextest").is_some() {
        cargo.args([
            "nextest",
            "run",
            "--workspace",
            "--locked",
            "--profile",
            "ci",
            "-E",
            filter,
        ]);
    } else {
        cargo
            .args(["test", "--workspace", "--locked", "--no-fail-fast"])
            .args(targets)
            .args(["--", "--show-output"]);
        if step == "integration" {
            cargo.arg("--test-threads=2");
        }
    }
    cargo.env("SPACE_TEST_TEMPLATES", run.data_directory.join("templates"));
    if let Some(built) = &run.built {
        cargo
            .env("SPACE_TEST_DAEMON", &built.daemon)
            .env("SPACE_TEST_SPACE", &built.space);
    }
    counted(run, step, &mut cargo)
}

/// Runs a test runner and counts. A runner that fails without counting a failure has failed itself.
fn counted(run: &Run<'_>, step: &str, command: &mut Command) -> Result<Counts> {
    let ended = run.session.run(step, command);
    if let Err(error) = &ended
        && error.downcast_ref::<Interrupted>().is_some()
    {
        return ended.map(|_| Counts::default());
    }
    let log = std::fs::read(run.session.log_path(step)).unwrap_or_default();
    let counts = Counts::of_log(&String::from_utf8_lossy(&log));
    match (ended, counts) {
        (Ok(finished), None) => bail!("{step} counted no test; its log is {}", finished.log.display()),
        (Ok(_), Some(counts)) => Ok(counts),
        (Err(error), Some(counts)) if counts.failed > 0 => {
            eprintln!("✗ {error:#}");
            Ok(counts)
        }
        (Err(error), _) => Err(error),
    }
}

fn template(run: &mut Run<'_>) -> Result<Counts> {
    let built = run.built.as_ref().context("nothing was built")?;
    platform::ensure_template(run.session, built, &run.data_directory)?;
    Ok(Counts::success())
}

fn up(run: &mut Run<'_>) -> Result<Counts> {
    let built = run.built.as_ref().context("nothing was built")?;
    run.platform = Some(Platform::start(run.session, built, &run.data_directory)?);
    Ok(Counts::success())
}

fn down(run: &mut Run<'_>) -> Result<Counts> {
    run.platform.take().context("it does not run")?.stop()?;
    Ok(Counts::success())
}

fn sdk_python(run: &mut Run<'_>) -> Result<Counts> {
    pytest(run, "sdk-python", "requirements.txt")
}

fn sdk_python_old(run: &mut Run<'_>) -> Result<Counts> {
    pytest(run, "sdk-python-2.45", "requirements-2.45.txt")
}

fn pytest(run: &Run<'_>, step: &str, requirements: &str) -> Result<Counts> {
    let suite = run.session.root().join("tests/sdk/python");
    let python = python::environment(run.session, step, &suite.join(requirements), None)?;
    let mut command = run.session.command(python);
    command.current_dir(&suite).args([
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-rs",
        "--durations=5",
        "--color=no",
    ]);
    platform_of(run)?.tell(&mut command);
    counted(run, step, &mut command)
}

fn sdk_js(run: &mut Run<'_>) -> Result<Counts> {
    let suite = run.session.root().join("tests/sdk/js");
    let node = setup::node_directory(run.session)?;
    let path = std::env::join_paths(std::iter::once(node.clone()).chain(std::env::split_paths(
        &std::env::var_os("PATH").unwrap_or_default(),
    )))?;
    let mut npm = run.session.command("npm");
    npm.current_dir(&suite)
        .env("PATH", &path)
        .args(["ci", "--no-audit", "--no-fund"]);
    run.session.run("npm ci", &mut npm)?;
    let mut command = run.session.command(node.join("node"));
    command.current_dir(&suite).env("PATH", &path);
    command.args([
        "--test",
        "--test-concurrency=1",
        "--test-timeout=180000",
        "--test-reporter=spec",
    ]);
    let mut files: Vec<_> = std::fs::read_dir(suite.join("test"))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.to_string_lossy().ends_with(".test.js"))
        .collect();
    files.sort();
    command.args(files);
    platform_of(run)?.tell(&mut command);
    counted(run, "sdk-js", &mut command)
}

fn humaneval(run: &mut Run<'_>) -> Result<Counts> {
    let python = demo::environment(run.session)?;
    if !demo::humaneval(
        run.session,
        platform_of(run)?,
        &python,
        Some(demo::QUICK),
        4,
        None,
    )? {
        bail!("not every problem ended as it must");
    }
    // Each problem and each control is a check of its own.
    Ok(Counts {
        passed: u64::from(demo::QUICK) * 2,
        ..Counts::default()
    })
}

fn platform_of<'a>(run: &'a Run<'_>) -> Result<&'a Platform> {
    run.platform.as_ref().context("no platform runs")
}

fn bench_smoke(run: &mut Run<'_>) -> Result<Counts> {
    let built = run.built.as_ref().context("nothing was built")?;
    let mut command = bench::create(run.session, built, &run.data_directory)?;
    run.session.run("bench", command.arg("--smoke"))?;
    Ok(Counts::success())
}

/// As many as two minutes have room for; `cargo xtask soak` runs the whole of it.
fn soak(run: &mut Run<'_>) -> Result<Counts> {
    let built = run.built.as_ref().context("nothing was built")?;
    let mut command = bench::soak(run.session, built, &run.data_directory, 40, 6);
    command.args(["--seconds", "100"]);
    run.session.run("soak", &mut command)?;
    Ok(Counts::success())
}
