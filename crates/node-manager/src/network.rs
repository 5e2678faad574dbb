//! Network namespaces with one tap each.
//!
//! A namespace is made on a thread of its own that ends with the act, so no other thread ever changes its namespace.
//! It is kept by a bind mount in `/run/netns`, where `ip netns` shows it and a sweep finds it by name.

use std::{
    collections::BTreeMap,
    ffi::CStr,
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use fs_err as fs;
use rustix::{
    fs::{Mode, OFlags},
    mount::{MountPropagationFlags, UnmountFlags},
    net::{AddressFamily, SocketFlags, SocketType},
    thread::UnshareFlags,
};

use crate::{Network, ObjectName, PrivilegeError, failed};

/// Where namespaces are kept; the place `ip netns` uses.
const DIRECTORY: &str = "/run/netns";

/// Name of the tap inside each namespace.
const TAP: &CStr = c"tap0";

/// Device and inode of a namespace.
type Id = (u64, u64);

/// The namespaces of an installation.
#[derive(Debug)]
pub(crate) struct Networks {
    /// `space-<installation>-`.
    prefix: String,
    /// Those made by this process, so that one is found again without looking at all there are.
    made: Mutex<BTreeMap<Id, ObjectName>>,
}

impl Networks {
    /// Makes [`DIRECTORY`] a shared mount point, so that unmounting a namespace reaches every mount namespace of the host.
    pub(crate) fn new(prefix: String) -> Result<Self, PrivilegeError> {
        fs::create_dir_all(DIRECTORY).map_err(|e| failed("making /run/netns", e))?;
        let shared = MountPropagationFlags::SHARED | MountPropagationFlags::REC;
        if rustix::mount::mount_change(DIRECTORY, shared).is_err() {
            rustix::mount::mount_bind_recursive(DIRECTORY, DIRECTORY)
                .and_then(|()| rustix::mount::mount_change(DIRECTORY, shared))
                .map_err(|e| failed("making /run/netns a shared mount", e))?;
        }
        Ok(Self {
            prefix,
            made: Mutex::default(),
        })
    }

    /// Makes a namespace with its tap up; a leftover of the same name is removed first.
    pub(crate) fn create(&self, name: &ObjectName) -> Result<Network, PrivilegeError> {
        let path = self.path(name.as_str());
        if path.exists() {
            self.delete(name)?;
        }
        let maker = std::thread::Builder::new()
            .name("space-netns".to_owned())
            .stack_size(128 * 1024)
            .spawn(move || {
                let made = create_here(&path);
                if made.is_err() {
                    remove(&path).ok();
                }
                made
            })
            .map_err(|e| failed("starting a thread", e))?;
        let network = maker.join().map_err(|_| {
            failed(
                "making a namespace",
                io::Error::other("the helper thread panicked"),
            )
        })??;
        self.made().insert(id(&network.namespace)?, name.clone());
        Ok(network)
    }

    /// Unmounts and unlinks the namespace; the kernel destroys it once nothing uses it any more.
    pub(crate) fn delete(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        let path = self.path(name.as_str());
        self.made().retain(|_, of| of != name);
        remove(&path).map_err(|e| failed(format!("removing {}", path.display()), e))
    }

    /// Names of all namespaces of the installation.
    pub(crate) fn list(&self) -> Result<Vec<String>, PrivilegeError> {
        let entries = match fs::read_dir(DIRECTORY) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(failed("listing /run/netns", e)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|e| failed("listing /run/netns", e))?;
            let file = entry.file_name();
            if let Some(name) = file.to_str().and_then(|n| n.strip_prefix(&self.prefix)) {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    /// Whether a descriptor is of a namespace of the installation.
    pub(crate) fn holds(&self, namespace: &OwnedFd) -> Result<bool, PrivilegeError> {
        let wanted = id(namespace)?;
        let is = |name: &str| {
            rustix::fs::stat(self.path(name)).is_ok_and(|found| (found.st_dev, found.st_ino) == wanted)
        };
        let known = self.made().get(&wanted).cloned();
        // Looked at all the same: it may have been removed by somebody else.
        if known.is_some_and(|name| is(name.as_str())) {
            return Ok(true);
        }
        // One that an earlier node manager made.
        Ok(self.list()?.iter().any(|name| is(name)))
    }

    fn path(&self, name: &str) -> PathBuf {
        Path::new(DIRECTORY).join(format!("{}{name}", self.prefix))
    }

    fn made(&self) -> MutexGuard<'_, BTreeMap<Id, ObjectName>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn id(namespace: &OwnedFd) -> Result<Id, PrivilegeError> {
    let status = rustix::fs::fstat(namespace).map_err(|e| failed("looking at a network namespace", e))?;
    Ok((status.st_dev, status.st_ino))
}

fn remove(path: &Path) -> io::Result<()> {
    match rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        // Not a mount point: the act that made it was cut short.
        Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => {}
        Err(e) => return Err(e.into()),
    }
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Runs on a thread that ends right after.
fn create_here(path: &PathBuf) -> Result<Network, PrivilegeError> {
    #[expect(
        deprecated,
        reason = "the replacement is unsafe only because of CLONE_FILES, which is not used"
    )]
    rustix::thread::unshare(UnshareFlags::NEWNET).map_err(|e| failed("making a network namespace", e))?;
    let namespace: OwnedFd = fs::File::open("/proc/thread-self/ns/net")
        .map(|file| file.into_parts().0.into())
        .map_err(|e| failed("opening the new network namespace", e))?;
    rustix::fs::open(
        path,
        OFlags::CREATE | OFlags::EXCL | OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .map_err(|e| failed(format!("making {}", path.display()), e))?;
    rustix::mount::mount_bind("/proc/thread-self/ns/net", path)
        .map_err(|e| failed(format!("keeping the network namespace at {}", path.display()), e))?;

    let tap = rustix::fs::open(
        "/dev/net/tun",
        OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .map_err(|e| failed("opening /dev/net/tun", e))?;
    let mut request = interface(TAP, libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR);
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, which lives until after the call. rustix has no wrapper.
    if unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } != 0 {
        return Err(failed("making a tap", io::Error::last_os_error()));
    }

    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .map_err(|e| failed("opening a socket", e))?;
    // The loopback stays down: a monitor speaks to nobody, and setting it up costs a tenth of all this.
    set_up(&socket, TAP)?;
    Ok(Network { namespace, tap })
}

fn set_up(socket: &OwnedFd, name: &CStr) -> Result<(), PrivilegeError> {
    let request = interface(name, libc::IFF_UP | libc::IFF_RUNNING);
    // SAFETY: SIOCSIFFLAGS reads one `ifreq`, which lives until after the call. rustix has no wrapper.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) } != 0 {
        return Err(failed(
            format!("setting {} up", name.to_string_lossy()),
            io::Error::last_os_error(),
        ));
    }
    Ok(())
}

fn interface(name: &CStr, flags: libc::c_int) -> libc::ifreq {
    // SAFETY: `ifreq` is plain data for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.to_bytes()) {
        *to = from.cast_signed();
    }
    #[expect(
        clippy::cast_possible_truncation,
        reason = "all flags in use fit 15 bits, as the structure demands"
    )]
    let flags = flags as libc::c_short;
    request.ifr_ifru.ifru_flags = flags;
    request
}
