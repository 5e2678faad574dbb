//! The command line without a platform: help, wrong use, nobody there.

use std::process::{Command, Output};

fn space(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_space"))
        .args(arguments)
        .env("SPACE_API_KEY", "e2b_0000000000000000000000000000000000000000")
        // Nobody listens on the discard port.
        .env("SPACE_API_URL", "http://127.0.0.1:9")
        .output()
        .expect("space can be run")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn help_of_every_command_is_imperative_and_without_full_stop() {
    let mut waiting: Vec<Vec<String>> = vec![Vec::new()];
    let mut seen = 0;
    while let Some(command) = waiting.pop() {
        let mut arguments: Vec<&str> = command.iter().map(String::as_str).collect();
        arguments.push("--help");
        let output = space(&arguments);
        assert!(output.status.success(), "{command:?}");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        let first = text.lines().next().expect("a first line");
        assert!(!first.ends_with('.'), "{command:?}: {first}");
        seen += 1;
        let commands = text.split("Commands:\n").nth(1).unwrap_or_default();
        for line in commands.lines().take_while(|line| line.starts_with("  ")) {
            let name = line.split_whitespace().next().unwrap_or_default();
            if name != "help" && line.starts_with("  ") && !line.starts_with("   ") {
                waiting.push([command.clone(), vec![name.to_owned()]].concat());
            }
        }
    }
    assert!(seen >= 18, "only {seen} commands have help");
}

#[test]
fn completions_know_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let output = space(&["completion", shell]);
        assert!(output.status.success());
        assert!(
            String::from_utf8_lossy(&output.stdout).contains("doctor"),
            "{shell}"
        );
    }
}

#[test]
fn nobody_there_is_said_with_a_hint() {
    let output = space(&["sandbox", "ls"]);
    assert_eq!(output.status.code(), Some(3));
    let said = stderr(&output);
    assert!(
        said.contains("http://127.0.0.1:9") && said.contains("Hint: start the platform with `space up`"),
        "{said}"
    );
    assert!(said.contains("refused"), "the cause is missing: {said}");
    assert!(output.stdout.is_empty());

    let output = space(&["sandbox", "ls", "--json"]);
    let value: serde_json::Value = serde_json::from_str(stderr(&output).trim()).expect("JSON");
    assert_eq!(value["error"]["kind"], "unreachable");
    assert!(value["error"]["hint"].is_string());
}

#[test]
fn wrong_use_is_exit_code_2() {
    for arguments in [
        &["sandbox", "inspect", "../etc/passwd"][..],
        &["sandbox", "cp", "a", "b"],
        &["run"],
        &["run", "--size", "1x2x3", "--", "true"],
        &["run", "--env", "=x", "--", "true"],
        &["run", "--timeout", "soon", "--", "true"],
        &["sandbox", "rm"],
        &["--api-url", "https://example.com", "sandbox", "ls"],
        &["--api-url", "nonsense", "sandbox", "ls"],
    ] {
        let output = space(arguments);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{arguments:?}: {}",
            stderr(&output)
        );
    }
}

#[test]
fn no_platform_means_run_exits_with_125() {
    let output = space(&["run", "--", "true"]);
    assert_eq!(output.status.code(), Some(125), "{}", stderr(&output));
}

#[test]
fn doctor_answers_in_json_and_by_exit_code() {
    let data = tempfile::tempdir().expect("a directory");
    let output = space(&[
        "doctor",
        "--json",
        "--listen",
        "127.0.0.1:0",
        "--data-dir",
        data.path().to_str().expect("UTF-8"),
    ]);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(output.status.success(), value["ok"].as_bool().expect("a flag"));
    let checks = value["checks"].as_array().expect("a list");
    assert!(checks.len() >= 15, "{checks:?}");
    for check in checks {
        let status = check["status"].as_str().expect("a status");
        assert!(["ok", "warn", "fail"].contains(&status));
        assert_eq!(status == "ok", check["mend"].is_null(), "{check}");
    }
}
