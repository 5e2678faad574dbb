//! `space up`: all layers in one process.
//!
//! ```text
//!  prerequisites ► listener ► privileges, VMM, templates ► node (sweeps what a crash left) ► store, key
//!     ► template `base` with its machine ► serve, announce ► signal
//!     ► stop accepting ► end the sandboxes ► close the store
//! ```

pub(crate) mod assemble;
mod platform;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Args, ValueEnum};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use space_volume::VolumeError;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::{
    cli::{DATA_DIRECTORY, Global, key_file, url_file},
    error::{CliError, Kind},
    output,
};
use platform::Platform;

/// Where sockets go unless told otherwise.
pub(crate) const RUN_DIRECTORY: &str = "/run/space";
/// User ids of one installation: one for each sandbox, the last for building machines.
const UIDS: u32 = 4096;
/// First user id of the first installation.
const FIRST_UID: u32 = 200_000;
/// Ranges of user ids that installations are spread over.
const UID_RANGES: u32 = 250;

#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub(crate) struct Up {
    /// Address to listen on; port 0 takes any free one
    #[arg(long, default_value = "127.0.0.1:3000", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// Directory for everything that is to stay
    #[arg(long, default_value = DATA_DIRECTORY, value_name = "DIRECTORY", env = "SPACE_DATA_DIR")]
    data_dir: PathBuf,
    /// Template store; may be shared with other platforms [default: DATA_DIR/templates]
    #[arg(long, value_name = "DIRECTORY", env = "SPACE_TEMPLATES")]
    templates: Option<PathBuf>,
    /// Directory for sockets [default: /run/space, or below it for another data directory]
    #[arg(long, value_name = "DIRECTORY")]
    run_dir: Option<PathBuf>,
    /// Domain under which sandboxes are found by name, as PORT-SANDBOX.DOMAIN
    #[arg(long, default_value = "localhost", value_name = "DOMAIN")]
    domain: String,
    /// Most sandboxes at once
    #[arg(long, default_value_t = 64, value_name = "COUNT")]
    capacity: usize,
    /// Virtual machine monitor
    #[arg(long, value_enum, default_value_t = Monitor::Auto)]
    vmm: Monitor,
    /// Program that becomes the guest's first process [default: space-daemon beside this program]
    #[arg(long, value_name = "PATH")]
    daemon: Option<PathBuf>,
    /// Write JSON with `url` (also as `api_url`) and `key` here, mode 0600, when sandboxes can be made
    #[arg(long, value_name = "PATH")]
    ready_file: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Monitor {
    /// The best one that works here
    Auto,
    /// QEMU, with KVM where that works and emulating elsewhere
    Qemu,
}

/// What tells the objects of one platform from those of others on this machine.
#[derive(Debug)]
pub(crate) struct Installation {
    /// Part of every object's name.
    pub(crate) name: String,
    /// Sockets and locks.
    pub(crate) run_directory: PathBuf,
    /// For sandboxes; the id after the last is for building machines.
    pub(crate) uids: std::ops::Range<u32>,
}

impl Installation {
    fn of(data: &Path, run: Option<&Path>) -> Self {
        let default = data == Path::new(DATA_DIRECTORY);
        let digest = Sha256::digest(data.as_os_str().as_encoded_bytes());
        let name = if default {
            "local".to_owned()
        } else {
            space_api::key::hex(&digest[..5])
        };
        let run_directory = match run {
            Some(run) => run.to_owned(),
            None if default => PathBuf::from(RUN_DIRECTORY),
            None => Path::new(RUN_DIRECTORY).join(&name),
        };
        let range = if default {
            0
        } else {
            1 + u32::from(digest[5]) % (UID_RANGES - 2)
        };
        Self::new(name, run_directory, range)
    }

    /// The one of `space template build`.
    pub(crate) fn builder(run: &Path) -> Self {
        Self::new("build".to_owned(), run.join("build"), UID_RANGES - 1)
    }

    fn new(name: String, run_directory: PathBuf, range: u32) -> Self {
        let first = FIRST_UID + range * UIDS;
        Self {
            name,
            run_directory,
            uids: first..first + UIDS - 1,
        }
    }
}

impl Up {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        ensure_root("the platform")?;
        let data = absolute(&self.data_dir)?;
        std::fs::create_dir_all(&data)?;
        let data = fs_err::canonicalize(&data)?;
        let installation = Installation::of(&data, self.run_dir.as_deref());
        let listener = self.listen().await?;
        let address = listener.local_addr()?;
        match self.vmm {
            Monitor::Auto | Monitor::Qemu => {}
        }

        // From here on a signal is an orderly end, also in the middle of the first start.
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let cancel = CancellationToken::new();
        let mut starting = std::pin::pin!(Platform::start(
            self,
            &installation,
            &data,
            listener,
            cancel.clone()
        ));
        let mut given_up = ExitCode::SUCCESS;
        let platform = loop {
            tokio::select! {
                platform = &mut starting => break platform,
                _ = interrupt.recv() => given_up = ExitCode::from(130),
                _ = terminate.recv() => {}
            }
            if cancel.is_cancelled() {
                return Ok(ExitCode::from(130));
            }
            tracing::info!("giving the start up; once more ends it at once");
            cancel.cancel();
        };
        let platform = match platform {
            Err(_) if cancel.is_cancelled() => return Ok(given_up),
            platform => platform?,
        };
        let url = format!("http://{address}");
        fs_err::write(url_file(&data), format!("{url}\n"))?;
        if let Some(path) = &self.ready_file {
            write_private(
                path,
                &json!({
                    "url": url, "api_url": url, "key": platform.key(), "installation": installation.name,
                })
                .to_string(),
            )?;
        }
        self.announce(global, &url, &platform, &data)?;

        let reason = tokio::select! {
            _ = interrupt.recv() => None,
            _ = terminate.recv() => None,
            error = platform.failed() => Some(error),
        };
        tracing::info!("shutting down; once more ends it at once");
        if let Some(path) = &self.ready_file {
            drop(fs_err::remove_file(path));
        }
        let forced = tokio::select! {
            () = platform.shut_down() => false,
            _ = interrupt.recv() => true,
            _ = terminate.recv() => true,
        };
        match reason {
            Some(error) => Err(error),
            None if forced => Ok(ExitCode::from(130)),
            None => Ok(ExitCode::SUCCESS),
        }
    }

    async fn listen(&self) -> Result<tokio::net::TcpListener, CliError> {
        tokio::net::TcpListener::bind(self.listen).await.map_err(|error| {
            let in_use = error.kind() == std::io::ErrorKind::AddrInUse;
            let error = CliError::new(
                Kind::Environment,
                anyhow::Error::new(error).context(format!("cannot listen on {}", self.listen)),
            );
            error.with_hint(if in_use {
                "is another `space up` running? Stop it, or choose another address with --listen"
            } else {
                "choose another address with --listen"
            })
        })
    }

    fn announce(&self, global: &Global, url: &str, platform: &Platform, data: &Path) -> Result<(), CliError> {
        if global.json {
            return output::json(
                &json!({"api_url": url, "key": platform.key(), "vmm": platform.description()}),
            );
        }
        let key = platform.key();
        if !platform.isolates_hostile_code() {
            output::note(format!("Note: {}", super::doctor::TCG_NOTE));
        }
        output::line(format!(
            "SPACE is up: {}\n\n  API address  {url}\n  API key      {key}\n\nTry:\n",
            platform.description()
        ))?;
        let find = if data == Path::new(DATA_DIRECTORY) {
            String::new()
        } else {
            format!("SPACE_API_URL={url} SPACE_API_KEY={key} ")
        };
        output::line(format!("  {find}space run -- uname -a"))?;
        output::line(format!("  {find}space sandbox create"))?;
        output::line(format!(
            "  E2B_API_URL={url} E2B_SANDBOX_URL={url} E2B_API_KEY={key} python3 -c \\\n    'from e2b import Sandbox; print(Sandbox.create().commands.run(\"id\").stdout)'\n"
        ))
    }
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

fn absolute(path: &Path) -> Result<PathBuf, CliError> {
    Ok(std::path::absolute(path)?)
}

/// Replaces a file with one that only we can read, whole at every instant.
fn write_private(path: &Path, content: &str) -> Result<(), CliError> {
    use std::{io::Write as _, os::unix::fs::OpenOptionsExt as _};
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let temporary = PathBuf::from(name);
    drop(std::fs::remove_file(&temporary));
    let doing = || format!("cannot write {}", path.display());
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)
        .map_err(|error| CliError::internal(doing(), error))?;
    file.write_all(format!("{content}\n").as_bytes())
        .and_then(|()| std::fs::rename(&temporary, path))
        .map_err(|error| CliError::internal(doing(), error))
}
