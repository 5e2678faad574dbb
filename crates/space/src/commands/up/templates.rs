//! Gives a node the templates of a volume store.

use std::{
    collections::HashMap,
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use async_trait::async_trait;
use space_api::size::SizeClass;
use space_node::{ResolvedTemplate, StartingPoint, TemplateError, TemplateInfo, Templates};
use space_node_manager::Privileges;
use space_vmm::Vmm;
use space_volume::{MachineFiles, MachineRequest, TemplateBuilder, VolumeError, quiet};

/// The templates of one store, with the machines that this node has started from kept from being collected.
pub(crate) struct VolumeTemplates {
    builder: Arc<TemplateBuilder>,
    vmm: Arc<dyn Vmm>,
    privileges: Arc<dyn Privileges>,
    /// User that machines are built as, one at a time.
    build_uid: u32,
    run_directory: PathBuf,
    one_build: tokio::sync::Mutex<()>,
    /// By digest and size. Holding the files holds their lease.
    known: Mutex<HashMap<(String, SizeClass), MachineFiles>>,
}

impl VolumeTemplates {
    pub(crate) fn new(
        builder: Arc<TemplateBuilder>,
        vmm: Arc<dyn Vmm>,
        privileges: Arc<dyn Privileges>,
        build_uid: u32,
        run_directory: PathBuf,
    ) -> Self {
        Self {
            builder,
            vmm,
            privileges,
            build_uid,
            run_directory,
            one_build: tokio::sync::Mutex::default(),
            known: Mutex::default(),
        }
    }

    fn known(&self, key: &(String, SizeClass)) -> Option<StartingPoint> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(key).map(starting_point)
    }

    /// What it takes to build the machine of one size.
    pub(crate) fn request(&self, size: SizeClass) -> MachineRequest {
        MachineRequest {
            size,
            vmm: Arc::clone(&self.vmm),
            privileges: Arc::clone(&self.privileges),
            uid: self.build_uid,
            run_directory: self.run_directory.clone(),
        }
    }
}

fn starting_point(files: &MachineFiles) -> StartingPoint {
    StartingPoint {
        root: files.root.clone(),
        disk: files.disk_base.clone(),
        machine: files.template.clone(),
        kernel: files.kernel.clone(),
        initramfs: files.initramfs.clone(),
        kernel_arguments: files.kernel_arguments.clone(),
    }
}

#[async_trait]
impl Templates for VolumeTemplates {
    async fn resolve(&self, name: &str) -> Result<ResolvedTemplate, TemplateError> {
        let template = self
            .builder
            .store()
            .resolve(name)
            .map_err(|error| typed("look the template up", error))?;
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
        let key = (template.digest.clone(), size);
        if let Some(point) = self.known(&key) {
            return Ok(point);
        }
        let _one = self.one_build.lock().await;
        if let Some(point) = self.known(&key) {
            return Ok(point);
        }
        let found = self
            .builder
            .store()
            .resolve(&template.digest)
            .map_err(|error| typed("look the template up", error))?;
        let files = self
            .builder
            .ensure_machine(&found, self.request(size), &quiet())
            .await
            .map_err(shared)?;
        let point = starting_point(&files);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(key, files);
        Ok(point)
    }

    async fn list(&self) -> Result<Vec<TemplateInfo>, TemplateError> {
        let store = self.builder.store();
        let templates = store.list().map_err(|error| typed("list the templates", error))?;
        Ok(templates
            .into_iter()
            .map(|template| TemplateInfo {
                name: template.reference(),
                digest: template.digest.to_string(),
                default_size: template.manifest.default_size,
                ready_sizes: self.builder.ready_sizes(&template, self.vmm.capabilities()),
                disk_bytes: store.disk_bytes(&template),
                created_at: template.created_at,
            })
            .collect())
    }

    async fn delete(&self, name: &str, in_use: &[String]) -> Result<(), TemplateError> {
        {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.retain(|(digest, _), _| in_use.contains(digest));
        }
        self.builder
            .store()
            .remove(name)
            .map_err(|error| typed("remove the template", error))
    }
}

/// A failure that several callers share.
fn shared(error: Arc<VolumeError>) -> TemplateError {
    match Arc::try_unwrap(error) {
        Ok(error) => typed("make the template's machine", error),
        Err(error) => TemplateError::Failed {
            step: "cannot make the template's machine".to_owned(),
            source: Box::new(error),
        },
    }
}

fn typed(step: &'static str, error: VolumeError) -> TemplateError {
    match error {
        VolumeError::TemplateNotFound { reference } => TemplateError::NotFound { name: reference },
        VolumeError::BadName { shown, .. } => TemplateError::NotFound { name: shown },
        VolumeError::Machine { source, .. } => TemplateError::Vmm(source),
        error => TemplateError::Failed {
            step: format!("cannot {step}"),
            source: Box::new(error),
        },
    }
}

impl fmt::Debug for VolumeTemplates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolumeTemplates")
            .field("directory", &self.builder.store().directory())
            .finish_non_exhaustive()
    }
}
