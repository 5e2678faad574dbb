//! Builds the parts that both the node and `space template build` stand on.

use std::{
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use space_api::size::SizeClass;
use space_node::MACHINES;
use space_node_manager::{PrivilegeError, Privileges};
use space_vmm::{QemuConfig, QemuDriver, Vmm, VmmError};
use space_volume::{MachineRequest, TemplateBuilder, VolumeConfig};

use super::{find_daemon, installation::Installation, volume_error};
use crate::error::{CliError, Kind};

/// Where builds share root images and kernels, below the template store.
const CACHE: &str = "cache";

/// Everything below a node.
pub(crate) struct Parts {
    pub(crate) privileges: Arc<dyn Privileges>,
    pub(crate) vmm: Arc<dyn Vmm>,
    pub(crate) builder: Arc<TemplateBuilder>,
    /// User that machines are built as, one at a time.
    pub(crate) build_uid: u32,
    /// Where their sockets go.
    run_directory: PathBuf,
}

impl Parts {
    pub(crate) async fn new(
        installation: &Installation,
        privileges: Arc<dyn Privileges>,
        templates: &Path,
        daemon: Option<&Path>,
    ) -> Result<Self, CliError> {
        let daemon_program = find_daemon(daemon)?;
        let run = &installation.run_directory;
        let driver = QemuDriver::probe(QemuConfig::default(), Arc::clone(&privileges)).await;
        let vmm: Arc<dyn Vmm> = Arc::new(driver.map_err(vmm_error)?);
        let config = VolumeConfig {
            cache_directory: templates.join(CACHE),
            directory: templates.to_owned(),
            daemon_program,
        };
        let builder = TemplateBuilder::new(config)
            .map_err(|error| volume_error("cannot open the template store", error))?;
        let builder = Arc::new(builder);
        // The same that a node uses and sweeps.
        let run_directory = run.join(MACHINES);
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o711)
            .create(&run_directory)?;
        Ok(Self {
            privileges,
            vmm,
            builder,
            build_uid: installation.build_uid(),
            run_directory,
        })
    }

    /// Whether root images were built here before.
    pub(crate) fn has_cached_roots(&self) -> bool {
        let roots = self.builder.store().directory().join(CACHE).join("roots");
        fs_err::read_dir(roots).is_ok_and(|mut entries| entries.next().is_some())
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

/// Why nobody can perform privileged acts for `installation`, with what to do about it.
pub(crate) fn privilege_error(error: PrivilegeError, installation: &Installation) -> CliError {
    let hint = match &error {
        PrivilegeError::NotPermitted { .. } => "run it with sudo".to_owned(),
        PrivilegeError::NoController { .. } => "`space doctor` says how to mend it".to_owned(),
        _ => format!(
            "is another `space up` running on {}? Stop it, or choose another --data-dir",
            installation.data_directory.display()
        ),
    };
    CliError::new(
        Kind::Environment,
        anyhow::Error::new(error).context("cannot manage machines here"),
    )
    .with_hint(hint)
}

fn vmm_error(error: VmmError) -> CliError {
    CliError::new(
        Kind::Environment,
        anyhow::Error::new(error).context("no sandbox can run here"),
    )
    .with_hint("`space doctor` says what is missing and how to mend it")
}
