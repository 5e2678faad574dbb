//! The guest's file systems: from the initramfs to the overlay root.
//!
//! ```text
//!  /dev/vda (erofs, shared by all sandboxes) ─► /lower ┐
//!  /dev/vdb (ext4, this sandbox's own) ───────► /rw    ┴─ overlay ─► /newroot ─► /
//! ```

use std::{
    fs::{self, File, Permissions},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    mount::{MountFlags, UnmountFlags, mount, mount_bind, mount_move, unmount},
    process::{chdir, chroot},
};

/// How long the disks may take to appear.
const DISK_LIMIT: Duration = Duration::from_secs(20);
/// Where ext4 keeps its magic number, and the number.
const EXT4_MAGIC: (u64, [u8; 2]) = (1024 + 56, [0x53, 0xef]);

/// Why the root could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// A mount was refused.
    #[error("cannot mount {what}: {source}")]
    Mount {
        /// Where or what.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A disk did not appear.
    #[error("{device} did not appear within {} s: is it among the machine's disks?", DISK_LIMIT.as_secs())]
    NoDisk {
        /// Its name.
        device: &'static str,
    },
    /// The writable disk has no file system that fits.
    #[error("{device} holds no ext4 file system: make it with mkfs.ext4 -O ^has_journal")]
    NotExt4 {
        /// Its name.
        device: &'static str,
    },
    /// Anything else.
    #[error("cannot {step}: {source}")]
    Io {
        /// What was tried.
        step: &'static str,
        /// Why.
        source: io::Error,
    },
}

fn mounting(what: &'static str) -> impl Fn(rustix::io::Errno) -> MountError {
    move |source| MountError::Mount {
        what,
        source: source.into(),
    }
}

fn step(step: &'static str) -> impl Fn(io::Error) -> MountError {
    move |source| MountError::Io { step, source }
}

/// Mounts what every step needs: `/proc`, `/sys`, `/dev`, `/run`.
pub fn early() -> Result<(), MountError> {
    for directory in ["/proc", "/sys", "/dev", "/run"] {
        fs::create_dir_all(directory).map_err(step("make a mount point in the initramfs"))?;
    }
    let hardened = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("proc", "/proc", "proc", hardened, None).map_err(mounting("/proc"))?;
    mount("sysfs", "/sys", "sysfs", hardened, None).map_err(mounting("/sys"))?;
    mount(
        "devtmpfs",
        "/dev",
        "devtmpfs",
        MountFlags::NOSUID | MountFlags::NOEXEC,
        c"mode=0755",
    )
    .map_err(mounting("/dev"))?;
    mount(
        "tmpfs",
        "/run",
        "tmpfs",
        MountFlags::NOSUID | MountFlags::NODEV,
        c"mode=0755,size=20%",
    )
    .map_err(mounting("/run"))
}

/// Joins the two disks and makes the result the root; what the initramfs held is freed.
pub fn switch_root() -> Result<(), MountError> {
    for device in ["/dev/vda", "/dev/vdb"] {
        wait_for(device)?;
    }
    if !is_ext4("/dev/vdb").map_err(step("read /dev/vdb"))? {
        return Err(MountError::NotExt4 { device: "/dev/vdb" });
    }
    for directory in ["/lower", "/rw", "/newroot"] {
        fs::create_dir_all(directory).map_err(step("make a mount point in the initramfs"))?;
    }
    mount("/dev/vda", "/lower", "erofs", MountFlags::RDONLY, None).map_err(mounting("the root image"))?;
    mount("/dev/vdb", "/rw", "ext4", MountFlags::NOATIME, None).map_err(mounting("the writable disk"))?;
    for directory in ["/rw/upper", "/rw/work"] {
        fs::create_dir_all(directory).map_err(step("make the overlay's directories"))?;
        fs::set_permissions(directory, Permissions::from_mode(0o755))
            .map_err(step("make the overlay's directories"))?;
    }
    let overlay = c"lowerdir=/lower,upperdir=/rw/upper,workdir=/rw/work,redirect_dir=on,index=off,xino=off";
    mount(
        "overlay",
        "/newroot",
        "overlay",
        MountFlags::NOATIME,
        Some(overlay),
    )
    .map_err(mounting("the overlay of both disks"))?;
    // The overlay holds both by itself; nobody inside shall write to its layers.
    unmount("/lower", UnmountFlags::DETACH).map_err(mounting("the root image"))?;
    unmount("/rw", UnmountFlags::DETACH).map_err(mounting("the writable disk"))?;

    for (from, to) in [
        ("/proc", "proc"),
        ("/sys", "sys"),
        ("/dev", "dev"),
        ("/run", "run"),
    ] {
        let to = Path::new("/newroot").join(to);
        fs::create_dir_all(&to).map_err(step("make a mount point in the root"))?;
        mount_move(from, &to).map_err(mounting("the system file systems in the new root"))?;
    }
    free_initramfs();
    chdir("/newroot").map_err(|error| step("enter the new root")(error.into()))?;
    mount_move(".", "/").map_err(mounting("the new root"))?;
    chroot(".").map_err(|error| step("enter the new root")(error.into()))?;
    chdir("/").map_err(|error| step("enter the new root")(error.into()))
}

/// Mounts and links that programs expect in the root.
pub fn finish() -> Result<(), MountError> {
    for directory in ["/dev/pts", "/dev/shm", "/root", "/var/tmp", "/tmp"] {
        fs::create_dir_all(directory).map_err(step("make a directory in the root"))?;
    }
    for directory in ["/tmp", "/var/tmp"] {
        fs::set_permissions(directory, Permissions::from_mode(0o1777)).map_err(step("open /tmp to all"))?;
    }
    let terminals = MountFlags::NOSUID | MountFlags::NOEXEC;
    mount(
        "devpts",
        "/dev/pts",
        "devpts",
        terminals,
        c"gid=5,mode=0620,ptmxmode=0666",
    )
    .map_err(mounting("/dev/pts"))?;
    mount(
        "tmpfs",
        "/dev/shm",
        "tmpfs",
        MountFlags::NOSUID | MountFlags::NODEV,
        c"mode=1777",
    )
    .map_err(mounting("/dev/shm"))?;
    for (target, link) in [
        ("/proc/self/fd", "/dev/fd"),
        ("/proc/self/fd/0", "/dev/stdin"),
        ("/proc/self/fd/1", "/dev/stdout"),
        ("/proc/self/fd/2", "/dev/stderr"),
    ] {
        replace_by_link(link, target).map_err(step("link /dev/fd"))?;
    }
    fs::create_dir_all(crate::RUN_DIRECTORY).map_err(step("make /run/space"))?;
    // Of its own, so that nobody who fills /run keeps the daemon from saying who this machine is.
    mount(
        "tmpfs",
        crate::RUN_DIRECTORY,
        "tmpfs",
        MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC,
        c"mode=0755,size=1m",
    )
    .map_err(mounting("/run/space"))
}

/// Lays a file over another, which need not be replaceable.
pub fn cover(file: &str, over: &str) -> io::Result<()> {
    Ok(mount_bind(file, over)?)
}

/// Makes `link` a symbolic link to `target`, whatever it was.
pub fn replace_by_link(link: &str, target: &str) -> io::Result<()> {
    match fs::remove_file(link) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    symlink(target, link)
}

fn wait_for(device: &'static str) -> Result<(), MountError> {
    let begun = Instant::now();
    while !Path::new(device).exists() {
        if begun.elapsed() > DISK_LIMIT {
            return Err(MountError::NoDisk { device });
        }
        thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn is_ext4(device: &str) -> io::Result<bool> {
    let mut file = File::open(device)?;
    let mut found = [0; 2];
    file.seek(SeekFrom::Start(EXT4_MAGIC.0))?;
    match file.read_exact(&mut found) {
        Ok(()) => Ok(found == EXT4_MAGIC.1),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Gives the initramfs's memory back. What cannot be removed stays hidden and costs only memory.
fn free_initramfs() {
    drop(fs::remove_dir_all("/modules"));
    drop(fs::remove_file("/init"));
}
