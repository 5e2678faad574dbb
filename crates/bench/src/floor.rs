//! The restore floor: the same machine, started by the smallest harness there can be.
//!
//! One process spawned with the arguments in `floor.args`, blocking QMP, one hello. No cgroup, no namespace entered, no
//! database, no HTTP, no async runtime: what is left is what QEMU and the guest themselves take.
//!
//! ```text
//!  t0 ── spawn ── QMP: capability, incoming, cont ── HelloAck ─ t answer ── identity ── Ack ─ t ready
//! ```

use std::{
    io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, bail, ensure};
use rand::RngCore as _;
use serde_json::{Value, json};
use space_channel::{
    FrameDecoder, GuestMessage, Hello, HostMessage, Identity, IdentityMode, Nonce, PROTOCOL_MAX, PROTOCOL_MIN,
    Status, frame::MAX_FRAME, message::ENTROPY_LENGTH,
};

use crate::machine::{Layout, TemplateFiles, WorkDirectory};

/// How long anything of a restored machine may take.
const RESTORE_LIMIT: Duration = Duration::from_secs(20);
/// How long a cold boot may take under emulation.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
/// Between two looks for a socket or a state; an eighth of a percent of the floor.
const PAUSE: Duration = Duration::from_micros(60);

/// When a machine had got how far, since just before its process was spawned.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FloorTimes {
    /// The daemon has answered the hello.
    pub(crate) answer: Duration,
    /// It has acknowledged its identity.
    pub(crate) ready: Duration,
}

/// A machine of the floor; killed when it is dropped.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) times: FloorTimes,
    process: Child,
    layout: Layout,
    nonce: Nonce,
    // Held open as long as the machine is used.
    _control: UnixStream,
}

impl Machine {
    /// The nonce of its hello, which opens the data port.
    pub(crate) fn nonce(&self) -> &Nonce {
        &self.nonce
    }

    /// Its data port.
    pub(crate) fn data_socket(&self) -> &Path {
        &self.layout.data
    }

    /// Ends it and removes its files.
    pub(crate) fn end(mut self) -> Result<()> {
        self.process.kill().context("cannot kill a machine of the floor")?;
        self.process.wait().context("cannot wait for a machine of the floor")?;
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Both fail when `end` was called before, and that is fine.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// Starts a machine from the template's snapshot.
pub(crate) fn restore(template: &TemplateFiles, work: &WorkDirectory) -> Result<Machine> {
    let layout = template.prepare(work)?;
    let arguments = template.restore_arguments(&layout)?;
    start(&template.qemu, &arguments, layout, RESTORE_LIMIT, |monitor| {
        monitor.command("migrate-set-capabilities", json!({
            "capabilities": [{"capability": "x-ignore-shared", "state": true}],
        }))?;
        monitor.command("migrate-incoming", json!({"uri": format!("file:{}", template.state.display())}))?;
        monitor.until_loaded()?;
        monitor.command("cont", json!({}))
    })
}

/// Boots the same machine from its kernel.
pub(crate) fn boot(template: &TemplateFiles, work: &WorkDirectory) -> Result<Machine> {
    let layout = template.prepare(work)?;
    let arguments = template.boot_arguments(&layout)?;
    start(&template.qemu, &arguments, layout, BOOT_LIMIT, |_| Ok(()))
}

fn start(
    qemu: &Path,
    arguments: &[String],
    layout: Layout,
    limit: Duration,
    go: impl FnOnce(&mut Monitor) -> Result<()>,
) -> Result<Machine> {
    let log = std::fs::File::create(layout.directory.join("log")).context("cannot make the machine's log")?;
    let nonce = Nonce::random()?;
    let begin = Instant::now();
    let process = Command::new(qemu)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("cannot copy a descriptor")?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot start {}", qemu.display()))?;
    // From here on a failure ends the process through the guard.
    let mut guard = Starting { process: Some(process), log: layout.directory.join("log") };
    let result = (|| {
        let deadline = begin + limit;
        let mut monitor = Monitor::connect(&layout.qmp, deadline)?;
        let mut control = connect(&layout.control, deadline)?;
        control.set_read_timeout(Some(limit)).context("cannot set a time limit")?;
        // Written before the guest runs: it waits in the port, and one wake-up of the guest is saved.
        control.write_all(&hello(&nonce)?).context("cannot write to the control port")?;
        go(&mut monitor)?;
        let mut input = Input { stream: control, decoder: FrameDecoder::new() };
        input.until(|message| match message {
            GuestMessage::HelloAck(ack) if ack.nonce_echo == nonce => Ok(true),
            _ => Ok(false),
        })?;
        let answer = begin.elapsed();
        input.stream.write_all(&identity()?).context("cannot write to the control port")?;
        input.until(|message| match message {
            GuestMessage::Ack { of_sequence: 1, status, .. } => {
                ensure!(status == Status::Ok, "the daemon refused its identity: {status:?}");
                Ok(true)
            }
            _ => Ok(false),
        })?;
        Ok((FloorTimes { answer, ready: begin.elapsed() }, input.stream))
    })();
    match result {
        Ok((times, control)) => {
            let process = guard.process.take().context("the process is gone")?;
            Ok(Machine { times, process, layout, nonce, _control: control })
        }
        Err(error) => {
            let said = std::fs::read(&guard.log).unwrap_or_default();
            Err(error.context(format!("a machine of the floor did not start; it said: {}", String::from_utf8_lossy(&said).trim())))
        }
    }
}

/// A process that is killed unless it is taken out.
struct Starting {
    process: Option<Child>,
    log: PathBuf,
}

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            drop(process.kill());
            drop(process.wait());
        }
    }
}

/// A blocking QMP connection.
struct Monitor {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl Monitor {
    fn connect(socket: &Path, deadline: Instant) -> Result<Self> {
        let writer = connect(socket, deadline)?;
        writer
            .set_read_timeout(Some(deadline.saturating_duration_since(Instant::now())))
            .context("cannot set a time limit")?;
        let reader = BufReader::new(writer.try_clone().context("cannot copy a socket")?);
        let mut monitor = Self { reader, writer };
        monitor.read()?;
        monitor.command("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        let read = self.reader.read_line(&mut line).context("QMP gave no answer")?;
        ensure!(read > 0, "QMP was closed");
        serde_json::from_str(&line).context("QMP gave no JSON")
    }

    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let mut line = json!({"execute": command, "arguments": arguments}).to_string();
        line.push('\n');
        self.writer.write_all(line.as_bytes()).context("cannot write to QMP")?;
        loop {
            let mut answer = self.read()?;
            if let Some(error) = answer.get("error") {
                bail!("QEMU refused {command}: {error}");
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            // Anything else is an event.
        }
    }

    fn command(&mut self, command: &str, arguments: Value) -> Result<()> {
        self.ask(command, arguments).map(drop)
    }

    fn until_loaded(&mut self) -> Result<()> {
        while self.ask("query-status", json!({}))?["status"] == "inmigrate" {
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }
}

/// Messages of the guest.
struct Input {
    stream: UnixStream,
    decoder: FrameDecoder,
}

impl Input {
    fn until(&mut self, mut wanted: impl FnMut(GuestMessage) -> Result<bool>) -> Result<()> {
        let mut buffer = [0; MAX_FRAME];
        loop {
            let read = self.stream.read(&mut buffer).context("the guest gave no answer")?;
            ensure!(read > 0, "the control port was closed");
            let mut input = &buffer[..read];
            while let Some(frame) = self.decoder.next(&mut input) {
                if wanted(GuestMessage::decode(&frame)?)? {
                    return Ok(());
                }
            }
        }
    }
}

fn connect(socket: &Path, deadline: Instant) -> Result<UnixStream> {
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return Ok(stream),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
                ensure!(Instant::now() < deadline, "{} does not appear", socket.display());
                std::thread::sleep(PAUSE);
            }
            Err(error) => return Err(error).with_context(|| format!("cannot connect to {}", socket.display())),
        }
    }
}

fn hello(nonce: &Nonce) -> Result<Vec<u8>> {
    let hello = Hello { protocol_min: PROTOCOL_MIN, protocol_max: PROTOCOL_MAX, nonce: nonce.clone(), generation: 1 };
    let mut frame = Vec::new();
    HostMessage::Hello(hello).encode(0, &mut frame)?;
    Ok(frame)
}

fn identity() -> Result<Vec<u8>> {
    let mut entropy = [0; ENTROPY_LENGTH];
    rand::rng().fill_bytes(&mut entropy);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
    let identity = Identity {
        mode: IdentityMode::New,
        realtime_ns: u64::try_from(now.as_nanos()).context("the clock is after 2500")?,
        entropy,
        generation: 1,
        machine_id: rand::random(),
        boot_id: rand::random(),
        hostname: "floor".to_owned(),
        guest_token: "f".repeat(64),
    };
    let mut frame = Vec::new();
    HostMessage::Identity(Box::new(identity)).encode(1, &mut frame)?;
    Ok(frame)
}
