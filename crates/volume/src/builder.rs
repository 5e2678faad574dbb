//! The builder: recipes to templates, templates to machines, each built once however many ask.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use fs_err as fs;
use space_api::size::SizeClass;
use space_vmm::Capabilities;
use tokio::{
    sync::{Mutex as AsyncMutex, watch},
    task::JoinSet,
};

pub use crate::machine::MachineRequest;
use crate::{
    MachineFiles, Manifest, Progress, Recipe, Template, TemplateStore, VolumeError, command::Program,
    kernel::Kernel, lock, machine, progress::Part, root,
};

/// Where templates live and what they are built from.
#[derive(Debug, Clone)]
pub struct VolumeConfig {
    /// The template store.
    pub directory: PathBuf,
    /// Root images and kernels that builds share; may be emptied at any time. Best on the store's file system.
    pub cache_directory: PathBuf,
    /// The space daemon, a static program.
    pub daemon_program: PathBuf,
}

/// How a template is built.
#[derive(Debug, Clone, Default)]
pub struct BuildOptions {
    /// Take the newest packages and kernel instead of cached ones.
    pub refresh: bool,
}

type Outcome = Option<Result<(), Arc<VolumeError>>>;

/// Builds templates and their machines. Dropping it gives up what is being built.
#[derive(Debug)]
pub struct TemplateBuilder {
    config: VolumeConfig,
    store: Arc<TemplateStore>,
    /// One template build at a time: they use all of the machine anyway.
    building: AsyncMutex<()>,
    /// Machine builds under way, by template, size and monitor.
    flights: Arc<Mutex<HashMap<String, watch::Receiver<Outcome>>>>,
    /// Owns the machine builds, so that a caller that goes away leaves nothing half taken down.
    tasks: Mutex<JoinSet<()>>,
}

impl TemplateBuilder {
    /// Opens (or makes) the store.
    pub fn new(config: VolumeConfig) -> Result<Self, VolumeError> {
        let store = Arc::new(TemplateStore::open(&config.directory)?);
        Ok(Self {
            config,
            store,
            building: AsyncMutex::default(),
            flights: Arc::default(),
            tasks: Mutex::default(),
        })
    }

    /// The store it builds into.
    pub fn store(&self) -> &Arc<TemplateStore> {
        &self.store
    }

    /// Builds and publishes a template. Cancel by dropping: nothing is published then.
    pub async fn build(
        &self,
        recipe: &Recipe,
        options: &BuildOptions,
        progress: &Progress,
    ) -> Result<Template, VolumeError> {
        let _one = self.building.lock().await;
        let cache = &self.config.cache_directory;
        fs::create_dir_all(cache).map_err(VolumeError::io("make the cache directory"))?;
        let part = Part::new(progress, 0.0, 0.95);
        part.report("waiting for another build", 0.0);
        let cache_lock = lock::exclusive(lock::open(&cache.join("lock"))?).await?;
        let swept = cache.clone();
        root::in_background(move || sweep(&swept)).await?;
        let root_image = async {
            match &recipe.image {
                Some(image) => Ok(root::RootImage::ready_made(image.clone())),
                None => root::ensure(recipe, cache, options.refresh, &part).await,
            }
        };
        // The kernel's download hides behind the root's.
        let (root, kernel) = tokio::try_join!(root_image, Kernel::ensure(cache, options.refresh))?;
        drop(cache_lock);
        part.report("storing the template", 1.0);

        let store = Arc::clone(&self.store);
        let daemon = self.daemon().await?;
        let recipe = recipe.clone();
        let importing = self.store.importing().await?;
        let template = root::in_background(move || {
            // Until the manifest names the files.
            let _importing = importing;
            let manifest = Manifest {
                format: Manifest::FORMAT,
                architecture: "x86_64".to_owned(),
                root: store.import_file(&root.path, root.blob.as_ref())?,
                kernel: store.import_file(&kernel.image(), None)?,
                initramfs: store.import_bytes(&kernel.initramfs(&daemon)?)?,
                kernel_version: kernel.version,
                packages: root.packages,
                run: recipe.run,
                environment: recipe.environment,
                start: recipe.start,
                ready: recipe.ready,
                default_size: recipe.default_size,
            };
            store.publish(&recipe.name, &recipe.tag, &manifest)
        })
        .await?;
        Part::new(progress, 0.0, 1.0).report("ready", 1.0);
        Ok(template)
    }

    /// The daemon program, without its debugging information where the host can remove it: three quarters of the file,
    /// and all of it would stay in the memory of every guest.
    async fn daemon(&self) -> Result<Vec<u8>, VolumeError> {
        let step = "read the daemon program";
        let program = &self.config.daemon_program;
        let work = self.store.work()?;
        let small = work.path().join("daemon");
        let stripped = Program::new("strip", "binutils", Duration::from_secs(60))
            .args(["--strip-debug", "-o"])
            .args([&small, program])
            .output()
            .await;
        let path = match &stripped {
            Ok(_) => &small,
            Err(VolumeError::MissingProgram { .. } | VolumeError::ProgramFailed { .. }) => program,
            Err(_) => return stripped,
        };
        fs::read(path).map_err(VolumeError::io(step))
    }

    /// The machine of one size, built first if there is none. Several callers at once, also in several processes,
    /// build it once; the first one's `progress` gets the reports. May be dropped at any point: a build that has
    /// begun goes on, for the next caller.
    pub async fn ensure_machine(
        &self,
        template: &Template,
        request: MachineRequest,
        progress: &Progress,
    ) -> Result<MachineFiles, Arc<VolumeError>> {
        let size = request.size;
        let vmm = Arc::clone(&request.vmm);
        if let Some(files) = self.machine(template, size, vmm.capabilities())? {
            return Ok(files);
        }
        let mut flight = self.join_flight(template, request, progress);
        let outcome = flight
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|outcome| outcome.clone())
            .unwrap_or_else(|| Err(Arc::new(VolumeError::Cancelled)));
        outcome?;
        self.machine(template, size, vmm.capabilities())?.ok_or_else(|| {
            Arc::new(VolumeError::TemplateNotFound {
                reference: template.reference(),
            })
        })
    }

    /// The machine of one size if there is one already.
    pub fn machine(
        &self,
        template: &Template,
        size: SizeClass,
        capabilities: &Capabilities,
    ) -> Result<Option<MachineFiles>, VolumeError> {
        machine::existing(&self.store, template, size, capabilities)
    }

    /// Sizes whose machine is there for this monitor, smallest first.
    pub fn ready_sizes(&self, template: &Template, capabilities: &Capabilities) -> Vec<SizeClass> {
        self.store
            .machine_sizes(template.digest, &machine::monitor_key(capabilities))
    }

    /// Joins the build that is under way, or begins one.
    fn join_flight(
        &self,
        template: &Template,
        request: MachineRequest,
        progress: &Progress,
    ) -> watch::Receiver<Outcome> {
        let key = format!(
            "{} {} {}",
            template.digest,
            request.size,
            machine::monitor_key(request.vmm.capabilities())
        );
        let mut flights = locked(&self.flights);
        if let Some(flight) = flights.get(&key) {
            return flight.clone();
        }
        let (land, flight) = watch::channel(None);
        flights.insert(key.clone(), flight.clone());
        let done = FlightGuard {
            flights: Arc::clone(&self.flights),
            key,
        };
        let store = Arc::clone(&self.store);
        let template = template.clone();
        let progress = Arc::clone(progress);
        let mut tasks = locked(&self.tasks);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async move {
            let outcome = machine::build(&store, &template, &request, &progress).await;
            if let Err(error) = &outcome {
                let (template, size) = (template.reference(), request.size);
                tracing::warn!(template, %size, error = error.chain(), "a machine was not built");
            }
            // Those who come from now on try again, or find it on disk.
            drop(done);
            land.send_replace(Some(outcome.map_err(Arc::new)));
        });
        flight
    }
}

/// Takes a build off the list however it ends.
struct FlightGuard {
    flights: Arc<Mutex<HashMap<String, watch::Receiver<Outcome>>>>,
    key: String,
}

impl Drop for FlightGuard {
    fn drop(&mut self) {
        locked(&self.flights).remove(&self.key);
    }
}

/// Removes what builds that were killed have left in the cache; the caller holds its lock.
fn sweep(cache: &Path) -> Result<(), VolumeError> {
    let step = "sweep the cache";
    for part in [cache.join("roots"), Kernel::cache(cache)] {
        let entries = match fs::read_dir(&part) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(VolumeError::io(step)(error)),
        };
        for entry in entries {
            let entry = entry.map_err(VolumeError::io(step))?;
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                fs::remove_dir_all(entry.path()).map_err(VolumeError::io(step))?;
            }
        }
    }
    Ok(())
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
