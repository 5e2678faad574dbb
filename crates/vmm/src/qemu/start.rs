//! Starting a machine.
//!
//! The sockets are made, and connected to, before QEMU runs, so that nothing has to be waited for: what is written
//! to them lies ready when QEMU accepts.

use std::{
    collections::BTreeMap,
    io,
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use fs_err as fs;
use serde_json::{Value, json};
use space_node_manager::VmmProcess;
use tokio::{
    net::UnixStream,
    sync::watch,
    time::{Instant, sleep},
};

use super::{
    Shared,
    command_line::{self, CONTROL_FD, DATA_FD, KVM_FD, MONITOR_FD, Start, TAP_FD},
    machine::{self, Disk, Inner, Memory, Port, QemuMachine, exited},
    memory, qcow2,
    qmp::{COMMAND_LIMIT, Pending, Qmp},
    supervise::{Console, Watched, supervise},
};
use crate::{MachineSpec, MemoryDelta, StartMode, VmmError, io_error};

/// Longest path of a machine's directory, bytes: a socket's path has 107.
const LONGEST_DIRECTORY: usize = 80;

/// vCPUs and MiB that a machine may have.
const VCPUS: std::ops::RangeInclusive<u32> = 1..=64;
const MEMORY_MIB: std::ops::RangeInclusive<u32> = 64..=1_048_576;

/// First pause between two looks at whether the state is loaded.
const LOOK_AGAIN: Duration = Duration::from_micros(500);

pub(super) async fn start(
    shared: Arc<Shared>,
    spec: MachineSpec,
    mode: StartMode,
) -> Result<QemuMachine, VmmError> {
    check(&spec)?;
    let bytes = u64::from(spec.memory_mib) << 20;
    let disk_size = match spec.disk.last() {
        Some(base) => qcow2::virtual_size(&base.path)?,
        None => 0,
    };
    let tsc_khz = match &mode {
        StartMode::Boot { .. } if shared.capabilities.accelerator == "tcg" => Some(tsc_khz().await),
        _ => None,
    };
    let (line, memory, delta) = match mode {
        StartMode::Boot { memory } => {
            memory_file(&shared, &memory, bytes, spec.uid).await?;
            let start = Start::Boot {
                memory: &memory,
                tsc_khz: tsc_khz.flatten(),
            };
            let line = command_line::arguments(&shared.capabilities, &spec, &start)?;
            (
                line,
                Memory {
                    file: memory,
                    bytes,
                    private: false,
                },
                None,
            )
        }
        StartMode::Restore { template, delta } => {
            let length = fs::metadata(&template.memory)
                .map_err(|e| io_error("read", &template.memory, e))?
                .len();
            if length != bytes {
                let what = format!("the template's memory is {length} bytes, the machine's {bytes}");
                return Err(VmmError::Unsupported { what });
            }
            let state = delta.is_none().then_some(template.state.as_path());
            let start = Start::Restore {
                memory: &template.memory,
                state,
            };
            let line = command_line::arguments(&shared.capabilities, &spec, &start)?;
            let memory = Memory {
                file: template.memory,
                bytes,
                private: true,
            };
            (line, memory, Some((delta, template.state)))
        }
    };

    let monitor = Socket::listen(&spec.directory, "monitor.sock")?;
    let control = Socket::listen(&spec.directory, "control.sock")?;
    let data = Socket::listen(&spec.directory, "data.sock")?;
    let qmp = Qmp::new(monitor.client, &shared.tasks);
    // QEMU finds these waiting. An answer to the first says that the machine exists and its memory is mapped.
    let negotiated = qmp.send("qmp_capabilities", Value::Null).await;
    let looked = qmp.send("query-status", Value::Null).await;

    let mut descriptors = BTreeMap::from([
        (MONITOR_FD, monitor.listener),
        (CONTROL_FD, control.listener),
        (DATA_FD, data.listener),
        (TAP_FD, spec.tap),
    ]);
    if shared.capabilities.accelerator == "kvm" {
        descriptors.insert(KVM_FD, open_kvm()?);
    }
    let log = spec.directory.join("monitor.log");
    let process = VmmProcess {
        name: spec.name.clone(),
        program: shared.program.clone(),
        arguments: line,
        uid: spec.uid,
        network_namespace: Some(spec.network_namespace),
        descriptors,
        log: Some(log.clone()),
        // A layer may hold the whole disk and the tables to find it by.
        file_size_limit: bytes.max(disk_size + disk_size / 16) + (64 << 20),
    };
    let spawned = shared.privileges.spawn(process).await;
    let spawned = spawned.map_err(|source| VmmError::Privilege {
        step: "start the monitor",
        source,
    })?;
    let (kill, kill_asked) = watch::channel(false);
    let (tell, exit) = watch::channel(None);
    let console = Arc::new(Console::default());
    let watched = Watched {
        privileges: shared.privileges.clone(),
        name: spec.name.clone(),
        identity: spawned.identity,
        qmp: qmp.clone(),
        console: console.clone(),
        log,
    };
    shared
        .tasks
        .spawn(supervise(watched, spawned.exit, kill_asked, tell));
    let layers = spec.disk.len();
    let top = spec
        .disk
        .into_iter()
        .next()
        .map(|layer| layer.path)
        .unwrap_or_default();
    // From here on the handle's drop kills the process.
    let machine = QemuMachine {
        inner: Arc::new(Inner {
            shared,
            uid: spec.uid,
            identity: spawned.identity,
            exit,
            kill,
            qmp,
            console,
            memory,
            disk: tokio::sync::Mutex::new(Disk {
                top,
                layers,
                size: disk_size,
            }),
            control: Port::new(control.path, control.client),
            data: Port::new(data.path, data.client),
        }),
    };
    bring_up(&machine.inner, negotiated, looked, delta).await?;
    Ok(machine)
}

/// Waits until a booting machine runs, or a restored one has loaded its state and stands still.
async fn bring_up(
    inner: &Inner,
    negotiated: Pending,
    looked: Pending,
    restore: Option<(Option<MemoryDelta>, PathBuf)>,
) -> Result<(), VmmError> {
    let step = "starting";
    inner.answer(step, "qmp_capabilities", negotiated).await?;
    let Some((delta, state)) = restore else {
        return inner.answer(step, "query-status", looked).await.map(drop);
    };
    let mut looked = Some(looked);
    if let Some(delta) = delta {
        // Before the state is loaded: the devices look into the memory when they are.
        let opened = machine::open_memory(inner).await?;
        let (file, bytes) = (inner.memory.file.clone(), inner.memory.bytes);
        machine::blocking(&inner.memory.file, move || {
            memory::write_delta(opened, &file, bytes, &delta)
        })
        .await?;
        let uri = format!("file:{}", command_line::incoming_path(&state)?);
        inner
            .run("loading its state", "migrate-incoming", json!({ "uri": uri }))
            .await?;
        looked = None;
    }
    let give_up = Instant::now() + COMMAND_LIMIT;
    let mut pause = LOOK_AGAIN;
    loop {
        let pending = match looked.take() {
            Some(pending) => pending,
            None => inner.qmp.send("query-status", Value::Null).await,
        };
        let answer = inner.answer("loading its state", "query-status", pending).await?;
        match answer.get("status").and_then(Value::as_str) {
            Some("inmigrate") if Instant::now() < give_up => {
                sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(10));
            }
            Some("inmigrate") => {
                let command = "the loading of its state".to_owned();
                return Err(VmmError::TimedOut {
                    command,
                    seconds: COMMAND_LIMIT.as_secs(),
                });
            }
            Some("paused" | "prelaunch") => return Ok(()),
            status => {
                if let Some(reason) = inner.exit.borrow().as_ref() {
                    return Err(exited("loading its state", Some(reason)));
                }
                let answer = format!("status {status:?} after loading");
                return Err(VmmError::Refused {
                    command: "migrate-incoming".to_owned(),
                    answer,
                });
            }
        }
    }
}

fn check(spec: &MachineSpec) -> Result<(), VmmError> {
    let what = if spec.directory.as_os_str().len() > LONGEST_DIRECTORY {
        format!(
            "the path {} is longer than {LONGEST_DIRECTORY} bytes",
            spec.directory.display()
        )
    } else if !VCPUS.contains(&spec.vcpus) || !MEMORY_MIB.contains(&spec.memory_mib) {
        format!(
            "a machine with {} vCPUs and {} MiB cannot be made",
            spec.vcpus, spec.memory_mib
        )
    } else {
        return Ok(());
    };
    Err(VmmError::Unsupported { what })
}

/// Makes the memory file of a booting machine: sparse, and the monitor's for now.
async fn memory_file(shared: &Shared, path: &Path, bytes: u64, uid: u32) -> Result<(), VmmError> {
    let made = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .and_then(|f| f.set_len(bytes));
    made.map_err(|e| io_error("create the memory file", path, e))?;
    let given = shared.privileges.give_file(path, uid).await;
    given.map_err(|source| VmmError::Privilege {
        step: "give the memory file to the monitor",
        source,
    })
}

fn open_kvm() -> Result<OwnedFd, VmmError> {
    let path = Path::new("/dev/kvm");
    let opened = fs::OpenOptions::new().read(true).write(true).open(path);
    opened
        .map(|file| file.into_parts().0.into())
        .map_err(|e| io_error("open", path, e))
}

/// A listening socket, and a client that waits to be accepted.
struct Socket {
    path: PathBuf,
    listener: OwnedFd,
    client: UnixStream,
}

impl Socket {
    fn listen(directory: &Path, name: &str) -> Result<Self, VmmError> {
        let path = directory.join(name);
        let listen = || -> io::Result<_> {
            let listener = UnixListener::bind(&path)?;
            let client = machine::connect(&path)?;
            Ok((listener.into(), client))
        };
        let (listener, client) = listen().map_err(|e| io_error("listen on", &path, e))?;
        Ok(Self {
            path,
            listener,
            client,
        })
    }
}

/// Rate of the time stamp counter, kHz, which emulated guests see as it is.
///
/// Such a guest measures it against the timer at boot, fails to on a busy host, and then has no working timer at
/// all (its ACPI promises no other): it hangs. So it is told.
async fn tsc_khz() -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    {
        let sample = || {
            // SAFETY: reads a counter; every x86-64 CPU has it. There is no safe wrapper in std.
            let ticks = unsafe { core::arch::x86_64::_rdtsc() };
            (std::time::Instant::now(), ticks)
        };
        let (before, first) = sample();
        sleep(Duration::from_millis(50)).await;
        let (after, last) = sample();
        let nanoseconds = u64::try_from((after - before).as_nanos()).ok()?;
        let khz = u128::from(last.checked_sub(first)?) * 1_000_000 / u128::from(nanoseconds.max(1));
        u64::try_from(khz).ok()
    }
    #[cfg(not(target_arch = "x86_64"))]
    None
}
