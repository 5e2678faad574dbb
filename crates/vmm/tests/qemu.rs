//! The QEMU driver with real guests. One template is made and shared; each test's machines are its own.

#![expect(clippy::print_stdout, reason = "a skipped test says so")]

mod lab;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use fs_err as fs;
use lab::{Lab, Talk, Wish, digest, end, lab};
use space_node_manager::RecordingPrivileges;
use space_vmm::{AcceleratorChoice, ExitReason, QemuConfig, QemuDriver, StartMode, Vmm, VmmError};

/// A lab for one test, or a loud skip.
macro_rules! lab_or_skip {
    ($name:literal) => {
        match lab(concat!("vmm", $name)).await {
            Ok(lab) => lab,
            Err(error) => {
                println!("SKIPPED: {error:#}");
                return Ok(());
            }
        }
    };
}

/// Boot, template, clones, pause, delta, disk: one after the other on one template, because booting is slow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_life_of_machines() -> Result<()> {
    let lab = lab_or_skip!("life");
    let template = lab.template().await?;
    let files = [
        &template.saved.memory,
        &template.saved.state,
        &template.disk[0].path,
    ];
    let before = files.map(|file| digest(file).expect("readable"));

    clones_answer_and_are_apart(&lab, &template)
        .await
        .context("clones")?;
    pause_and_resume(&lab, &template).await.context("pause")?;
    a_delta_carries_memory_on(&lab, &template)
        .await
        .context("delta")?;
    frozen_layers_hold_what_was_written(&lab, &template)
        .await
        .context("disk")?;
    ports_can_be_opened_again(&lab, &template)
        .await
        .context("ports")?;
    the_monitor_has_no_rights(&lab, &template)
        .await
        .context("rights")?;
    ends_have_reasons(&lab, &template).await.context("ends")?;
    starts_that_cannot_work_leave_nothing(&lab, &template)
        .await
        .context("failing starts")?;

    // Guests that write much do not reach the base files.
    let (running, mut port) = lab.run(&template).await?;
    ensure!(port.ask("fill 90").await? == "filled");
    ensure!(port.ask("scribble 64").await? == "scribbled");
    lab.remove(running).await?;
    ensure!(
        files.map(|file| digest(file).expect("readable")) == before,
        "a base file has changed"
    );
    lab.done().await
}

async fn clones_answer_and_are_apart(lab: &Lab, template: &lab::Template) -> Result<()> {
    let mut clones = Vec::new();
    for number in 0..3 {
        let start = Instant::now();
        let (running, mut port) = lab.run(template).await?;
        ensure!(port.ask(&format!("hello {number}")).await? == format!("hello {number}"));
        println!(
            "clone {number}: start to answer {:?} {:?}",
            start.elapsed(),
            running.steps
        );
        clones.push((running, port));
    }
    for (number, (_, port)) in clones.iter_mut().enumerate() {
        for count in 1..=number + 1 {
            ensure!(port.ask("count").await? == format!("count {count}"));
        }
        ensure!(port.ask("read 3").await? == "text from the template");
        ensure!(port.ask(&format!("write 5 clone {number}")).await? == "written");
        ensure!(port.ask("interfaces").await? == "interfaces eth0 lo");
    }
    for (number, (_, port)) in clones.iter_mut().enumerate() {
        ensure!(port.ask("read 5").await? == format!("text clone {number}"));
    }
    for (running, _) in clones {
        ensure!(running.machine.exit().borrow().is_none());
        lab.remove(running).await?;
    }
    Ok(())
}

async fn pause_and_resume(lab: &Lab, template: &lab::Template) -> Result<()> {
    let (running, mut port) = lab.run(template).await?;
    ensure!(port.ask("hello a").await? == "hello a");
    for _ in 0..2 {
        running.machine.pause().await?;
    }
    port.say("hello b").await?;
    let silent = tokio::time::timeout(Duration::from_millis(300), port.hear()).await;
    ensure!(silent.is_err(), "a paused guest answered: {silent:?}");
    for _ in 0..2 {
        running.machine.resume().await?;
    }
    ensure!(port.ask("hello c").await? == "hello b");
    ensure!(port.hear().await? == "hello c");
    ensure!(port.ask("log needle-on-the-console").await? == "logged");
    let limit = Instant::now() + Duration::from_secs(10);
    while !running.machine.console().await.contains("needle-on-the-console") {
        ensure!(
            Instant::now() < limit,
            "the console: {}",
            running.machine.console().await
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    lab.remove(running).await
}

async fn a_delta_carries_memory_on(lab: &Lab, template: &lab::Template) -> Result<()> {
    let (running, mut port) = lab.run(template).await?;
    ensure!(port.ask("fill 20").await? == "filled");
    let sum = port.ask("sum").await?;
    for count in 1..=3 {
        ensure!(port.ask("count").await? == format!("count {count}"));
    }
    let start = Instant::now();
    running.machine.pause().await?;
    let state = lab.path("delta.state");
    running.machine.save_device_state(&state).await?;
    let delta = running.machine.memory_delta().await?;
    running.machine.resume().await?;
    println!(
        "delta: {} bytes in {} runs, pause {:?}",
        delta.len(),
        delta.runs.len(),
        start.elapsed()
    );
    ensure!(delta.len() >= 20 << 20, "{} bytes", delta.len());
    // The source runs on.
    ensure!(port.ask("count").await? == "count 4");
    lab.remove(running).await?;

    // The disk is not part of this: nothing of it was written.
    let mut snapshot = template.clone();
    fs::set_permissions(&state, std::os::unix::fs::PermissionsExt::from_mode(0o444))?;
    snapshot.saved.state = state;
    let wish = Wish {
        delta: Some(delta),
        ..Wish::default()
    };
    let running = lab.restore(&snapshot, wish).await?;
    let mut port = Talk::control(&running).await?;
    running.machine.resume().await?;
    ensure!(
        port.ask("count").await? == "count 4",
        "the counter goes on where the snapshot was taken"
    );
    ensure!(port.ask("sum").await? == sum);
    lab.remove(running).await
}

async fn frozen_layers_hold_what_was_written(lab: &Lab, template: &lab::Template) -> Result<()> {
    let (running, mut port) = lab.run(template).await?;
    let disks = lab.disks(&running.name)?;
    ensure!(port.ask("write 1 one").await? == "written");
    let mut frozen = Vec::new();
    for (number, text) in ["two", "three"].iter().enumerate() {
        running.machine.pause().await?;
        let start = Instant::now();
        let layer = running
            .machine
            .freeze_disk(&disks.join(format!("freeze-{number}.qcow2")))
            .await?;
        println!("freeze {number}: {:?}", start.elapsed());
        running.machine.resume().await?;
        let path = layer.layer.path;
        frozen.push((path.clone(), digest(&path)?));
        ensure!(port.ask(&format!("write {} {text}", number + 2)).await? == "written");
        ensure!(port.ask("write 1 again").await? == "written");
    }
    ensure!(frozen[0].0 == running.disk);
    for (block, text) in [(1, "again"), (2, "two"), (3, "three")] {
        ensure!(port.ask(&format!("read {block}")).await? == format!("text {text}"));
    }
    for (path, digest_then) in &frozen {
        ensure!(digest(path)? == *digest_then, "{} has changed", path.display());
    }
    // A file that is in the way is an error, and the disk goes on.
    running.machine.pause().await?;
    let taken = running.machine.freeze_disk(&disks.join("freeze-1.qcow2")).await;
    ensure!(matches!(taken, Err(VmmError::Io { .. })), "{taken:?}");
    // Nor can it be switched to where the monitor sees nothing.
    let elsewhere = running.machine.freeze_disk(&lab.path("elsewhere.qcow2")).await;
    ensure!(
        matches!(elsewhere, Err(VmmError::Unsupported { .. })),
        "{elsewhere:?}"
    );
    running.machine.resume().await?;
    ensure!(port.ask("read 2").await? == "text two");
    lab.remove(running).await?;

    // A machine from the first layer alone sees the disk as it was then.
    let mut then = template.clone();
    then.disk.insert(
        0,
        space_vmm::DiskLayer {
            path: frozen[0].0.clone(),
        },
    );
    let (running, mut port) = lab.run(&then).await?;
    for (block, text) in [(1, "one"), (2, ""), (3, "from the template")] {
        let answer = port.ask(&format!("read {block}")).await?;
        ensure!(
            answer.trim_end() == format!("text {text}").trim_end(),
            "{block}: {answer}"
        );
    }
    lab.remove(running).await
}

async fn ports_can_be_opened_again(lab: &Lab, template: &lab::Template) -> Result<()> {
    let (running, mut first) = lab.run(template).await?;
    ensure!(first.ask("count").await? == "count 1");
    let mut data = Talk::data(&running).await?;
    ensure!(data.ask("hello data").await? == "hello data");
    // The earlier stream is still held, and ends.
    let mut second = Talk::control(&running).await?;
    ensure!(second.ask("count").await? == "count 2");
    ensure!(first.hear().await.is_err());
    drop(second);
    let mut third = Talk::control(&running).await?;
    ensure!(third.ask("count").await? == "count 3");
    ensure!(data.ask("hello still").await? == "hello still");
    lab.remove(running).await
}

async fn the_monitor_has_no_rights(lab: &Lab, template: &lab::Template) -> Result<()> {
    let (running, mut port) = lab.run(template).await?;
    ensure!(port.ask("hello a").await? == "hello a");
    let pid = running.machine.process().pid;
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let field = |key: &str| {
        let line = status
            .lines()
            .find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))
            .unwrap_or_default();
        line.split_ascii_whitespace().collect::<Vec<_>>().join(" ")
    };
    let uid = lab::UID.to_string();
    for key in ["Uid", "Gid"] {
        ensure!(field(key) == [uid.as_str(); 4].join(" "), "{status}");
    }
    for key in ["CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb"] {
        ensure!(field(key) == "0000000000000000", "{status}");
    }
    ensure!(field("NoNewPrivs") == "1" && field("Seccomp") == "2", "{status}");
    // Only what it needs is open: nothing of ours, no base file for writing.
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let target = fs::read_link(entry.path())?;
        let flags = fs::read_to_string(format!(
            "/proc/{pid}/fdinfo/{}",
            entry.file_name().to_string_lossy()
        ))?;
        let mode = flags
            .lines()
            .find_map(|l| l.strip_prefix("flags:"))
            .context("flags")?
            .trim()
            .to_owned();
        let writable = u32::from_str_radix(&mode, 8)? & 3 != 0;
        let base = [
            &template.saved.memory,
            &template.saved.state,
            &template.disk[0].path,
            &lab.guest.root,
        ];
        ensure!(
            !(writable && base.iter().any(|b| **b == target)),
            "{} is open for writing",
            target.display()
        );
    }
    lab.remove(running).await
}

async fn ends_have_reasons(lab: &Lab, template: &lab::Template) -> Result<()> {
    for (verb, expected) in [
        ("poweroff", "shutdown"),
        ("reboot", "shutdown"),
        ("panic", "panic"),
    ] {
        let (running, mut port) = lab.run(template).await?;
        port.say(verb).await?;
        match (end(running.machine.as_ref()).await?, expected) {
            (ExitReason::GuestShutdown, "shutdown") => {}
            (ExitReason::GuestPanicked { console }, "panic") => {
                ensure!(console.contains("Kernel panic"), "{console}");
            }
            (reason, _) => anyhow::bail!("{verb}: {reason:?}, console {}", running.machine.console().await),
        }
        let late = running.machine.pause().await;
        ensure!(matches!(late, Err(VmmError::Exited { .. })), "{late:?}");
        ensure!(running.machine.control_port().await.is_err());
        lab.remove(running).await?;
    }

    let (running, _port) = lab.run(template).await?;
    let pid = rustix::process::Pid::from_raw(running.machine.process().pid.cast_signed()).context("pid")?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
    let reason = end(running.machine.as_ref()).await?;
    ensure!(
        matches!(&reason, ExitReason::MonitorFailed { detail } if detail.contains("signal 9")),
        "killed from outside: {reason:?}"
    );
    lab.remove(running).await?;

    let (running, _port) = lab.run(template).await?;
    running.machine.kill().await?;
    running.machine.kill().await?;
    ensure!(end(running.machine.as_ref()).await? == ExitReason::Killed);
    lab.remove(running).await?;

    // Dropping the handle is enough.
    let (running, _port) = lab.run(template).await?;
    let mut exit = running.machine.exit();
    drop(running.machine);
    let reason = tokio::time::timeout(Duration::from_secs(10), exit.wait_for(Option::is_some))
        .await??
        .clone();
    ensure!(reason == Some(ExitReason::Killed), "{reason:?}");

    // A guest that makes its machine take more memory than its group may have.
    let tight = Wish {
        memory_limit: 120 << 20,
        ..Wish::default()
    };
    let running = lab.restore(template, tight).await?;
    let mut port = Talk::control(&running).await?;
    running.machine.resume().await?;
    port.say("fill 150").await?;
    let reason = end(running.machine.as_ref()).await?;
    ensure!(reason == ExitReason::OutOfMemory, "{reason:?}");
    lab.remove(running).await
}

async fn starts_that_cannot_work_leave_nothing(lab: &Lab, template: &lab::Template) -> Result<()> {
    let mut broken = template.clone();
    broken.saved.state = lab.path("broken.state");
    fs::write(&broken.saved.state, "not a device state")?;
    match lab.restore(&broken, Wish::default()).await.map(|r| r.name) {
        Err(error) => {
            let error = error.downcast::<VmmError>()?;
            ensure!(
                matches!(&error, VmmError::Exited { reason: ExitReason::MonitorFailed { detail }, .. }
                    if detail.contains("migration stream")),
                "{error:?}"
            );
        }
        Ok(name) => anyhow::bail!("{name} started from rubbish"),
    }
    let mut wrong_size = template.clone();
    wrong_size.saved.memory = lab.guest.root.clone();
    let refused = lab.restore(&wrong_size, Wish::default()).await.map(|r| r.name);
    ensure!(matches!(
        refused.map_err(|e| e.downcast::<VmmError>()),
        Err(Ok(VmmError::Unsupported { .. }))
    ));

    // A caller that goes away in the middle leaves no process behind.
    for after in [1, 5, 15, 40] {
        let start = lab.restore(template, Wish::default());
        let given_up = tokio::time::timeout(Duration::from_millis(after), start).await;
        drop(given_up);
    }
    let limit = Instant::now() + Duration::from_secs(20);
    while monitors(lab) > 0 {
        ensure!(Instant::now() < limit, "{} monitors are left", monitors(lab));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// Monitors of this lab's machines.
fn monitors(lab: &Lab) -> usize {
    let Ok(entries) = fs::read_dir("/proc") else {
        return 0;
    };
    let directory = lab.directory.to_string_lossy();
    // What has ended, but is not reaped yet, has no command line any more.
    let ours = |pid: &str| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line);
        line.contains("qemu-system") && line.contains(&*directory)
    };
    entries
        .flatten()
        .filter(|e| e.file_name().to_str().is_some_and(ours))
        .count()
}

#[tokio::test]
async fn a_missing_or_old_monitor_is_told_with_what_to_do() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: needs root, whose a monitor must be");
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let probe = async |program: &std::path::Path, accelerator| {
        let config = QemuConfig {
            program: Some(program.to_owned()),
            accelerator,
            ..QemuConfig::default()
        };
        QemuDriver::probe(config, Arc::new(RecordingPrivileges::default())).await
    };
    let fake = |name: &str, words: &str| -> Result<std::path::PathBuf> {
        let path = directory.path().join(name);
        fs::write(&path, format!("#!/bin/sh\necho '{words}'\n"))?;
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        Ok(path)
    };
    let missing = directory.path().join("missing");
    let old = fake("old", "QEMU emulator version 7.2.17 (Debian 1:7.2+dfsg-7)")?;
    let other = fake("other", "something else")?;
    for program in [&missing, &old, &other] {
        match probe(program, AcceleratorChoice::Auto).await {
            Err(VmmError::Unavailable { what }) => ensure!(what.contains("install QEMU 8.2"), "{what}"),
            answer => anyhow::bail!("{}: {answer:?}", program.display()),
        }
    }
    let new = fake("new", "QEMU emulator version 10.0.2 (Debian 1:10.0.2)")?;
    let driver = probe(&new, AcceleratorChoice::Tcg).await?;
    let capabilities = driver.capabilities();
    ensure!(capabilities.version == "10.0.2 (Debian 1:10.0.2)" && capabilities.accelerator == "tcg");
    ensure!(!capabilities.isolates_hostile_code && capabilities.cpu_model == "max");
    Ok(())
}

#[tokio::test]
async fn a_monitor_that_cannot_be_started_is_told() -> Result<()> {
    let lab = lab_or_skip!("none");
    let booted = lab.boot().await?;
    // The memory file is in the way of a second machine.
    ensure!(
        booted.machine.memory_delta().await.is_err(),
        "a booted machine has no base"
    );
    lab.remove(booted).await?;
    let privileges = Arc::new(RecordingPrivileges::default());
    privileges.fail_if(|act| matches!(act, space_node_manager::Act::Spawn { .. }));
    let driver = QemuDriver::probe(QemuConfig::default(), privileges.clone()).await?;
    let directory = lab.path("unstarted");
    fs::create_dir(&directory)?;
    let null = || -> Result<std::os::fd::OwnedFd> { Ok(fs::File::open("/dev/null")?.into_parts().0.into()) };
    let spec = space_vmm::MachineSpec {
        name: space_node_manager::ObjectName::new("unstarted")?,
        uid: lab::UID,
        directory,
        vcpus: 1,
        memory_mib: lab::MEMORY_MIB,
        root: lab.guest.root.clone(),
        disk: vec![space_vmm::DiskLayer {
            path: lab.guest.root.clone(),
        }],
        network_namespace: null()?,
        tap: null()?,
        kernel: lab.guest.kernel.clone(),
        initramfs: lab.guest.initramfs.clone(),
        kernel_arguments: lab::KERNEL_ARGUMENTS.to_owned(),
    };
    let started = driver
        .start(
            spec,
            StartMode::Boot {
                memory: lab.path("unstarted.memory"),
            },
        )
        .await;
    ensure!(matches!(started, Err(VmmError::Privilege { .. })), "{started:?}");
    ensure!(privileges.remaining().processes == 0);
    lab.done().await
}
