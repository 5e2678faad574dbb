//! The running platform, its start and its end.

use std::{path::Path, sync::Arc};

use space_api::{key::ApiKey, rest::Quotas};
use space_control::{Control, ControlConfig};
use space_node::{LockError, Node, NodeConfig, NodeManager, OpenError, PoolConfig, VolumeTemplates};
use space_node_manager::Privileges;
use space_store::{SqliteStore, Store};
use space_volume::VolumeError;
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use crate::{
    cli::key_file,
    commands::up::{Serving, assemble::Parts, installation::Installation, volume_error, write_private},
    error::{CliError, Kind},
    output,
};

/// What becomes of the sandboxes when the node stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sandboxes {
    /// All are ended, and recorded as such.
    End,
    /// They run on, for the next node.
    Leave,
}

/// Everything that runs.
pub(crate) struct Platform {
    key: ApiKey,
    node: Arc<NodeManager>,
    store: Arc<SqliteStore>,
    parts: Parts,
    stop: CancellationToken,
    serving: JoinHandle<()>,
    failure: watch::Receiver<Option<String>>,
}

impl Platform {
    /// Opens the node, which takes over what lives, and everything above it.
    pub(crate) async fn start(
        serving: &Serving,
        installation: &Installation,
        privileges: Arc<dyn Privileges>,
        listener: TcpListener,
        cancel: CancellationToken,
    ) -> Result<Self, CliError> {
        let data = &installation.data_directory;
        let templates = serving.templates(data)?;
        let parts = Parts::new(installation, privileges, &templates, serving.daemon.as_deref()).await?;
        let config = NodeConfig {
            capacity: serving.capacity,
            max_creating: serving.capacity,
            uids: installation.uids.clone(),
            disk_traffic: serving.disk_traffic(),
            pool: PoolConfig {
                max_machines: serving.pool,
                ..PoolConfig::default()
            },
            ..NodeConfig::new(data.clone(), installation.run_directory.clone())
        };
        let templates = VolumeTemplates::new(
            Arc::clone(&parts.builder),
            &config,
            parts.build_uid,
            Arc::clone(&parts.vmm),
            Arc::clone(&parts.privileges),
        );
        let (privileges, vmm) = (Arc::clone(&parts.privileges), Arc::clone(&parts.vmm));
        let node = NodeManager::open(config, privileges, vmm, Arc::new(templates))
            .await
            .map_err(open_error)?;
        let started = tokio::select! {
            started = Self::start_on(serving, data, listener, parts, Arc::clone(&node)) => started,
            () = cancel.cancelled() => Err(CliError::environment("the start was given up")),
        };
        if started.is_err() {
            // What it has made ahead goes with it; what lived before lives on.
            node.detach().await;
        }
        started
    }

    /// Everything above the node.
    async fn start_on(
        serving: &Serving,
        data: &Path,
        listener: TcpListener,
        parts: Parts,
        node: Arc<NodeManager>,
    ) -> Result<Self, CliError> {
        let failed = |error| {
            CliError::internal("cannot open the metadata store", error).with_hint(
                "is the disk full? As a last resort move space.db and its -wal and -shm away, or put a copy of it back: without it all projects, keys \
                 but the one in the data directory, and records are lost, and sandboxes that run can no longer be reached; \
                 they are left alone until their deadlines",
            )
        };
        let store = Arc::new(SqliteStore::open(&data.join("space.db")).await.map_err(failed)?);
        let known = fs_err::read_to_string(key_file(data))
            .ok()
            .and_then(|text| text.trim().parse::<ApiKey>().ok());
        let bootstrap = store
            .ensure_default_project_and_key(Quotas::for_capacity(serving.capacity), known)
            .await
            .map_err(failed)?;
        write_private(&key_file(data), bootstrap.key.expose())?;

        ensure_base(&parts).await?;

        let address = listener.local_addr()?;
        let control = Control::new(
            ControlConfig {
                domain: serving.domain.clone(),
                public_url: format!("http://{address}"),
                announced_domain: Some(format!("{}:{}", serving.domain, address.port())),
                ..ControlConfig::default()
            },
            Arc::clone(&store) as _,
            Arc::clone(&node) as _,
        );
        let stop = CancellationToken::new();
        let (tell, failure) = watch::channel(None);
        let serving = tokio::spawn({
            let stop = stop.clone();
            async move {
                if let Err(error) = control.serve(listener, stop).await {
                    tell.send_replace(Some(format!("{:#}", anyhow::Error::new(error))));
                }
            }
        });
        Ok(Self {
            key: bootstrap.key,
            node,
            store,
            parts,
            stop,
            serving,
            failure,
        })
    }

    /// The secret itself.
    pub(crate) fn key(&self) -> &str {
        self.key.expose()
    }

    /// Driver, version, accelerator.
    pub(crate) fn description(&self) -> String {
        let capabilities = self.parts.vmm.capabilities();
        format!(
            "{} {} with {}",
            capabilities.driver, capabilities.version, capabilities.accelerator
        )
    }

    pub(crate) fn isolates_hostile_code(&self) -> bool {
        self.parts.vmm.capabilities().isolates_hostile_code
    }

    /// Waits until the server can no longer serve.
    pub(crate) async fn failed(&self) -> CliError {
        let mut failure = self.failure.clone();
        let what = match failure.wait_for(Option::is_some).await {
            Ok(what) => what.clone().unwrap_or_default(),
            Err(_) => "the server ended".to_owned(),
        };
        CliError::new(Kind::Internal, anyhow::Error::msg(what))
    }

    /// Stops accepting, ends every sandbox or lets go of it, closes the store.
    pub(crate) async fn stop(self, sandboxes: Sandboxes) {
        self.stop.cancel();
        // The server waits for its streams, which end with the node's hold on their sandboxes.
        match sandboxes {
            Sandboxes::End => self.node.shutdown().await,
            Sandboxes::Leave => self.node.detach().await,
        }
        if self.serving.await.is_err() {
            tracing::error!("the server ended by a panic");
        }
        self.store.close().await;
    }
}

/// Makes the machine of the template `base`, unless it is there. The template itself takes root to build.
async fn ensure_base(parts: &Parts) -> Result<(), CliError> {
    let (builder, store) = (&parts.builder, parts.builder.store());
    let template = match store.resolve("base") {
        Ok(template) => template,
        Err(error @ VolumeError::TemplateNotFound { .. }) => {
            return Err(volume_error("cannot use the template `base`", error)
                .with_hint("`sudo space up --prepare-only` makes it, or `sudo space template build base`"));
        }
        Err(error) => return Err(volume_error("cannot use the template `base`", error)),
    };
    let size = template.manifest.default_size;
    let there = builder
        .machine(&template, size, parts.vmm.capabilities())
        .map_err(|error| volume_error("cannot use the template `base`", error))?;
    if there.is_none() {
        let bar = output::Bar::new("making the machine that sandboxes start from");
        builder
            .ensure_machine(&template, parts.request(size), &bar.progress())
            .await
            .map_err(|error| volume_error("cannot make the machine of the template `base`", error))?;
        bar.finish();
    }
    Ok(())
}

fn open_error(error: OpenError) -> CliError {
    let hint = match &error {
        OpenError::Lock(LockError::Held { .. }) => {
            "another `space up` uses this directory: stop it first, or choose another with --data-dir"
        }
        OpenError::NotTraversable { .. } => "machines run as ordinary users and must reach their files",
        OpenError::Journal(_) => {
            "is the disk full? As a last resort move node.db and its -wal and -shm away: the start that follows ends every sandbox that runs, for it can no longer tell what they are"
        }
        _ => "`space doctor` checks what the platform needs",
    };
    CliError::new(
        Kind::Environment,
        anyhow::Error::new(error).context("cannot open the node"),
    )
    .with_hint(hint)
}
