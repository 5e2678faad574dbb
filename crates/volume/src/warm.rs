//! What is done inside a template's machine before its snapshot: everything a sandbox will do first is done once here,
//! so that its files, directories and libraries are in the guest's memory already; then the recipe's own commands.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, header};
use http_body_util::Full;
use space_channel::Nonce;
use tokio::{net::UnixStream, time::Instant};

use crate::{
    Manifest, VolumeError,
    guest::{Guest, Run},
    machine::guest,
    progress::Part,
};

/// For one command of the warm-up.
const WARM: Duration = Duration::from_secs(120);
/// For one command of the recipe.
const RECIPE: Duration = Duration::from_secs(1800);
/// Between two tries of the ready command.
const RETRY: Duration = Duration::from_millis(200);
/// Who runs what no user asked for.
const USER: &str = "user";

/// The library modules that programs written by agents mostly begin with.
const PYTHON: &str = "import abc, argparse, array, ast, asyncio, base64, bisect, collections, contextlib, copy, csv, \
    dataclasses, datetime, decimal, enum, fractions, functools, glob, hashlib, heapq, inspect, io, itertools, json, \
    logging, math, operator, os, pathlib, pickle, platform, random, re, shutil, signal, socket, statistics, string, \
    struct, subprocess, sys, tempfile, textwrap, threading, time, traceback, typing, unittest, urllib.request, uuid, \
    zlib";

/// A machine with less memory than this keeps in it little of what large programs read; to run them there takes minutes and
/// leaves it worse prepared.
const ROOMY_MIB: u32 = 256;

/// Shell command lines, run as the SDKs run them.
const SHELL: &[&str] = &[
    "true",
    "python3 -c pass",
    "python --version; ls -la / >/dev/null; cat /etc/os-release >/dev/null; mkdir -p /tmp/w && rm -r /tmp/w",
    "id; uname -a; ps aux; env; df -h; free; nproc; date; which python3 node git curl; head -c1 /dev/urandom",
    "cd /tmp && git init -q w && cd w && git status && cd .. && rm -rf w",
    "git --version; curl --version",
    "sudo -n true; grep -r x /etc/hostname; find /home -maxdepth 2; sed -n 1p /etc/passwd; awk 1 /etc/hosts",
    "echo 'print(1)' > /tmp/w.py && python3 /tmp/w.py; rm -f /tmp/w.py",
];

/// The same, in machines that have the room.
const ROOMY: &[&str] = &[
    "node -e 'require(\"fs\"); require(\"http\"); console.log(1)'",
    "python3 -m pip --version",
];

/// Warms the machine up and carries out the recipe. The data session ends with this.
pub(crate) async fn warm_up(
    stream: UnixStream,
    nonce: &Nonce,
    manifest: &Manifest,
    memory_mib: u32,
    part: &Part,
) -> Result<(), VolumeError> {
    let session = Guest::open(stream, nonce).await?;
    let environment = serde_json::to_value(&manifest.environment)
        .map_err(|error| guest("take its environment")(error.to_string()))?;
    session.set_environment(&environment).await?;
    for (fraction, uri) in [(0.26, "/health"), (0.27, "/metrics"), (0.28, "/envs")] {
        part.report("warming the machine up", fraction);
        session.request(get(uri)?).await?;
    }
    warm_files(&session).await?;
    warm_tunnel(&session).await?;

    let python = format!("python3 -c '{PYTHON}'");
    let roomy = if memory_mib < ROOMY_MIB { &[] } else { ROOMY };
    let lines = [SHELL, roomy, &[python.as_str()]].concat();
    let mut fraction = 0.3;
    let share = 0.3 / as_fraction(lines.len());
    shell_quietly(&session, "root", "true").await?;
    for line in &lines {
        part.report("warming the machine up", fraction);
        shell_quietly(&session, USER, line).await?;
        fraction += share;
    }

    let share = 0.15 / as_fraction(manifest.run.len().max(1));
    for (at, command) in manifest.run.iter().enumerate() {
        part.report("running the recipe's commands", 0.6 + share * as_fraction(at));
        let ended = session
            .run(&shell("root", &["-l", "-c", command]), RECIPE)
            .await?;
        if ended.code != 0 {
            return Err(guest(format!("run `{}`", shortened(command)))(format!(
                "exit code {}: {}",
                ended.code, ended.tail
            )));
        }
    }
    if let Some(start) = &manifest.start {
        part.report("starting the recipe's command", 0.76);
        session
            .leave_running(&shell(&start.user, &["-l", "-c", &start.command]))
            .await?;
    }
    if let Some(ready) = &manifest.ready {
        part.report("waiting for the recipe's ready command", 0.78);
        until_ready(&session, &ready.command, ready.deadline()).await?;
    }
    Ok(())
}

/// The paths that the SDKs' `files` take.
async fn warm_files(session: &Guest) -> Result<(), VolumeError> {
    const FILE: &str = "/files?path=/tmp/.space-warm&username=user";
    const BOUNDARY: &str = "space-warm";
    let body = format!(
        "--{BOUNDARY}\r\ncontent-disposition: form-data; name=\"file\"; filename=\"w\"\r\n\
         content-type: application/octet-stream\r\n\r\nwarm\r\n--{BOUNDARY}--\r\n"
    );
    let write = Request::post(format!("http://guest{FILE}"))
        .header(
            header::CONTENT_TYPE,
            format!("multipart/form-data; boundary={BOUNDARY}"),
        )
        .body(Full::from(body))
        .map_err(|error| guest("take a file")(error.to_string()))?;
    quietly("write a file", session.request(write).await)?;
    quietly("read a file", session.request(get(FILE)?).await)?;
    for (call, body) in [
        ("Stat", r#"{"path":"/tmp/.space-warm"}"#),
        ("ListDir", r#"{"path":"/home/user","depth":1}"#),
        ("Remove", r#"{"path":"/tmp/.space-warm"}"#),
    ] {
        let request = Request::post(format!("http://guest/filesystem.Filesystem/{call}"))
            .header(header::CONTENT_TYPE, "application/json")
            .header("connect-protocol-version", "1")
            .body(Full::from(body))
            .map_err(|error| guest("answer a file call")(error.to_string()))?;
        quietly(call, session.request(request).await)?;
    }
    Ok(())
}

/// A tunnel to a port where nobody listens.
async fn warm_tunnel(session: &Guest) -> Result<(), VolumeError> {
    let request = Request::builder()
        .method(Method::CONNECT)
        .uri("127.0.0.1:1")
        .body(Full::default())
        .map_err(|error| guest("refuse a tunnel")(error.to_string()))?;
    quietly("tunnel", session.request(request).await)
}

/// A small image may lack what is tried; only a broken session ends the build.
async fn shell_quietly(session: &Guest, user: &str, line: &str) -> Result<(), VolumeError> {
    let began = Instant::now();
    match session.run(&shell(user, &["-l", "-c", line]), WARM).await {
        Ok(ended) => {
            let took = began.elapsed().as_millis();
            tracing::debug!(
                user,
                line = shortened(line),
                code = ended.code,
                took,
                tail = ended.tail,
                "warmed"
            );
            Ok(())
        }
        Err(VolumeError::Guest { step, what }) => {
            tracing::info!(
                user,
                line = shortened(line),
                step,
                what,
                "a warm-up command was left out"
            );
            // Tells a command that could not be started from a daemon that is gone.
            session.request(get("/health")?).await.map(drop)
        }
        Err(error) => Err(error),
    }
}

async fn until_ready(session: &Guest, command: &str, limit: Duration) -> Result<(), VolumeError> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let ended = session.run(&shell(USER, &["-l", "-c", command]), left).await?;
        if ended.code == 0 {
            return Ok(());
        }
        if Instant::now() + RETRY >= deadline {
            return Err(guest("become ready")(format!(
                "`{}` still fails after {} s with exit code {}: {}",
                shortened(command),
                limit.as_secs(),
                ended.code,
                ended.tail
            )));
        }
        tokio::time::sleep(RETRY).await;
    }
}

fn quietly<T>(what: &str, outcome: Result<(http::StatusCode, T), VolumeError>) -> Result<(), VolumeError> {
    let (status, _) = outcome?;
    tracing::debug!(what, %status, "warmed");
    Ok(())
}

fn get(path: &str) -> Result<Request<Full<Bytes>>, VolumeError> {
    Request::get(format!("http://guest{path}"))
        .body(Full::default())
        .map_err(|error| guest("take a request")(error.to_string()))
}

fn shell<'a>(user: &'a str, arguments: &'a [&'a str]) -> Run<'a> {
    Run {
        user,
        program: "/bin/bash",
        arguments,
    }
}

fn shortened(command: &str) -> &str {
    let end = command
        .char_indices()
        .nth(120)
        .map_or(command.len(), |(at, _)| at);
    &command[..end]
}

fn as_fraction(count: usize) -> f32 {
    f32::from(u16::try_from(count).unwrap_or(u16::MAX))
}
