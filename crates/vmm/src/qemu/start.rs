//! Starting a machine.
//!
//! The sockets are made, and connected to, before QEMU runs, so that nothing has to be waited for: what is written
//! to them lies ready when QEMU accepts.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io,
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt;
use serde_json::{Value, json};
use space_node_manager::{View, VmmProcess};
use tokio::{
    net::UnixStream,
    sync::watch,
    time::{Instant, sleep},
};

use super::{
    Shared,
    command_line::{self, CONTROL_FD, DATA_FD, KVM_FD, MONITOR_FD, Start, TAP_FD},
    machine::{self, Inner, Port, QemuMachine, exited},
    memory, qcow2,
    qmp::{COMMAND_LIMIT, Pending, Qmp},
    supervise::{Console, Order, Process, Watched, supervise},
    views::{Sources, views},
};
use crate::{
    MachineRecord, MachineSpec, MachineTemplate, MemoryDelta, StartMode, VmmError, io_error,
    record::hexadecimal,
};

/// Names in the machine's directory.
pub(super) const MONITOR_SOCKET: &str = "monitor.sock";
pub(super) const CONTROL_SOCKET: &str = "control.sock";
pub(super) const DATA_SOCKET: &str = "data.sock";
pub(super) const LOG: &str = "monitor.log";

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
    let Plan {
        arguments,
        views,
        memory,
        private_memory,
        restore,
    } = plan(&shared, &spec, mode, bytes).await?;

    let monitor = Socket::listen(&spec.directory, MONITOR_SOCKET)?;
    let control = Socket::listen(&spec.directory, CONTROL_SOCKET)?;
    let data = Socket::listen(&spec.directory, DATA_SOCKET)?;
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
        let opened = shared.privileges.open_kvm().await;
        let opened = opened.map_err(|source| VmmError::Privilege {
            step: "open /dev/kvm",
            source,
        })?;
        descriptors.insert(KVM_FD, opened);
    }
    let log = spec.directory.join(LOG);
    let log_file = fs::OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(&log)
        .map_err(|e| io_error("open", &log, e))?;
    let process = VmmProcess {
        name: spec.name.clone(),
        program: shared.program.clone(),
        arguments,
        uid: spec.uid,
        network_namespace: Some(spec.network_namespace),
        descriptors,
        log: Some(log_file.into_parts().0.into()),
        // A layer may hold the whole disk and the tables to find it by.
        file_size_limit: bytes.max(disk_size + disk_size / 16) + (64 << 20),
        views,
    };
    let spawned = shared.privileges.spawn(process).await;
    let spawned = spawned.map_err(|source| VmmError::Privilege {
        step: "start the monitor",
        source,
    })?;
    let (order, orders) = watch::channel(Order::None);
    let (tell, exit) = watch::channel(None);
    let console = Arc::new(Console::new(&spec.directory));
    let watched = Watched {
        privileges: shared.privileges.clone(),
        name: spec.name.clone(),
        console: console.clone(),
        log,
        process: Process::new(shared.privileges.clone(), spawned.identity, spawned.exit),
    };
    shared.tasks.spawn(supervise(watched, qmp.clone(), orders, tell));
    let record = MachineRecord {
        name: spec.name,
        uid: spec.uid,
        directory: spec.directory,
        process: spawned.identity,
        executable: hexadecimal(&spawned.executable),
        driver: shared.capabilities.driver.to_owned(),
        version: shared.capabilities.version.clone(),
        memory_file: memory,
        memory_bytes: bytes,
        private_memory,
        disk_layers: spec.disk.into_iter().map(|layer| layer.path).collect(),
        disk_bytes: disk_size,
    };
    // From here on the handle's drop kills the process.
    let machine = QemuMachine {
        inner: Arc::new(Inner {
            shared,
            identity: spawned.identity,
            exit,
            order,
            qmp,
            console,
            record: record.into(),
            freezing: tokio::sync::Mutex::default(),
            control: Port::new(control.path, Some(control.client)),
            data: Port::new(data.path, Some(data.client)),
        }),
    };
    bring_up(&machine.inner, negotiated, looked, restore).await?;
    Ok(machine)
}

/// What differs with the way a machine comes to life.
struct Plan {
    arguments: Vec<OsString>,
    views: Vec<View>,
    memory: PathBuf,
    private_memory: bool,
    /// What is loaded when it stands: pages over the base, and the device state.
    restore: Option<(Option<MemoryDelta>, PathBuf)>,
}

async fn plan(shared: &Shared, spec: &MachineSpec, mode: StartMode, bytes: u64) -> Result<Plan, VmmError> {
    match mode {
        StartMode::Boot { memory } => {
            let tsc_khz = match shared.capabilities.accelerator {
                "tcg" => tsc_khz().await,
                _ => None,
            };
            memory_file(shared, &memory, bytes, spec.uid).await?;
            let start = Start::Boot {
                memory: &memory,
                tsc_khz,
            };
            Ok(Plan {
                arguments: command_line::arguments(&shared.capabilities, spec, &start)?,
                views: views(spec, &Sources::Boot { memory: &memory })?,
                memory,
                private_memory: false,
                restore: None,
            })
        }
        StartMode::Restore { template, delta } => {
            let MachineTemplate { memory, state } = template;
            let length = fs::metadata(&memory)
                .map_err(|e| io_error("read", &memory, e))?
                .len();
            if length != bytes {
                let what = format!("the template's memory is {length} bytes, the machine's {bytes}");
                return Err(VmmError::Unsupported { what });
            }
            let start = Start::Restore {
                memory: &memory,
                state: delta.is_none().then_some(state.as_path()),
            };
            let sources = Sources::Restore {
                memory: &memory,
                state: &state,
            };
            Ok(Plan {
                arguments: command_line::arguments(&shared.capabilities, spec, &start)?,
                views: views(spec, &sources)?,
                memory,
                private_memory: true,
                restore: Some((delta, state)),
            })
        }
    }
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
        let record = inner.record();
        let (file, bytes) = (record.memory_file.clone(), record.memory_bytes);
        machine::blocking(&record.memory_file, move || {
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
    let made = machine::create_new(path).and_then(|file| {
        rustix::fs::ftruncate(&file, bytes)?;
        Ok(file)
    });
    let file = made.map_err(|e| io_error("create the memory file", path, e))?;
    machine::give(shared, file, uid).await
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
