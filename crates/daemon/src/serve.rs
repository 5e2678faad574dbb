//! Starting the threads that serve, and what happens if one of them ends.

use std::{
    io,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use space_daemon_services::{Origin, Services};

use crate::{control::Control, data, data::DataGate, loopback, port::Port, say};

/// Threads of the services runtime that may block on files. Few: they share a small machine with the agent.
const BLOCKING_THREADS: usize = 16;
/// A thread that ends hands its children to the main thread, which would reap them as orphans; see [`crate::reaper`].
const BLOCKING_THREADS_LIVE: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// What is served.
#[derive(Debug)]
pub struct Served {
    /// The control port's side, holding the same gate and services.
    pub control: Control,
    /// The data port.
    pub data: Port,
    /// Port of the loopback service, if there is to be one.
    pub loopback: Option<u16>,
}

/// Starts serving and returns when everything listens. If a thread ends later, the process aborts: as the first process
/// it takes the machine with it, and the host learns it at once.
pub fn start(served: Served) -> io::Result<()> {
    let Served {
        control,
        data,
        loopback,
    } = served;
    let (gate, services) = (Arc::clone(&control.gate), Arc::clone(&control.services));
    let (ready, listening) = mpsc::channel();
    thread::Builder::new().name("services".into()).spawn(move || {
        let _guard = AbortOnEnd("services");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING_THREADS)
            .thread_keep_alive(BLOCKING_THREADS_LIVE)
            .build();
        let error = match runtime {
            Ok(runtime) => runtime.block_on(serve_data(data, gate, services, loopback, ready)),
            Err(error) => error,
        };
        say!("the services ended: {error}");
    })?;
    listening
        .recv()
        .map_err(|_| io::Error::other("the services thread ended"))??;
    thread::Builder::new().name("control".into()).spawn(move || {
        let _guard = AbortOnEnd("control");
        prefer_this_thread();
        say!("the control port ended: {}", control.run());
    })?;
    Ok(())
}

async fn serve_data(
    port: Port,
    gate: Arc<DataGate>,
    services: Arc<Services>,
    loopback: Option<u16>,
    ready: mpsc::Sender<io::Result<()>>,
) -> io::Error {
    let listener = match loopback {
        Some(port) => match loopback::listen(port).await {
            Ok(listener) => Some(listener),
            Err(error) => {
                drop(ready.send(Err(error)));
                return io::Error::other("the loopback service cannot listen");
            }
        },
        None => None,
    };
    drop(ready.send(Ok(())));
    let data = data::serve(port, gate, services.router(Origin::Channel));
    let Some(listener) = listener else {
        return data.await;
    };
    tokio::select! {
        error = data => error,
        () = loopback::serve(listener, services.router(Origin::Loopback)) => {
            io::Error::other("the loopback service ended")
        }
    }
}

/// Of each period the control thread may run for so long before anything else does, nanoseconds. A period is as long as
/// an answer may take. Not all of it, so that a fault here leaves the rest of the machine alive.
const RUNTIME: u64 = 8_000_000;
const PERIOD: u64 = 10_000_000;

/// The first form of `struct sched_attr` of `linux/sched/types.h`.
#[repr(C)]
struct Scheduling {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Lets the calling thread run before all others, so that the host is answered under any load: with a deadline, which comes
/// before every priority that an agent could give its programs, or else with the highest priority.
fn prefer_this_thread() {
    const SCHED_DEADLINE: u32 = 6;
    const SCHED_FLAG_RESET_ON_FORK: u64 = 1;
    const SIZE: u32 = 48;
    const { assert!(size_of::<Scheduling>() == SIZE as usize) };
    let wanted = Scheduling {
        size: SIZE,
        policy: SCHED_DEADLINE,
        flags: SCHED_FLAG_RESET_ON_FORK,
        nice: 0,
        priority: 0,
        runtime: RUNTIME,
        deadline: PERIOD,
        period: PERIOD,
    };
    // SAFETY: the structure has the size it says and lives through the call; 0 is the calling thread.
    if unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const wanted, 0) } == 0 {
        return;
    }
    let parameter = libc::sched_param { sched_priority: 99 };
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: the parameter lives through the call; 0 is the calling thread.
    if unsafe { libc::sched_setscheduler(0, policy, &raw const parameter) } != 0 {
        say!("no priority for the control port: {}", io::Error::last_os_error());
    }
}

/// Ends the process when the thread that holds it ends, whether by return or by panic.
struct AbortOnEnd(&'static str);

impl Drop for AbortOnEnd {
    fn drop(&mut self) {
        say!("the {} thread ended, stopping", self.0);
        std::process::abort();
    }
}
