//! A throw-away guest: Debian's cloud kernel and an initramfs with busybox, whose shell answers lines on the ports.
//! Made once under the target directory.

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use fs_err as fs;

/// Raise when what is made changes.
const VERSION: &str = "lab-guest-2";

const MODULES: [&str; 5] = [
    "virtio_mmio",
    "failover",
    "net_failover",
    "virtio_net",
    "virtio_blk",
];

/// Lines in, lines out, on both ports, which stay open whether anybody is connected or not, as the daemon's do; the disk is
/// the device that is not read-only.
const INIT: &str = r#"#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc; $b mount -t sysfs sys /sys; $b mount -t devtmpfs dev /dev
for m in virtio_mmio failover net_failover virtio_net virtio_blk; do $b insmod /lib/$m.ko; done
$b mount -t tmpfs -o size=90% tmp /tmp
for d in vda vdb; do read -r ro < /sys/block/$d/ro; [ $ro = 0 ] && disk=/dev/$d; done
for p in /sys/class/virtio-ports/*; do
  read -r name < $p/name
  [ "$name" = space.control ] && control=/dev/${p##*/}
  [ "$name" = space.data ] && data=/dev/${p##*/}
done
echo "guest up: $control $data $disk"
count=0
serve_now() {
  case $1 in
    poweroff) $b poweroff -f;;
    panic) echo c > /proc/sysrq-trigger;;
  esac
}
serve() {
  exec 3<>$1
  while :; do
    while read -r verb a c <&3; do
      case $verb in
        hello) echo "hello $a" >&3;;
        count) count=$((count+1)); echo "count $count" >&3;;
        fill) $b dd if=/dev/urandom of=/tmp/fill bs=1M count=$a 2>/dev/null; echo "filled" >&3;;
        sum) set -- $1 $($b md5sum /tmp/fill); echo "sum $2" >&3;;
        write) echo $c | $b dd of=$disk bs=65536 seek=$a conv=notrunc,fsync 2>/dev/null; echo "written" >&3;;
        read) read -r text <<X
$($b dd if=$disk bs=65536 skip=$a count=1 2>/dev/null | $b head -n 1 | $b tr -d '\000')
X
          echo "text $text" >&3;;
        scribble) $b dd if=/dev/urandom of=$disk bs=1M count=$a conv=fsync 2>/dev/null; echo "scribbled" >&3;;
        interfaces) echo "interfaces $(echo $(ls /sys/class/net))" >&3;;
        log) echo "$a $c" > /dev/console; echo "logged" >&3;;
        soon) echo "soon" >&3; ($b sleep 3; serve_now $a) &;;
        poweroff) $b poweroff -f;;
        reboot) $b reboot -f;;
        panic) echo c > /proc/sysrq-trigger;;
        *) echo "what $verb" >&3;;
      esac
    done
    $b usleep 2000
  done
}
serve $data &
serve $control # the first process must not end
"#;

/// Kernel command line of the lab guest.
pub const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet reboot=t panic=-1";

/// The files of the guest.
#[derive(Debug, Clone)]
pub struct Guest {
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    pub root: PathBuf,
}

/// Makes the guest if it is not there yet, or says what is missing.
pub fn guest() -> Result<Guest> {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    fs::create_dir_all(&target)?;
    let target = fs::canonicalize(target)?;
    let lock = fs::File::create(target.join(format!("{VERSION}.lock")))?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)?;
    let directory = target.join(VERSION);
    if !directory.exists() {
        let new = target.join(format!("{VERSION}.new"));
        fs::remove_dir_all(&new).ok();
        make(&new)?;
        fs::rename(&new, &directory)?;
    }
    Ok(Guest {
        kernel: directory.join("vmlinuz"),
        initramfs: directory.join("initramfs"),
        root: directory.join("root"),
    })
}

fn make(directory: &Path) -> Result<()> {
    let busybox = Path::new("/bin/busybox");
    ensure!(busybox.exists(), "busybox-static is not installed");
    fs::create_dir_all(directory)?;
    let search = output(Command::new("apt-cache").args([
        "search",
        "--names-only",
        "^linux-image-6.12.*cloud-amd64$",
    ]))?;
    let mut packages = search
        .lines()
        .filter_map(|line| line.split(' ').next())
        .filter(|name| name.contains('+'))
        .collect::<Vec<_>>();
    packages.sort_by_key(|name| {
        name.split(|c: char| !c.is_ascii_digit())
            .map(|n| n.parse::<u64>().unwrap_or(0))
            .collect::<Vec<_>>()
    });
    let Some(package) = packages.pop() else {
        bail!("apt offers no 6.12 cloud kernel (bookworm-backports)")
    };
    output(
        Command::new("apt-get")
            .args(["download", package])
            .current_dir(directory),
    )?;
    let deb = files(directory, ".deb")?
        .pop()
        .context("apt-get downloaded nothing")?;
    output(
        Command::new("dpkg")
            .arg("-x")
            .arg(&deb)
            .arg(directory.join("package")),
    )?;
    let image = files(&directory.join("package/boot"), "")?
        .into_iter()
        .find(|f| {
            f.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with("vmlinuz"))
        })
        .context("the package holds no kernel")?;
    fs::rename(image, directory.join("vmlinuz"))?;

    let tree = directory.join("tree");
    for part in ["bin", "dev", "proc", "sys", "lib", "tmp"] {
        fs::create_dir_all(tree.join(part))?;
    }
    fs::copy(busybox, tree.join("bin/busybox"))?;
    for applet in ["ls", "sh"] {
        std::os::unix::fs::symlink("busybox", tree.join("bin").join(applet))?;
    }
    for module in MODULES {
        let name = format!("{module}.ko");
        let found = output(
            Command::new("find")
                .arg(directory.join("package"))
                .arg("-name")
                .arg(format!("{name}*")),
        )?;
        let found = found
            .lines()
            .next()
            .with_context(|| format!("the package holds no module {module}"))?;
        let bytes = Command::new("xz").args(["-dc", found]).output()?.stdout;
        ensure!(!bytes.is_empty(), "{found} cannot be unpacked");
        fs::write(tree.join("lib").join(name), bytes)?;
    }
    fs::write(tree.join("init"), INIT)?;
    fs::set_permissions(tree.join("init"), std::fs::Permissions::from_mode(0o755))?;
    let pack = "find . | cpio -o -H newc --quiet > ../initramfs";
    output(Command::new("sh").args(["-c", pack]).current_dir(&tree))?;
    // Nothing looks into it; it only has to be a file that a disk can be.
    fs::write(directory.join("root"), vec![7; 1 << 20])?;
    for waste in [tree, directory.join("package"), deb] {
        if waste.is_dir() {
            fs::remove_dir_all(&waste)?;
        } else {
            fs::remove_file(&waste)?;
        }
    }
    Ok(())
}

fn files(directory: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory)?.collect::<std::io::Result<Vec<_>>>()?;
    Ok(entries
        .into_iter()
        .map(|e| e.path())
        .filter(|p| p.to_string_lossy().ends_with(ending))
        .collect())
}

fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}
