//! `space up`: prepares this machine as root, then keeps the platform's processes running. It serves nothing itself.
//!
//! ```text
//!  prerequisites ► data directory claimed ► listener ► directories are the node's user's ► template `base`, if missing
//!     ► node manager, node (`supervise.rs`) ► ready file, announcement ► signal
//!     ► node ends or leaves the sandboxes ► node manager stops
//! ```
//!
//! `space template build` makes the template, in a process of its own: here no guest is ever spoken to.

pub(crate) mod assemble;
mod capacity;
mod child;
pub(crate) mod installation;
mod ownership;
pub(crate) mod prepare;
mod supervise;

use std::{
    ffi::OsString,
    io,
    net::{SocketAddr, TcpListener},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};
use space_node::PoolConfig;
use space_node_manager::IoLimits;
use space_volume::VolumeError;

use crate::{
    cli::Global,
    error::{CliError, Kind},
    output,
};
use child::Launch;
use installation::{Account, Installation, NODE_UID, Place};
use supervise::{End, Programs, Request, Requests, Supervisor};

/// How long the address may be in use by a last run that is leaving, and how often that is tried.
const LEAVING: Duration = Duration::from_secs(3);
const AGAIN: Duration = Duration::from_millis(50);

#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub(crate) struct Up {
    /// Address to listen on; port 0 takes any free one
    #[arg(long, default_value = LISTEN, value_name = "ADDRESS")]
    listen: SocketAddr,
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    serving: Serving,
    /// User that the node runs as
    #[arg(long, default_value_t = NODE_UID.to_string(), value_name = "NAME|UID")]
    user: String,
    /// Write JSON with `url` (also as `api_url`) and `key` here, mode 0600, when sandboxes can be made
    #[arg(long, value_name = "PATH")]
    ready_file: Option<PathBuf>,
    /// Leave the sandboxes running at the end; the next start takes them over
    #[arg(long)]
    keep_sandboxes: bool,
    /// Make directories and template, then stop: for a service manager that starts the processes itself
    #[arg(long)]
    prepare_only: bool,
}

/// Where the API is, unless told otherwise.
pub(crate) const LISTEN: &str = "127.0.0.1:3000";

/// What the node is told, however it is started.
#[derive(Debug, Clone, Args)]
pub(crate) struct Serving {
    /// Template store; may be shared with other platforms [default: DATA_DIR/templates]
    #[arg(long, value_name = "DIRECTORY", env = "SPACE_TEMPLATES")]
    pub(crate) templates: Option<PathBuf>,
    /// Domain under which sandboxes are found by name, as PORT-SANDBOX.DOMAIN
    #[arg(long, default_value = "localhost", value_name = "DOMAIN")]
    pub(crate) domain: String,
    /// Most sandboxes at once
    #[arg(long, default_value_t = 64, value_name = "COUNT")]
    pub(crate) capacity: usize,
    /// Most machines kept ready for sandboxes to come; 0 starts each when it is asked for
    #[arg(long, default_value_t = PoolConfig::default().max_machines, value_name = "COUNT")]
    pub(crate) pool: usize,
    /// Most that one sandbox reads from the disk of the data directory in a second, and most that it writes; 0 is unlimited
    #[arg(long, default_value_t = 200, value_name = "MIB")]
    pub(crate) disk_mib_per_second: u64,
    /// The same in operations; 0 is unlimited
    #[arg(long, default_value_t = 5000, value_name = "COUNT")]
    pub(crate) disk_operations_per_second: u64,
    /// Virtual machine monitor
    #[arg(long, value_enum, default_value_t = Monitor::Auto)]
    pub(crate) vmm: Monitor,
    /// Program that becomes the guest's first process [default: space-daemon beside this program]
    #[arg(long, value_name = "PATH")]
    pub(crate) daemon: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Monitor {
    /// The best one that works here
    Auto,
    /// QEMU, with KVM where that works and emulating elsewhere
    Qemu,
}

impl Serving {
    /// What one sandbox may take of the disk; `None` is all of it.
    pub(crate) fn disk_traffic(&self) -> Option<IoLimits> {
        let bytes = Some(self.disk_mib_per_second.saturating_mul(1 << 20)).filter(|limit| *limit > 0);
        let operations = Some(self.disk_operations_per_second).filter(|limit| *limit > 0);
        let limited = bytes.is_some() || operations.is_some();
        limited.then_some(IoLimits {
            read_bytes_per_second: bytes,
            write_bytes_per_second: bytes,
            read_operations_per_second: operations,
            write_operations_per_second: operations,
        })
    }

    pub(crate) fn templates(&self, data: &Path) -> Result<PathBuf, CliError> {
        match &self.templates {
            Some(templates) => Ok(std::path::absolute(templates)?),
            None => Ok(data.join("templates")),
        }
    }
}

impl Up {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        ensure_root("the platform")?;
        self.serving.check()?;
        let account: Account = self.user.parse().map_err(|error: String| {
            CliError::usage(error).with_hint("name an ordinary user with --user, or leave it out")
        })?;
        let daemon = find_daemon(self.serving.daemon.as_deref())?;
        let (data, _claim) = prepare::claim(&self.place.data_dir)?;
        let installation = Installation::of(data, self.place.run_dir.as_deref());
        let templates = self.serving.templates(&installation.data_directory)?;
        installation.check()?;
        let listener = if self.prepare_only {
            None
        } else {
            Some(self.listen().await?)
        };

        // From here on a signal is an orderly end, also in the middle of the first start.
        let mut requests = Requests::new()?;
        prepare::directories(&installation, &templates, account)?;
        if !prepare::has_base(&templates)
            && let Some(given_up) =
                build_base(global, &installation, &templates, &daemon, &mut requests).await?
        {
            return Ok(given_up);
        }
        let Some(listener) = listener else {
            return Ok(ExitCode::SUCCESS);
        };
        let socket = installation.manager_socket();
        let processes = Processes {
            up: self,
            global,
            installation: &installation,
            templates,
            daemon,
            account,
            listener,
        };
        let supervisor = Supervisor::new(processes, socket);
        let outcome = Box::pin(supervisor.run(&mut requests, self.keep_sandboxes)).await;
        if let Some(path) = &self.ready_file {
            drop(std::fs::remove_file(path));
            drop(std::fs::remove_file(unfinished(path)));
        }
        let (request, end) = outcome?;
        Ok(match (end, request) {
            (End::Refused(code), _) => ExitCode::from(code),
            (End::Forced, _) => {
                if !self.keep_sandboxes {
                    super::down::remove_machines(&installation).await?;
                }
                ExitCode::from(130)
            }
            (End::StoppedEarly, Some(Request::Interrupt)) => ExitCode::from(130),
            (End::StoppedEarly | End::Stopped, _) => ExitCode::SUCCESS,
        })
    }

    /// The data directory is ours already, so who is in the way may be what is left of the last run: a node that has lost its
    /// supervisor and is on its way out.
    async fn listen(&self) -> Result<TcpListener, CliError> {
        let give_up = Instant::now() + LEAVING;
        loop {
            match TcpListener::bind(self.listen) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < give_up => {
                    tokio::time::sleep(AGAIN).await;
                }
                bound => return bound.map_err(|error| listen_error(self.listen, error)),
            }
        }
    }
}

/// Whether a node manager listens there.
pub(crate) fn manager_listens(socket: &Path) -> bool {
    supervise::is_listened_at(socket)
}

/// Why nobody can listen there, and what to do.
pub(crate) fn listen_error(address: SocketAddr, error: io::Error) -> CliError {
    let in_use = error.kind() == io::ErrorKind::AddrInUse;
    let error = CliError::new(
        Kind::Environment,
        anyhow::Error::new(error).context(format!("cannot listen on {address}")),
    );
    error.with_hint(if in_use {
        "is another `space up` running? Stop it, or choose another address with --listen"
    } else {
        "choose another address with --listen"
    })
}

/// Makes the template `base` with its machine. Gives the exit code if it did not come to that.
async fn build_base(
    global: &Global,
    installation: &Installation,
    templates: &Path,
    daemon: &Path,
    requests: &mut Requests,
) -> Result<Option<ExitCode>, CliError> {
    output::note("There is no template `base` yet: building it takes some minutes, once.");
    let arguments = [
        "template".into(),
        "build".into(),
        "base".into(),
        "--data-dir".into(),
        installation.data_directory.clone().into_os_string(),
        "--templates".into(),
        templates.as_os_str().to_owned(),
        "--daemon".into(),
        daemon.as_os_str().to_owned(),
    ];
    let mut arguments = arguments.to_vec();
    if global.json {
        arguments.push("--json".into());
    }
    let launch = Launch {
        arguments,
        account: None,
        descriptors: Vec::new(),
        may_print: false,
        serves: false,
    };
    let mut build = launch
        .start()
        .map_err(|error| CliError::internal("cannot start the build of the template `base`", error))?;
    let mut asked = None;
    loop {
        tokio::select! {
            status = build.wait() => {
                let code = status?.code();
                return Ok(match (asked, code) {
                    (Some(Request::Interrupt), _) => Some(ExitCode::from(130)),
                    (Some(Request::Terminate), _) => Some(ExitCode::SUCCESS),
                    (None, Some(0)) => None,
                    // It has said why.
                    (None, code) => Some(ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))),
                });
            }
            request = requests.next() => {
                if asked.is_none() {
                    tracing::info!("giving the start up; once more ends it at once");
                }
                let signal = if asked.is_none() { rustix::process::Signal::INT } else { rustix::process::Signal::KILL };
                child::signal(&build, signal);
                asked = asked.or(Some(request));
            }
        }
    }
}

/// How to start the platform's processes.
struct Processes<'a> {
    up: &'a Up,
    global: &'a Global,
    installation: &'a Installation,
    templates: PathBuf,
    daemon: PathBuf,
    account: Account,
    listener: TcpListener,
}

impl Processes<'_> {
    /// What both are told.
    fn place(&self, command: &str) -> Vec<OsString> {
        let Installation {
            data_directory,
            run_directory,
            ..
        } = self.installation;
        let mut arguments: Vec<OsString> = vec![
            command.into(),
            "--data-dir".into(),
            data_directory.into(),
            "--run-dir".into(),
            run_directory.into(),
        ];
        if self.global.json {
            arguments.push("--json".into());
        }
        arguments
    }
}

impl Programs for Processes<'_> {
    fn manager(&self) -> Launch {
        let mut arguments = self.place("node-manager");
        arguments.extend(["--user".into(), self.account.uid.to_string().into()]);
        Launch {
            arguments,
            account: None,
            descriptors: Vec::new(),
            may_print: false,
            serves: true,
        }
    }

    fn node(&self, ready: OwnedFd, published: bool) -> io::Result<Launch> {
        let Serving {
            templates: _,
            domain,
            capacity,
            pool,
            disk_mib_per_second,
            disk_operations_per_second,
            vmm,
            daemon: _,
        } = &self.up.serving;
        let listener = self.listener.as_fd().try_clone_to_owned()?;
        let mut arguments = self.place("node");
        let vmm = vmm.to_possible_value().map(|value| value.get_name().to_owned());
        let options: [(&str, OsString); 10] = [
            ("--templates", self.templates.clone().into()),
            ("--daemon", self.daemon.clone().into()),
            ("--domain", domain.into()),
            ("--capacity", capacity.to_string().into()),
            ("--pool", pool.to_string().into()),
            ("--disk-mib-per-second", disk_mib_per_second.to_string().into()),
            (
                "--disk-operations-per-second",
                disk_operations_per_second.to_string().into(),
            ),
            ("--vmm", vmm.unwrap_or_default().into()),
            ("--listen-descriptor", listener.as_raw_fd().to_string().into()),
            ("--ready-descriptor", ready.as_raw_fd().to_string().into()),
        ];
        for (option, value) in options {
            arguments.extend([option.into(), value]);
        }
        let mut descriptors = vec![listener, ready];
        if !published {
            arguments.push("--announce".into());
            if let Some(path) = &self.up.ready_file {
                let file = OwnedFd::from(create_private(&unfinished(path))?);
                arguments.extend([
                    "--ready-file-descriptor".into(),
                    file.as_raw_fd().to_string().into(),
                ]);
                descriptors.push(file);
            }
        }
        Ok(Launch {
            arguments,
            account: Some(self.account),
            descriptors,
            may_print: true,
            serves: true,
        })
    }

    fn publish(&self) -> Result<(), CliError> {
        let Some(path) = &self.up.ready_file else {
            return Ok(());
        };
        std::fs::rename(unfinished(path), path)
            .map_err(|error| CliError::internal(format!("cannot write {}", path.display()), error))
    }
}

/// Where a file is written before it gets its name.
fn unfinished(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    PathBuf::from(name)
}

/// A new file that only its owner can read.
fn create_private(path: &Path) -> io::Result<std::fs::File> {
    use std::os::unix::fs::OpenOptionsExt as _;
    drop(std::fs::remove_file(path));
    std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// Replaces a file with one that only we can read, whole at every instant.
pub(crate) fn write_private(path: &Path, content: &str) -> Result<(), CliError> {
    use std::io::Write as _;
    let temporary = unfinished(path);
    create_private(&temporary)
        .and_then(|mut file| file.write_all(format!("{content}\n").as_bytes()))
        .and_then(|()| std::fs::rename(&temporary, path))
        .map_err(|error| CliError::internal(format!("cannot write {}", path.display()), error))
}
/// Fails with a hint unless we are root.
pub(crate) fn ensure_root(what: &str) -> Result<(), CliError> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(CliError::environment(format!("{what} needs root"))
        .with_hint("run it with sudo: it makes namespaces, taps and cgroups; machines run as ordinary users"))
}

/// The guest's daemon: the one given, or the one that was built beside this program.
pub(crate) fn find_daemon(given: Option<&Path>) -> Result<PathBuf, CliError> {
    let candidates = match given {
        Some(path) => vec![path.to_owned()],
        None => {
            let program = std::env::current_exe()?;
            let beside = program.parent().unwrap_or(Path::new("/"));
            // Of a build tree first: what lies beside us there is built for the host, not linked statically for a guest.
            let of = |profile: &str| {
                beside
                    .join("../x86_64-unknown-linux-gnu")
                    .join(profile)
                    .join("space-daemon")
            };
            vec![of("debug"), of("release"), beside.join("space-daemon")]
        }
    };
    let found = candidates.iter().find(|path| path.is_file());
    found.map(fs_err::canonicalize).transpose()?.ok_or_else(|| {
        let places: Vec<_> = candidates.iter().map(|path| path.display().to_string()).collect();
        CliError::environment(format!(
            "the guest's daemon was not found: looked for {}",
            places.join(", ")
        ))
        .with_hint("build it with `cargo xtask build`, or name it with --daemon")
    })
}

/// A failure of the template store with what to do about it.
pub(crate) fn volume_error<E>(doing: &str, error: E) -> CliError
where
    E: std::borrow::Borrow<VolumeError> + std::error::Error + Send + Sync + 'static,
{
    let known: &VolumeError = error.borrow();
    let hint = match known {
        VolumeError::NoSpace { .. } => {
            Some("free some space, or choose another directory with --data-dir or --templates")
        }
        VolumeError::NeedsRoot { .. } => Some("run it with sudo"),
        VolumeError::MissingProgram { .. } => {
            Some("install it, or let `cargo xtask setup` do so; `space doctor` lists all")
        }
        VolumeError::PackageSource { .. } => Some("check the apt sources of this machine"),
        VolumeError::BadRecipe { .. } => Some("mend the recipe"),
        VolumeError::Damaged { .. } => Some("build the template again with `space template build`"),
        _ => None,
    };
    let kind = match known {
        VolumeError::BadRecipe { .. } | VolumeError::BadName { .. } => Kind::Usage,
        VolumeError::TemplateNotFound { .. } => Kind::NotFound,
        _ => Kind::Environment,
    };
    let error = CliError::new(kind, anyhow::Error::new(error).context(doing.to_owned()));
    match hint {
        Some(hint) => error.with_hint(hint),
        None => error,
    }
}
