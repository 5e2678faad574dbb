//! The restore floor: the same machine, started by the smallest harness there can be.
//!
//! One process spawned with the arguments in `floor.args`, blocking QMP, one hello. No cgroup, no namespace entered, no
//! other user, no database, no HTTP, no async runtime: what is left is what QEMU and the guest themselves take. What the
//! driver does to be quick is done here too: sockets are connected and first messages written before the process runs.
//!
//! ```text
//!  t0 ── spawn ── QMP: greeting, state loaded, cont ── HelloAck ─ t answer ── identity ── Ack ─ t ready
//! ```

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    process::{Child, Command, Stdio},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, bail, ensure};
use rand::RngCore as _;
use serde_json::{Value, json};
use space_channel::{
    FrameDecoder, GuestMessage, Hello, HostMessage, Identity, IdentityMode, Nonce, PROTOCOL_MAX,
    PROTOCOL_MIN, Status, frame::MAX_FRAME, message::ENTROPY_LENGTH,
};

use crate::machine::{Host, Prepared};

/// How long anything of a restored machine may take.
const LIMIT: Duration = Duration::from_secs(20);
/// Between two looks whether the state is loaded.
const PAUSE: Duration = Duration::from_micros(200);

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
pub(crate) struct Floor {
    pub(crate) times: FloorTimes,
    process: Process,
    prepared: Prepared,
    nonce: Nonce,
    input: Input,
    sequence: u32,
}

impl Floor {
    /// Asks the daemon on the control port how it is, and waits for the answer.
    pub(crate) fn ask_health(&mut self) -> Result<()> {
        self.sequence += 1;
        let mut frame = Vec::new();
        HostMessage::Health.encode(self.sequence, &mut frame)?;
        self.input
            .stream
            .write_all(&frame)
            .context("cannot write to the control port")?;
        self.input
            .until(|message| Ok(matches!(message, GuestMessage::HealthAck { .. })))
    }

    /// The nonce of its hello, which opens the data port.
    pub(crate) fn nonce(&self) -> &Nonce {
        &self.nonce
    }

    /// A stream to its data port.
    pub(crate) fn data_port(&self) -> Result<UnixStream> {
        self.prepared
            .data
            .client
            .try_clone()
            .context("cannot copy a socket")
    }

    /// Ends it and removes its files.
    pub(crate) fn end(mut self) -> Result<()> {
        self.process
            .0
            .kill()
            .context("cannot kill a machine of the floor")?;
        self.process
            .0
            .wait()
            .context("cannot wait for a machine of the floor")?;
        Ok(())
    }
}

/// Killed when it is dropped.
#[derive(Debug)]
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail when it has been waited for, and that is fine.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Starts a machine from the template's snapshot.
pub(crate) async fn restore(host: &Host) -> Result<Floor> {
    let prepared = host.prepare().await?;
    let log = prepared.directory.join("log");
    start(prepared).map_err(|error| {
        let said = std::fs::read(&log).unwrap_or_default();
        error.context(format!(
            "a machine of the floor did not start: {}",
            String::from_utf8_lossy(&said).trim()
        ))
    })
}

fn start(prepared: Prepared) -> Result<Floor> {
    let log = fs_err::File::create(prepared.directory.join("log"))?.into_file();
    let nonce = Nonce::random()?;
    let mut monitor = Monitor::new(&prepared.monitor.client)?;
    let control = prepared
        .control
        .client
        .try_clone()
        .context("cannot copy a socket")?;
    control
        .set_read_timeout(Some(LIMIT))
        .context("cannot set a time limit")?;
    let mut input = Input {
        stream: control,
        decoder: FrameDecoder::new(),
    };
    let hello = hello(nonce)?;
    let mut command = Command::new(&prepared.qemu);
    command.args(&prepared.arguments).stdin(Stdio::null());
    command
        .stdout(log.try_clone().context("cannot copy a descriptor")?)
        .stderr(log);

    let begin = Instant::now();
    monitor.write("qmp_capabilities")?;
    monitor.write("query-status")?;
    input
        .stream
        .write_all(&hello)
        .context("cannot write to the control port")?;
    let process = Process(
        command
            .spawn()
            .with_context(|| format!("cannot start {}", prepared.qemu.display()))?,
    );
    monitor.answer("qmp_capabilities")?;
    while monitor.answer("query-status")?["status"] == "inmigrate" {
        std::thread::sleep(PAUSE);
        monitor.write("query-status")?;
    }
    monitor.write("cont")?;
    input.until(|message| Ok(matches!(message, GuestMessage::HelloAck(ack) if ack.nonce_echo == nonce)))?;
    let answer = begin.elapsed();
    input
        .stream
        .write_all(&identity()?)
        .context("cannot write to the control port")?;
    input.until(|message| match message {
        GuestMessage::Ack {
            of_sequence: 1,
            status,
            detail,
        } => {
            ensure!(
                status == Status::Ok,
                "the daemon refused its identity: {status:?} {detail}"
            );
            Ok(true)
        }
        _ => Ok(false),
    })?;
    let times = FloorTimes {
        answer,
        ready: begin.elapsed(),
    };
    Ok(Floor {
        times,
        process,
        prepared,
        nonce,
        input,
        // The identity was message 1.
        sequence: 1,
    })
}

/// A blocking QMP connection.
struct Monitor {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl Monitor {
    fn new(socket: &UnixStream) -> Result<Self> {
        let copy = || socket.try_clone().context("cannot copy a socket");
        socket
            .set_read_timeout(Some(LIMIT))
            .context("cannot set a time limit")?;
        Ok(Self {
            reader: BufReader::new(copy()?),
            writer: copy()?,
        })
    }

    fn write(&mut self, command: &str) -> Result<()> {
        let line = json!({"execute": command}).to_string();
        self.writer
            .write_all(line.as_bytes())
            .context("cannot write to QMP")
    }

    /// The next answer; the greeting and events are passed over.
    fn answer(&mut self, command: &str) -> Result<Value> {
        loop {
            let mut line = String::new();
            let read = self.reader.read_line(&mut line).context("QMP gave no answer")?;
            ensure!(read > 0, "QMP was closed");
            let mut message: Value = serde_json::from_str(&line).context("QMP gave no JSON")?;
            if let Some(error) = message.get("error") {
                bail!("QEMU refused {command}: {error}");
            }
            if let Some(value) = message.get_mut("return") {
                return Ok(value.take());
            }
        }
    }
}

/// Messages of the guest.
#[derive(Debug)]
struct Input {
    stream: UnixStream,
    decoder: FrameDecoder,
}

impl Input {
    fn until(&mut self, mut wanted: impl FnMut(GuestMessage) -> Result<bool>) -> Result<()> {
        let mut buffer = [0; MAX_FRAME];
        loop {
            let read = self
                .stream
                .read(&mut buffer)
                .context("the guest gave no answer")?;
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

fn hello(nonce: Nonce) -> Result<Vec<u8>> {
    let hello = Hello {
        protocol_min: PROTOCOL_MIN,
        protocol_max: PROTOCOL_MAX,
        nonce,
        generation: 1,
    };
    let mut frame = Vec::new();
    HostMessage::Hello(hello).encode(0, &mut frame)?;
    Ok(frame)
}

fn identity() -> Result<Vec<u8>> {
    let mut entropy = [0; ENTROPY_LENGTH];
    rand::rng().fill_bytes(&mut entropy);
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .context("the clock is before 1970")?;
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
