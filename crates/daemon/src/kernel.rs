//! What the daemon asks of the kernel on the host's behalf, behind a trait so that the protocol is tested without a guest.

use std::{
    fs::File,
    io,
    os::fd::AsRawFd,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use rustix::{
    system::{RebootCommand, reboot, sethostname},
    time::{ClockId, Timespec, clock_gettime, clock_settime},
};
use space_channel::message::ENTROPY_LENGTH;

/// The kernel as the control thread sees it.
pub trait Kernel: Send + Sync {
    /// Sets the clock, in nanoseconds since 1970.
    fn set_clock(&self, realtime_ns: u64) -> io::Result<()>;
    /// Mixes random bytes into the generator, credits them, and has it draw a new key from them at once.
    fn reseed(&self, entropy: &[u8; ENTROPY_LENGTH]) -> io::Result<()>;
    /// Sets the host name.
    fn set_hostname(&self, name: &str) -> io::Result<()>;
    /// Writes everything to disk.
    fn sync(&self);
    /// Ends the machine. Returns only if that fails.
    fn power_off(&self) -> io::Error;
    /// Time since the start.
    fn uptime(&self) -> Duration;
}

/// The real one.
#[derive(Debug)]
pub struct Linux {
    random: File,
}

/// Argument of `RNDADDENTROPY`: `struct rand_pool_info` of `linux/random.h`.
#[repr(C)]
struct Pool {
    entropy_bits: libc::c_int,
    bytes: libc::c_int,
    data: [u8; ENTROPY_LENGTH],
}

const RNDADDENTROPY: libc::Ioctl = 0x4008_5203;
const RNDRESEEDCRNG: libc::Ioctl = 0x5207;

impl Linux {
    /// Opens what later calls need, so that they are short.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            random: File::options().read(true).write(true).open("/dev/urandom")?,
        })
    }
}

impl Kernel for Linux {
    fn set_clock(&self, realtime_ns: u64) -> io::Result<()> {
        let out_of_range = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let time = Timespec {
            tv_sec: i64::try_from(realtime_ns / 1_000_000_000).map_err(out_of_range)?,
            tv_nsec: i64::try_from(realtime_ns % 1_000_000_000).map_err(out_of_range)?,
        };
        Ok(clock_settime(ClockId::Realtime, time)?)
    }

    fn reseed(&self, entropy: &[u8; ENTROPY_LENGTH]) -> io::Result<()> {
        const BYTES: i32 = 64;
        const { assert!(BYTES.unsigned_abs() as usize == ENTROPY_LENGTH) };
        let pool = Pool {
            entropy_bits: 8 * BYTES,
            bytes: BYTES,
            data: *entropy,
        };
        let descriptor = self.random.as_raw_fd();
        // SAFETY: the argument is a rand_pool_info whose buffer has the length it says, alive through the call.
        if unsafe { libc::ioctl(descriptor, RNDADDENTROPY, &raw const pool) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: this request takes no argument.
        match unsafe { libc::ioctl(descriptor, RNDRESEEDCRNG) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn set_hostname(&self, name: &str) -> io::Result<()> {
        Ok(sethostname(name.as_bytes())?)
    }

    fn sync(&self) {
        rustix::fs::sync();
    }

    fn power_off(&self) -> io::Error {
        // Not every machine type has a power switch; all have a reset, which the host's monitor takes for the end too.
        for command in [RebootCommand::PowerOff, RebootCommand::Restart] {
            if let Err(error) = reboot(command) {
                return error.into();
            }
        }
        io::Error::other("the machine runs on after a reset")
    }

    fn uptime(&self) -> Duration {
        let now = clock_gettime(ClockId::Boottime);
        Duration::new(
            u64::try_from(now.tv_sec).unwrap_or_default(),
            u32::try_from(now.tv_nsec).unwrap_or_default(),
        )
    }
}

/// One that only notes what was asked.
#[derive(Debug, Default)]
pub struct Recording {
    calls: Mutex<Vec<String>>,
}

impl Recording {
    /// What was asked so far, in order.
    pub fn calls(&self) -> Vec<String> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, call: String) {
        self.calls
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(call);
    }
}

impl Kernel for Recording {
    fn set_clock(&self, realtime_ns: u64) -> io::Result<()> {
        self.note(format!("clock {realtime_ns}"));
        Ok(())
    }

    fn reseed(&self, entropy: &[u8; ENTROPY_LENGTH]) -> io::Result<()> {
        self.note(format!("reseed {}", entropy[0]));
        Ok(())
    }

    fn set_hostname(&self, name: &str) -> io::Result<()> {
        self.note(format!("hostname {name}"));
        Ok(())
    }

    fn sync(&self) {
        self.note("sync".into());
    }

    fn power_off(&self) -> io::Error {
        self.note("power off".into());
        io::Error::from(io::ErrorKind::Unsupported)
    }

    fn uptime(&self) -> Duration {
        Duration::from_secs(1)
    }
}
