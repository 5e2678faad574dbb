//! Machines that outlive whoever started them, with real guests.

#![expect(dead_code, reason = "the lab holds more than one program uses")]

mod lab;

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use fs_err as fs;
use lab::{Lab, Running, Talk, Template, Wish, end, lab};
use space_node_manager::ObjectName;
use space_vmm::{DiskLayer, ExitReason, MachineRecord, MachineTemplate, QemuDriver, RunState, Vmm, VmmError};

/// Tells the process that owns a machine for a while where to do so.
const OWNER: &str = "SPACE_TEST_OWNER";
/// Of the owner, and of those who take over from it.
const INSTALLATION: &str = "vmmowned";
/// Tells when the owner has got as far as its record, amid what the test's harness prints.
const RECORD: &str = "record: ";

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_outlives_the_process_that_started_it() -> Result<()> {
    let lab = lab_or_skip!("maker");
    let template = lab.template().await?;
    let place = lab.path("owned");
    fs::create_dir(&place)?;
    fs::set_permissions(&place, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let owned = [
        &place,
        &template.saved.memory,
        &template.saved.state,
        &template.disk[0].path,
    ];
    let owned = owned.map(|path| path.display().to_string()).join("\n");
    let mut owner = Command::new(std::env::current_exe()?)
        .args([
            "--exact",
            "owns_a_machine_until_it_is_killed",
            "--ignored",
            "--nocapture",
        ])
        .env(OWNER, owned)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let said = BufReader::new(owner.stdout.take().context("its output")?)
        .lines()
        .map_while(Result::ok)
        .find_map(|line| Some(line.split_once(RECORD)?.1.to_owned()));
    owner.kill()?;
    owner.wait()?;
    let record: MachineRecord = serde_json::from_str(&said.context("the owner failed")?)?;

    // What a manager that dies may leave on the monitor's connection: half a line, and a command without a reader.
    half_a_conversation(&record, br#"{"execute":"qmp_capabilities"}{"execute":"sto"#)?;
    half_a_conversation(
        &record,
        br#"{"execute":"qmp_capabilities"}{"execute":"query-status"}"#,
    )?;

    let next = Lab::at(INSTALLATION, &place).await?;
    let start = Instant::now();
    let machine = next.driver.adopt(record.clone()).await?;
    println!("adopted in {:?}", start.elapsed());
    ensure!(machine.record() == record, "{:?}", machine.record());
    ensure!(machine.status().await? == RunState::Running);
    ensure!(
        machine.console().await.contains("read-by-the-owner"),
        "{}",
        machine.console().await
    );
    let disk = record.disk_layers[0].clone();
    let name = record.name.clone();
    let running = Running {
        machine,
        name,
        disk,
        steps: Vec::new(),
    };

    let mut port = Talk::control(&running).await?;
    ensure!(port.ask("count").await? == "count 2", "the guest ran on");
    ensure!(port.ask("read 1").await? == "text one");
    let mut data = Talk::data(&running).await?;
    ensure!(data.ask("hello data").await? == "hello data");
    ensure!(port.ask("log said-to-the-adopter").await? == "logged");
    ensure!(port.ask("fill 10").await? == "filled");

    running.machine.pause().await?;
    ensure!(running.machine.status().await? == RunState::Paused);
    let delta = running.machine.memory_delta().await?;
    ensure!(delta.len() >= 10 << 20, "{} bytes", delta.len());
    let state = next.path("saved.state");
    running.machine.save_device_state(&state).await?;
    ensure!(fs::metadata(&state)?.len() > 1000, "a device state");
    let top = next.disks(&running.name)?.join("2.qcow2");
    let frozen = running.machine.freeze_disk(&top).await?;
    ensure!(frozen.layer.path == record.disk_layers[0], "{frozen:?}");
    running.machine.resume().await?;
    let layers = running.machine.record().disk_layers;
    ensure!(
        layers[0] == top && layers[1..] == record.disk_layers,
        "{layers:?}"
    );
    ensure!(port.ask("write 2 two").await? == "written");
    ensure!(port.ask("read 1").await? == "text one");
    let console = running.machine.console().await;
    ensure!(
        console.contains("read-by-the-owner") && console.contains("said-to-the-adopter"),
        "{console}"
    );

    let mut exit = running.machine.exit();
    next.remove(running).await?;
    ensure!(exit.wait_for(Option::is_some).await?.as_ref() == Some(&ExitReason::Killed));
    next.done().await?;
    lab.done().await
}

/// Not a test of its own: the process that the test above kills.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "another test runs it, as a process of its own"]
async fn owns_a_machine_until_it_is_killed() -> Result<()> {
    let told = std::env::var(OWNER).context("no test asked for it")?;
    let paths = told.lines().map(PathBuf::from).collect::<Vec<_>>();
    let [place, memory, state, disk] = <[PathBuf; 4]>::try_from(paths).ok().context("four paths")?;
    let lab = Lab::at(INSTALLATION, &place).await?;
    let template = Template {
        saved: MachineTemplate { memory, state },
        disk: vec![DiskLayer { path: disk }],
    };
    let (running, mut port) = lab.run(&template).await?;
    ensure!(port.ask("count").await? == "count 1");
    ensure!(port.ask("write 1 one").await? == "written");
    ensure!(port.ask("log read-by-the-owner").await? == "logged");
    let limit = Instant::now() + Duration::from_secs(20);
    while !running.machine.console().await.contains("read-by-the-owner") {
        ensure!(Instant::now() < limit, "{}", running.machine.console().await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    running.machine.pause().await?;
    let layer = lab.disks(&running.name)?.join("1.qcow2");
    running.machine.freeze_disk(&layer).await?;
    running.machine.resume().await?;
    println!("{RECORD}{}", serde_json::to_string(&running.machine.record())?);
    // Until it is killed.
    let forever = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    forever.await??;
    bail!("the test is gone")
}

/// Letting go, and what may happen while nobody looks: one after the other on one template, because booting is slow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machines_are_let_go_and_taken_over() -> Result<()> {
    let lab = lab_or_skip!("adopt");
    let template = lab.template().await?;
    a_detached_machine_goes_on(&lab, &template)
        .await
        .context("detach")?;
    a_machine_keeps_standing_still(&lab, &template)
        .await
        .context("paused")?;
    another_program_is_left_alone(&lab, &template)
        .await
        .context("another program")?;
    what_happened_meanwhile_is_told(&lab, &template)
        .await
        .context("ends")?;
    a_layer_half_added_is_not_in_the_way(&lab, &template)
        .await
        .context("layers")?;
    lab.done().await
}

/// Lets go of a machine and answers what it is adopted by.
async fn let_go(running: Running) -> Result<MachineRecord> {
    let record = running.machine.record();
    let mut exit = running.machine.exit();
    running.machine.detach();
    ensure!(exit.wait_for(Option::is_some).await.is_err(), "no end is told");
    ensure!(
        running.machine.pause().await.is_err(),
        "it is no longer this handle's"
    );
    ensure!(running.machine.kill().await.is_err());
    ensure!(running.machine.control_port().await.is_err());
    Ok(record)
}

async fn next(lab: &Lab, record: MachineRecord) -> Result<Running> {
    let driver: QemuDriver = lab::driver(Arc::clone(&lab.privileges)).await?;
    let (name, disk) = (record.name.clone(), record.disk_layers[0].clone());
    let machine = driver.adopt(record).await?;
    Ok(Running {
        machine,
        name,
        disk,
        steps: Vec::new(),
    })
}

async fn a_detached_machine_goes_on(lab: &Lab, template: &Template) -> Result<()> {
    let (running, mut port) = lab.run(template).await?;
    ensure!(port.ask("count").await? == "count 1");
    let record = let_go(running).await?;
    ensure!(port.hear().await.is_err(), "the streams are ended too");
    let running = next(lab, record.clone()).await?;
    let mut port = Talk::control(&running).await?;
    ensure!(port.ask("count").await? == "count 2");
    // And once more: who adopts may be adopted from.
    let record_again = let_go(running).await?;
    ensure!(record_again == record);
    let running = next(lab, record).await?;
    let mut port = Talk::control(&running).await?;
    ensure!(port.ask("count").await? == "count 3");
    // Its end is watched like that of a machine one has started oneself.
    let pid = rustix::process::Pid::from_raw(running.machine.process().pid.cast_signed()).context("pid")?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
    let reason = end(running.machine.as_ref()).await?;
    ensure!(matches!(reason, ExitReason::MonitorFailed { .. }), "{reason:?}");
    lab.remove(running).await?;

    // Dropping the handle of an adopted machine ends it, as with any other.
    let (running, _port) = lab.run(template).await?;
    let running = next(lab, let_go(running).await?).await?;
    let mut exit = running.machine.exit();
    drop(running.machine);
    let ended = tokio::time::timeout(Duration::from_secs(10), exit.wait_for(Option::is_some)).await??;
    ensure!(*ended == Some(ExitReason::Killed), "{:?}", *ended);
    drop(ended);
    tidy(lab, &running.name).await
}

async fn a_machine_keeps_standing_still(lab: &Lab, template: &Template) -> Result<()> {
    let (running, mut port) = lab.run(template).await?;
    ensure!(port.ask("count").await? == "count 1");
    running.machine.pause().await?;
    let running = next(lab, let_go(running).await?).await?;
    ensure!(running.machine.status().await? == RunState::Paused);
    let mut port = Talk::control(&running).await?;
    port.say("count").await?;
    let silent = tokio::time::timeout(Duration::from_millis(300), port.hear()).await;
    ensure!(silent.is_err(), "a paused guest answered: {silent:?}");
    running.machine.resume().await?;
    ensure!(port.hear().await? == "count 2");
    lab.remove(running).await?;

    // One that has never run: as it was restored, so it is taken over.
    let restored = lab.restore(template, Wish::default()).await?;
    let running = next(lab, let_go(restored).await?).await?;
    ensure!(running.machine.status().await? == RunState::Paused);
    let mut port = Talk::control(&running).await?;
    running.machine.resume().await?;
    ensure!(port.ask("count").await? == "count 1");
    lab.remove(running).await
}

async fn another_program_is_left_alone(lab: &Lab, template: &Template) -> Result<()> {
    let (running, _port) = lab.run(template).await?;
    let record = let_go(running).await?;
    let wrong = |change: &dyn Fn(&mut MachineRecord)| {
        let mut wrong = record.clone();
        change(&mut wrong);
        wrong
    };
    let mismatches = [
        wrong(&|record| record.executable = "00".repeat(32)),
        wrong(&|record| record.driver = "another".to_owned()),
        wrong(&|record| record.disk_layers = vec!["/elsewhere".into()]),
    ];
    for record in mismatches {
        let refused = next(lab, record).await.map(|running| running.name);
        let error = refused.map_err(|error| error.downcast::<VmmError>());
        ensure!(
            matches!(error, Err(Ok(VmmError::Unadoptable { .. }))),
            "{error:?}"
        );
    }
    // The pid alone is nobody.
    let reused = wrong(&|record| record.process.start_ticks += 1);
    let gone = next(lab, reused).await.map(|running| running.name);
    let error = gone.map_err(|error| error.downcast::<VmmError>());
    ensure!(matches!(error, Err(Ok(VmmError::Exited { .. }))), "{error:?}");

    let running = next(lab, record).await?;
    let mut port = Talk::control(&running).await?;
    ensure!(port.ask("count").await? == "count 1", "nobody has touched it");
    lab.remove(running).await
}

async fn what_happened_meanwhile_is_told(lab: &Lab, template: &Template) -> Result<()> {
    for (verb, expected) in [("poweroff", "shutdown"), ("panic", "panic"), ("", "killed")] {
        let (running, mut port) = lab.run(template).await?;
        let name = running.name.clone();
        let record = if verb.is_empty() {
            let record = let_go(running).await?;
            lab.privileges.kill(record.process).await?;
            record
        } else {
            // The guest's clock stands still from the pause on, so it happens only when nobody looks any more.
            ensure!(port.ask(&format!("soon {verb}")).await? == "soon");
            running.machine.pause().await?;
            let record = let_go(running).await?;
            conversation(&record, &["qmp_capabilities", "cont"], |answers| {
                answers.contains("\"SHUTDOWN\"")
            })?;
            record
        };
        let adopted = next(lab, record.clone()).await.map(|running| running.name);
        let error = adopted.map_err(|error| error.downcast::<VmmError>());
        let Err(Ok(VmmError::Exited { reason, .. })) = &error else {
            bail!("{verb}: {error:?}");
        };
        let right = match reason {
            ExitReason::GuestShutdown => expected == "shutdown",
            ExitReason::GuestPanicked { console } => expected == "panic" && console.contains("Kernel panic"),
            ExitReason::MonitorFailed { .. } => expected == "killed",
            _ => false,
        };
        ensure!(right, "{verb}: {reason:?}");
        let alive = fs::exists(format!("/proc/{}/exe", record.process.pid))?;
        ensure!(!alive || expected == "killed", "an ended machine takes no room");
        tidy(lab, &name).await?;
    }
    Ok(())
}

async fn a_layer_half_added_is_not_in_the_way(lab: &Lab, template: &Template) -> Result<()> {
    let (running, mut port) = lab.run(template).await?;
    ensure!(port.ask("write 1 one").await? == "written");
    let layer = lab.disks(&running.name)?.join("1.qcow2");
    let before = running.machine.record();
    running.machine.pause().await?;
    running.machine.freeze_disk(&layer).await?;
    let after = let_go(running).await?;
    // The owner went away before it could write down that there is another layer: the monitor knows.
    let running = next(lab, before).await?;
    ensure!(
        running.machine.record() == after,
        "{:?}",
        running.machine.record()
    );
    let record = let_go(running).await?;

    // It went away in the middle of adding one.
    let half = lab.disks(&record.name)?.join("half.qcow2");
    lab.driver
        .create_disk_layer(&template.disk[0].path, &half)
        .await?;
    lab.give(&half).await?;
    let node = serde_json::json!({"execute": "blockdev-add", "arguments":
        {"driver": "file", "node-name": "f3", "filename": half}});
    conversation(&record, &["qmp_capabilities", &node.to_string()], |answers| {
        answers.matches("\"return\"").count() == 2
    })?;
    let running = next(lab, record).await?;
    ensure!(running.machine.record().disk_layers == after.disk_layers);
    running
        .machine
        .freeze_disk(&lab.disks(&running.name)?.join("2.qcow2"))
        .await?;
    running.machine.resume().await?;
    let mut port = Talk::control(&running).await?;
    ensure!(port.ask("read 1").await? == "text one");
    lab.remove(running).await
}

async fn tidy(lab: &Lab, name: &ObjectName) -> Result<()> {
    lab.privileges.delete_group(name).await?;
    lab.privileges.delete_network(name).await?;
    Ok(())
}

/// Connects to a monitor, writes, and goes away without reading.
fn half_a_conversation(record: &MachineRecord, bytes: &[u8]) -> Result<()> {
    let mut stream = UnixStream::connect(record.directory.join("monitor.sock"))?;
    // The greeting says that this connection is the one that is listened to.
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut greeting = [0; 16];
    stream.read_exact(&mut greeting)?;
    stream.write_all(bytes)?;
    Ok(())
}

/// Runs commands, each a name or a whole line, and reads until what came back is enough.
fn conversation(record: &MachineRecord, commands: &[&str], enough: impl Fn(&str) -> bool) -> Result<()> {
    let mut stream = UnixStream::connect(record.directory.join("monitor.sock"))?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    for command in commands {
        match command.starts_with('{') {
            true => stream.write_all(command.as_bytes())?,
            false => stream.write_all(format!("{{\"execute\":\"{command}\"}}").as_bytes())?,
        }
    }
    let mut answers = Vec::new();
    while !enough(&String::from_utf8_lossy(&answers)) {
        let mut buffer = [0; 4096];
        match stream
            .read(&mut buffer)
            .with_context(|| String::from_utf8_lossy(&answers).into_owned())?
        {
            0 => bail!("the monitor closed: {}", String::from_utf8_lossy(&answers)),
            read => answers.extend(&buffer[..read]),
        }
    }
    Ok(())
}
