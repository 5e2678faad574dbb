//! [`Templates`] over the volume manager's [`TemplateBuilder`].

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use space_api::size::SizeClass;
use space_node_manager::Privileges;
use space_vmm::{Vmm, VmmError};
use space_volume::{MachineFiles, MachineRequest, Template, TemplateBuilder, VolumeError, quiet};
use tokio::{
    sync::{Mutex as AsyncMutex, oneshot},
    task::JoinSet,
};

use crate::{
    config::NodeConfig,
    locked,
    seam::TemplateInfo,
    start_up::MACHINES,
    templates::{Lease, ResolvedTemplate, StartingPoint, TemplateError, Templates},
};

/// The templates of a store on this host. Machines for new sizes are made with the node's own driver and privileges.
#[derive(Debug)]
pub struct VolumeTemplates {
    builder: Arc<TemplateBuilder>,
    vmm: Arc<dyn Vmm>,
    privileges: Arc<dyn Privileges>,
    run_directory: PathBuf,
    uid: u32,
    /// One build at a time: it uses all of the host anyway, and so one user id is enough.
    building: Arc<AsyncMutex<()>>,
    /// Owns the builds, which go on when the caller has gone.
    builds: Mutex<JoinSet<()>>,
}

impl VolumeTemplates {
    /// `uid` is for the machines of builds; it must not lie within [`NodeConfig::uids`].
    pub fn new(
        builder: Arc<TemplateBuilder>,
        config: &NodeConfig,
        uid: u32,
        vmm: Arc<dyn Vmm>,
        privileges: Arc<dyn Privileges>,
    ) -> Self {
        Self {
            builder,
            vmm,
            privileges,
            // Below what the node sweeps at its start.
            run_directory: config.run_directory.join(MACHINES),
            uid,
            building: Arc::default(),
            builds: Mutex::default(),
        }
    }

    /// A user id that [`NodeConfig::new`] leaves free for builds.
    pub const UID: u32 = 199_999;

    fn template(&self, reference: &str) -> Result<Template, TemplateError> {
        self.builder
            .store()
            .resolve(reference)
            .map_err(|error| typed(reference, Arc::new(error)))
    }

    fn machine(&self, template: &Template, size: SizeClass) -> Result<Option<MachineFiles>, VolumeError> {
        self.builder.machine(template, size, self.vmm.capabilities())
    }

    fn info(&self, template: &Template) -> TemplateInfo {
        let manifest = &template.manifest;
        TemplateInfo {
            name: template.reference(),
            digest: template.digest.to_string(),
            default_size: manifest.default_size,
            ready_sizes: self.builder.ready_sizes(template, self.vmm.capabilities()),
            disk_bytes: [&manifest.root, &manifest.kernel, &manifest.initramfs]
                .map(|blob| blob.bytes)
                .iter()
                .sum(),
            created_at: template.created_at,
        }
    }
}

fn typed(reference: &str, error: Arc<VolumeError>) -> TemplateError {
    match error.as_ref() {
        // What is no name cannot be the name of anything.
        VolumeError::TemplateNotFound { .. } | VolumeError::BadName { .. } => TemplateError::NotFound {
            name: reference.to_owned(),
        },
        VolumeError::NoSpace { .. } => TemplateError::NoSpace { what: error.chain() },
        VolumeError::Machine {
            source: VmmError::Unavailable { what },
            ..
        } => TemplateError::Vmm(VmmError::Unavailable { what: what.clone() }),
        _ => TemplateError::Failed {
            step: format!("template {reference}"),
            source: Box::new(error),
        },
    }
}

impl From<MachineFiles> for StartingPoint {
    fn from(files: MachineFiles) -> Self {
        Self {
            root: files.root.clone(),
            disk: files.disk_base.clone(),
            machine: files.template.clone(),
            kernel: files.kernel.clone(),
            initramfs: files.initramfs.clone(),
            kernel_arguments: files.kernel_arguments.clone(),
            lease: Lease::new(files),
        }
    }
}

#[async_trait]
impl Templates for VolumeTemplates {
    async fn resolve(&self, name: &str) -> Result<ResolvedTemplate, TemplateError> {
        let template = self.template(name)?;
        Ok(ResolvedTemplate {
            name: template.reference(),
            digest: template.digest.to_string(),
            default_size: template.manifest.default_size,
        })
    }

    async fn ensure_machine(
        &self,
        template: &ResolvedTemplate,
        size: SizeClass,
    ) -> Result<StartingPoint, TemplateError> {
        let reference = template.digest.clone();
        let template = self.template(&reference)?;
        let found = |error| typed(&reference, Arc::new(error));
        if let Some(files) = self.machine(&template, size).map_err(found)? {
            return Ok(files.into());
        }
        let turn = self.building.clone().lock_owned().await;
        if let Some(files) = self.machine(&template, size).map_err(found)? {
            return Ok(files.into());
        }
        let request = MachineRequest {
            size,
            vmm: self.vmm.clone(),
            privileges: self.privileges.clone(),
            uid: self.uid,
            run_directory: self.run_directory.clone(),
        };
        let builder = self.builder.clone();
        let (reply, answer) = oneshot::channel();
        {
            let mut builds = locked(&self.builds);
            while builds.try_join_next().is_some() {}
            builds.spawn(async move {
                let made = builder.ensure_machine(&template, request, &quiet()).await;
                drop(turn);
                // Whoever asked may be gone; the machine is there for the next one.
                drop(reply.send(made));
            });
        }
        let made = answer
            .await
            .unwrap_or_else(|_| Err(Arc::new(VolumeError::Cancelled)));
        made.map(Into::into).map_err(|error| typed(&reference, error))
    }

    async fn hold(&self, digest: &str, size: SizeClass) -> Result<Option<Lease>, TemplateError> {
        let template = self.template(digest)?;
        let files = self.machine(&template, size);
        let files = files.map_err(|error| typed(digest, Arc::new(error)))?;
        Ok(files.map(Lease::new))
    }

    async fn list(&self) -> Result<Vec<TemplateInfo>, TemplateError> {
        let all = self
            .builder
            .store()
            .list()
            .map_err(|error| typed("list", Arc::new(error)))?;
        Ok(all.iter().map(|template| self.info(template)).collect())
    }

    async fn delete(&self, name: &str) -> Result<(), TemplateError> {
        self.builder
            .store()
            .remove(name)
            .map_err(|error| typed(name, Arc::new(error)))
    }
}
