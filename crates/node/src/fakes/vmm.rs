//! A monitor and machines that are only pretended: what they would do to the host is done to the [`World`].

use super::*;

/// A world behind an `Arc`, as a driver must be to know its machines.
#[derive(Debug)]
pub(crate) struct PretendedVmm(pub(crate) Arc<World>);

#[async_trait]
impl Vmm for PretendedVmm {
    fn capabilities(&self) -> &Capabilities {
        &self.0.capabilities
    }

    async fn create_disk_layer(&self, base: &Path, layer: &Path) -> Result<(), VmmError> {
        assert!(base.is_absolute());
        fs_err::write(layer, b"").expect("its directory was made before");
        self.0
            .step("create_disk_layer")
            .await
            .map_err(|source| VmmError::Io {
                step: "make the layer",
                path: layer.to_owned(),
                source,
            })
    }

    async fn start(&self, spec: MachineSpec, mode: StartMode) -> Result<Box<dyn Machine>, VmmError> {
        let world = &self.0;
        assert!(matches!(mode, StartMode::Restore { delta: None, .. }));
        assert!(
            locked(&world.groups).contains_key(&spec.name),
            "the group must be made before"
        );
        assert!(spec.directory.is_dir() && spec.disk[0].path.is_file());
        assert!(spec.directory.as_os_str().len() <= 80);
        world
            .most_starts
            .fetch_max(world.starts.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        let started = async {
            let (exit, mut exited) = watch::channel(None);
            let (running, _) = watch::channel(false);
            let guest = guest::Guest::new(world.clone(), running.subscribe(), exit.subscribe());
            let StartMode::Restore { template, .. } = mode else {
                unreachable!("checked above")
            };
            let record = MachineRecord {
                name: spec.name.clone(),
                uid: spec.uid,
                directory: spec.directory.clone(),
                process: ProcessIdentity {
                    pid: std::process::id(),
                    start_ticks: world.started.fetch_add(1, Ordering::SeqCst),
                },
                executable: EXECUTABLE.to_owned(),
                driver: world.capabilities.driver.to_owned(),
                version: world.capabilities.version.clone(),
                memory_file: template.memory,
                memory_bytes: u64::from(spec.memory_mib) << 20,
                private_memory: true,
                disk_layers: spec.disk.iter().map(|layer| layer.path.clone()).collect(),
                disk_bytes: 1 << 30,
            };
            let life = Arc::new(Life {
                record,
                exit,
                running,
                doomed: AtomicBool::new(false),
                guest,
            });
            locked(&world.machines).insert(spec.name.as_str().to_owned(), life.clone());
            let machine = PretendedMachine::new(world.clone(), life);
            tokio::select! {
                stepped = world.step("start") => stepped.map_err(|source| VmmError::Io {
                    step: "start", path: spec.directory.clone(), source,
                })?,
                reason = exited.wait_for(Option::is_some) => {
                    let reason = reason.ok().and_then(|reason| reason.clone()).unwrap_or(ExitReason::Killed);
                    return Err(VmmError::Exited { step: "starting", reason });
                }
            }
            Ok(Box::new(machine) as Box<dyn Machine>)
        };
        let started = started.await;
        world.starts.fetch_sub(1, Ordering::SeqCst);
        started
    }

    async fn adopt(&self, record: MachineRecord) -> Result<Box<dyn Machine>, VmmError> {
        self.0.step("adopt").await.map_err(|source| VmmError::Io {
            step: "adopt",
            path: record.directory.clone(),
            source,
        })?;
        let known = self.0.life(record.name.as_str());
        let Some(life) = known.filter(|life| life.record.process == record.process) else {
            let detail = "is gone".to_owned();
            return Err(VmmError::Exited {
                step: "adopting",
                reason: ExitReason::MonitorFailed { detail },
            });
        };
        if record != life.record {
            let what = format!("{record:?} is not {:?}", life.record);
            return Err(VmmError::Unadoptable { what });
        }
        if let Some(reason) = life.exit.borrow().clone() {
            let step = "adopting";
            return Err(VmmError::Exited { step, reason });
        }
        Ok(Box::new(PretendedMachine::new(self.0.clone(), life)))
    }
}

/// The handle. Like a driver's it tells of the machine's end itself, and falls silent when it lets go.
#[derive(Debug)]
struct PretendedMachine {
    world: Arc<World>,
    life: Arc<Life>,
    /// `None` once detached.
    exit: Arc<Mutex<Option<watch::Sender<Option<ExitReason>>>>>,
    told: watch::Receiver<Option<ExitReason>>,
    teller: tokio::task::AbortHandle,
    /// Second descriptors of the streams that were given out, to end them with.
    given: Mutex<Vec<OwnedFd>>,
}

impl Drop for PretendedMachine {
    fn drop(&mut self) {
        self.teller.abort();
        if self.world.crashing.load(Ordering::SeqCst) {
            return;
        }
        if let Some(exit) = locked(&self.exit).take() {
            self.life.exits(ExitReason::Killed);
            exit.send_replace(self.life.exit.borrow().clone());
        }
    }
}

impl PretendedMachine {
    fn new(world: Arc<World>, life: Arc<Life>) -> Self {
        let (exit, told) = watch::channel(life.exit.borrow().clone());
        let exit = Arc::new(Mutex::new(Some(exit)));
        let (tell, mut ended) = (exit.clone(), life.exit.subscribe());
        let teller = tokio::spawn(async move {
            let Ok(reason) = ended.wait_for(Option::is_some).await.map(|reason| reason.clone()) else {
                return;
            };
            if let Some(exit) = &*locked(&tell) {
                exit.send_replace(reason);
            }
        });
        Self {
            world,
            life,
            exit,
            told,
            teller: teller.abort_handle(),
            given: Mutex::default(),
        }
    }

    /// A stream to the guest, whose other end is its.
    fn connect(&self) -> (UnixStream, std::os::unix::net::UnixStream) {
        let (host, guest) = std::os::unix::net::UnixStream::pair().expect("a socket pair");
        for end in [&host, &guest] {
            end.set_nonblocking(true).expect("a socket");
        }
        let host = UnixStream::from_std(host).expect("a socket");
        let second = rustix::io::fcntl_dupfd_cloexec(&host, 3).expect("a descriptor");
        locked(&self.given).push(second);
        (host, guest)
    }

    /// Whether the handle still has the machine.
    fn held(&self) -> Result<(), VmmError> {
        if locked(&self.exit).is_some() {
            return Ok(());
        }
        let what = "the machine was detached".to_owned();
        Err(VmmError::Unsupported { what })
    }

    async fn step(&self, step: &'static str) -> Result<(), VmmError> {
        self.world.step(step).await.map_err(|source| VmmError::Io {
            step,
            path: PathBuf::new(),
            source,
        })
    }
}

#[async_trait]
impl Machine for PretendedMachine {
    fn process(&self) -> ProcessIdentity {
        self.life.record.process
    }

    fn record(&self) -> MachineRecord {
        self.life.record.clone()
    }

    fn exit(&self) -> watch::Receiver<Option<ExitReason>> {
        self.told.clone()
    }

    async fn status(&self) -> Result<RunState, VmmError> {
        self.step("status").await?;
        self.held()?;
        Ok(match *self.life.running.borrow() {
            true => RunState::Running,
            false => RunState::Paused,
        })
    }

    async fn pause(&self) -> Result<(), VmmError> {
        self.step("pause").await?;
        self.held()?;
        self.life.running.send_replace(false);
        Ok(())
    }

    async fn resume(&self) -> Result<(), VmmError> {
        self.step("resume").await?;
        if self.life.doomed.load(Ordering::SeqCst) {
            self.life.exits(ExitReason::OutOfMemory);
        }
        self.held()?;
        self.life.running.send_replace(true);
        Ok(())
    }

    async fn save_device_state(&self, _to: &Path) -> Result<(), VmmError> {
        Err(VmmError::Unsupported { what: String::new() })
    }

    async fn save_template(&self, _state: &Path) -> Result<(), VmmError> {
        Err(VmmError::Unsupported { what: String::new() })
    }

    async fn memory_delta(&self) -> Result<MemoryDelta, VmmError> {
        Err(VmmError::Unsupported { what: String::new() })
    }

    async fn freeze_disk(&self, _new_top: &Path) -> Result<FrozenLayer, VmmError> {
        Err(VmmError::Unsupported { what: String::new() })
    }

    async fn control_port(&self) -> Result<PortStream, VmmError> {
        self.step("control_port").await?;
        self.held()?;
        let (host, guest) = self.connect();
        self.life.guest.control(guest);
        Ok(PortStream::Unix(host))
    }

    async fn data_port(&self) -> Result<PortStream, VmmError> {
        self.step("data_port").await?;
        self.held()?;
        let (host, guest) = self.connect();
        self.life.guest.data(guest);
        Ok(PortStream::Unix(host))
    }

    async fn console(&self) -> String {
        "the console".to_owned()
    }

    async fn kill(&self) -> Result<(), VmmError> {
        self.step("kill").await?;
        self.held()?;
        self.life.exits(ExitReason::Killed);
        self.told.clone().wait_for(Option::is_some).await.ok();
        Ok(())
    }

    fn detach(&self) {
        if self.life.exit.borrow().is_none() {
            locked(&self.exit).take();
            for stream in locked(&self.given).drain(..) {
                rustix::net::shutdown(&stream, rustix::net::Shutdown::Both).ok();
            }
        }
    }
}
