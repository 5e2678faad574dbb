//! Measures the candidates for freezing a machine's writable disk; `docs/disk-seam.md` draws the conclusion.
//!
//! `cargo run -p space-vmm --example disk_seam` (root; the XFS part needs mkfs.xfs and a loop device)

#![expect(clippy::print_stdout, reason = "its output is its purpose")]
#![expect(dead_code, reason = "the lab holds more than one program uses")]

#[path = "../tests/lab/mod.rs"]
mod lab;

use std::{
    fs::File,
    io::{BufRead, BufReader, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use fs_err as fs;
use lab::{Lab, Wish};
use serde_json::{Value, json};
use space_vmm::{DiskLayer, Vmm};

/// Layers put on top of each other in one run.
const LAYERS: usize = 24;

/// Repetitions of what has no layers to count.
const REPEAT: usize = 15;

/// Size of the raw disks that are copied, bytes.
const RAW: u64 = 4 << 30;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<()> {
    let lab = lab::lab("seam").await?;
    println!(
        "filesystem of the scratch directory: {}\n",
        filesystem(&lab.directory)?
    );
    println!(
        "A. qcow2 layers: a running guest with one virtio disk, paused for each switch, {LAYERS} in a row"
    );
    by_driver(&lab).await?;
    by_monitor(&lab, "blockdev-snapshot, overlay opened before").await?;
    by_monitor(&lab, "blockdev-snapshot-sync, mode=existing").await?;
    by_monitor(&lab, "blockdev-snapshot-sync, QEMU makes the file").await?;
    println!(
        "\nB. what a chain costs: start of a restored machine whose disk has that many layers (n = {REPEAT})"
    );
    chain_length(&lab).await?;
    println!(
        "\nC. sparse copy of a raw disk of {} GiB (n = {REPEAT})",
        RAW >> 30
    );
    copies(&lab.directory, "here", sparse_copy)?;
    println!("\nD. reflink (FICLONE) of the same disk on XFS, loop-mounted (n = {REPEAT})");
    reflinks(&lab)?;
    lab.done().await
}

/// The driver's `freeze_disk`: makes the overlay, opens it, switches.
async fn by_driver(lab: &Lab) -> Result<()> {
    let template = lab.template().await?;
    let (running, mut port) = lab.run(&template).await?;
    let disks = lab.disks(&running.name)?;
    let mut times = Vec::new();
    for layer in 0..LAYERS {
        ensure!(port.ask(&format!("write {layer} some text")).await? == "written");
        running.machine.pause().await?;
        let start = Instant::now();
        running
            .machine
            .freeze_disk(&disks.join(format!("seam-{layer}.qcow2")))
            .await?;
        times.push(start.elapsed());
        running.machine.resume().await?;
    }
    report_layers("driver: make, open, blockdev-snapshot", &times);
    for layer in [0, LAYERS - 1] {
        ensure!(port.ask(&format!("read {layer}")).await? == "text some text");
    }
    lab.remove(running).await
}

/// A machine without guest, on whose monitor each way is tried bare.
struct Monitor {
    qemu: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Monitor {
    fn start(base: &Path, top: &Path) -> Result<Self> {
        let nodes = [
            json!({"driver": "file", "node-name": "l0", "filename": base, "read-only": true}),
            json!({"driver": "file", "node-name": "f1", "filename": top}),
            json!({"driver": "qcow2", "node-name": "l1", "file": "f1", "backing": "l0"}),
        ];
        let mut command = Command::new("qemu-system-x86_64");
        command.args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-M",
            "microvm",
            "-S",
            "-qmp",
            "stdio",
        ]);
        for node in nodes {
            command.args(["-blockdev", &node.to_string()]);
        }
        command.args(["-device", "virtio-blk-device,drive=l1"]);
        let mut qemu = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let to = qemu.stdin.take().context("stdin")?;
        let from = BufReader::new(qemu.stdout.take().context("stdout")?);
        let mut monitor = Self { qemu, to, from };
        monitor.run("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    fn run(&mut self, name: &str, arguments: &Value) -> Result<()> {
        self.to.write_all(
            json!({"execute": name, "arguments": arguments})
                .to_string()
                .as_bytes(),
        )?;
        loop {
            let mut line = String::new();
            self.from.read_line(&mut line)?;
            ensure!(!line.is_empty(), "the monitor ended");
            // QEMU prints what it formats in between.
            let Ok(answer) = serde_json::from_str::<Value>(&line) else {
                continue;
            };
            if let Some(error) = answer.get("error") {
                anyhow::bail!("{name}: {error}");
            }
            if answer.get("return").is_some() {
                return Ok(());
            }
        }
    }
}

async fn by_monitor(lab: &Lab, way: &str) -> Result<()> {
    let directory = tempfile::tempdir_in(&lab.directory)?;
    let base = directory.path().join("base");
    File::create(&base)?.set_len(lab::DISK)?;
    let file = |number: usize| directory.path().join(format!("{number}.qcow2"));
    lab.driver.create_disk_layer(&base, &file(1)).await?;
    let mut monitor = Monitor::start(&base, &file(1))?;
    let mut times = Vec::new();
    for number in 2..LAYERS + 2 {
        let (below, above, path) = (format!("l{}", number - 1), format!("l{number}"), file(number));
        let sync = |mode: &str| {
            json!({"node-name": below, "snapshot-file": path, "snapshot-node-name": above, "mode": mode,
                "format": "qcow2"})
        };
        let took = if way.contains("sync") {
            let existing = way.contains("existing");
            if existing {
                lab.driver.create_disk_layer(&base, &path).await?;
            }
            let arguments = sync(if existing { "existing" } else { "absolute-paths" });
            match timed(|| monitor.run("blockdev-snapshot-sync", &arguments)) {
                Ok(took) => took,
                Err(error) => {
                    println!("monitor: {way}: refused at layer {number}: {error:#}");
                    break;
                }
            }
        } else {
            lab.driver.create_disk_layer(&base, &path).await?;
            let protocol = json!({"driver": "file", "node-name": format!("f{number}"), "filename": path});
            let format =
                json!({"driver": "qcow2", "node-name": above, "file": format!("f{number}"), "backing": null});
            monitor.run("blockdev-add", &protocol)?;
            monitor.run("blockdev-add", &format)?;
            let nodes = json!({"node": below, "overlay": above});
            timed(|| monitor.run("blockdev-snapshot", &nodes))?
        };
        times.push(took);
    }
    report_layers(&format!("monitor: {way}"), &times);
    monitor.qemu.kill()?;
    monitor.qemu.wait()?;
    Ok(())
}

async fn chain_length(lab: &Lab) -> Result<()> {
    let template = lab.template().await?;
    for layers in [0, 4, 8, 16, 32] {
        let mut chained = template.clone();
        for number in 0..layers {
            let path = lab.path(&format!("chain-{layers}-{number}.qcow2"));
            lab.driver
                .create_disk_layer(&template.disk[0].path, &path)
                .await?;
            lab.give(&path).await?;
            chained.disk.insert(0, DiskLayer { path });
        }
        let mut times = Vec::new();
        for _ in 0..REPEAT {
            let start = Instant::now();
            let running = lab.restore(&chained, Wish::default()).await?;
            times.push(start.elapsed());
            lab.remove(running).await?;
        }
        report(&format!("{layers} layers between top and base"), &mut times);
    }
    Ok(())
}

fn copies(directory: &Path, place: &str, copy: fn(&Path, &Path) -> Result<()>) -> Result<()> {
    for (megabytes, clean) in [(0, true), (32, false), (32, true), (256, true)] {
        let disk = directory.join("raw");
        let file = scattered(&disk, megabytes)?;
        if clean {
            file.sync_all()?;
        }
        let mut times = Vec::new();
        for number in 0..REPEAT {
            if !clean {
                dirty(&file, megabytes)?;
            }
            let to = directory.join(format!("copy-{number}"));
            times.push(timed(|| copy(&disk, &to))?);
            fs::remove_file(&to)?;
        }
        let state = if clean { "clean" } else { "dirty in the page cache" };
        report(&format!("{place}: {megabytes} MiB written, {state}"), &mut times);
        fs::remove_file(&disk)?;
    }
    Ok(())
}

fn reflinks(lab: &Lab) -> Result<()> {
    let image = lab.path("xfs.img");
    let mount = lab.path("xfs");
    fs::create_dir(&mount)?;
    File::create(&image)?.set_len(8 << 30)?;
    let ready = run(Command::new("mkfs.xfs")
        .args(["-q", "-m", "reflink=1"])
        .arg(&image))
    .and_then(|()| run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&mount)));
    if let Err(error) = ready {
        println!("SKIPPED: {error:#}");
        return Ok(());
    }
    let measured = copies(&mount, "reflink", reflink).and_then(|()| many_reflinks(&mount));
    run(Command::new("umount").arg(&mount))?;
    measured
}

/// Each clone is written to a little and kept, as snapshots would be.
fn many_reflinks(directory: &Path) -> Result<()> {
    let disk = directory.join("raw");
    let file = scattered(&disk, 256)?;
    let mut times = Vec::new();
    for number in 0..50 {
        dirty(&file, 4)?;
        file.sync_data()?;
        times.push(timed(|| {
            reflink(&disk, &directory.join(format!("kept-{number}")))
        })?);
    }
    println!(
        "{:55} first {:7.2} ms, tenth {:7.2}, fiftieth {:7.2}",
        "reflink: 256 MiB, 4 MiB rewritten and synced each",
        milliseconds(times[0]),
        milliseconds(times[9]),
        milliseconds(times[49])
    );
    Ok(())
}

fn reflink(from: &Path, to: &Path) -> Result<()> {
    let (from, to) = (File::open(from)?, File::create(to)?);
    Ok(rustix::fs::ioctl_ficlone(&to, &from)?)
}

fn sparse_copy(from: &Path, to: &Path) -> Result<()> {
    use rustix::{fs::SeekFrom, fs::seek, io::Errno};
    let (from, to) = (File::open(from)?, File::create(to)?);
    let length = from.metadata()?.len();
    to.set_len(length)?;
    let mut at = 0;
    loop {
        let start = match seek(&from, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let end = seek(&from, SeekFrom::Hole(start))?;
        let (mut read, mut write) = (start, start);
        while read < end {
            let left = usize::try_from(end - read)?;
            let copied = rustix::fs::copy_file_range(&from, Some(&mut read), &to, Some(&mut write), left)?;
            ensure!(copied > 0, "the copy stopped short");
        }
        at = end;
    }
}

/// A sparse disk with that much written to it, in pieces of 64 KiB with gaps between.
fn scattered(path: &Path, megabytes: u64) -> Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)?;
    file.set_len(RAW)?;
    dirty(&file, megabytes)?;
    Ok(file)
}

fn dirty(file: &File, megabytes: u64) -> Result<()> {
    let piece = vec![0x5a; 64 << 10];
    for number in 0..megabytes * 16 {
        file.write_all_at(&piece, number * (192 << 10))?;
    }
    Ok(())
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed())
}

fn report_layers(name: &str, times: &[Duration]) {
    let (first, last) = times.split_at(times.len() / 2);
    let median = |times: &[Duration]| {
        let mut times = times.to_vec();
        times.sort();
        milliseconds(times[times.len() / 2])
    };
    println!(
        "{name:55} p50 {:6.2} ms; first half {:6.2}, second half {:6.2}; max {:6.2} (n = {})",
        median(times),
        median(first),
        median(last),
        times.iter().copied().max().map_or(0.0, milliseconds),
        times.len()
    );
}

fn report(name: &str, times: &mut [Duration]) {
    times.sort();
    let at = |percent: usize| milliseconds(times[(times.len() - 1) * percent / 100]);
    println!(
        "{name:55} p50 {:7.2} ms, p90 {:7.2}, min {:7.2}",
        at(50),
        at(90),
        at(0)
    );
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn filesystem(path: &Path) -> Result<String> {
    let output = Command::new("stat")
        .args(["-f", "-c", "%T"])
        .arg(PathBuf::from(path))
        .output()?;
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
