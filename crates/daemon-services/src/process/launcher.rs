//! The threads that launch programs.
//!
//! A program's parent is the thread that started it, and when that thread ends its children pass
//! to another one, which may be PID 1's reaper. So these threads never end. There are as many as
//! were ever busy at once, so a launch that hangs (on a slow disk, in a frozen group) holds up no
//! other.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::{io, thread};

use tokio::sync::oneshot;

/// Launches that may hang at the same time before further ones are refused.
const MAX_THREADS: usize = 64;
const STACK_BYTES: usize = 256 * 1024;

/// Work that calls back when its thread is free again, before anybody learns the result.
type Job = Box<dyn FnOnce(&dyn Fn()) + Send>;

#[derive(Debug, Default)]
struct State {
    idle: Vec<Sender<Job>>,
    threads: usize,
}

/// See the module.
#[derive(Debug, Default, Clone)]
pub(crate) struct Launchers(Arc<Mutex<State>>);

impl Launchers {
    /// Runs `work` on a thread that outlives everything it starts. It runs to its end even if the
    /// future is dropped.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let (answer, answered) = oneshot::channel();
        self.give(Box::new(move |free| {
            let result = work();
            free();
            // Nobody may be waiting any more.
            answer.send(result).ok();
        }))?;
        answered.await.map_err(io::Error::other)
    }

    /// Runs a job on some thread, a new one if all are busy.
    pub(crate) fn give(&self, mut job: Job) -> io::Result<()> {
        loop {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(thread) = state.idle.pop() else {
                if state.threads >= MAX_THREADS {
                    return Err(io::Error::from_raw_os_error(libc::EAGAIN));
                }
                state.threads += 1;
                drop(state);
                return self.add_thread(job).inspect_err(|_| {
                    self.0.lock().unwrap_or_else(PoisonError::into_inner).threads -= 1;
                });
            };
            drop(state);
            match thread.send(job) {
                Ok(()) => return Ok(()),
                // That thread has panicked; take another.
                Err(error) => job = error.0,
            }
        }
    }

    fn add_thread(&self, first: Job) -> io::Result<()> {
        let launchers = self.clone();
        let body = move || {
            let (sender, jobs) = channel::<Job>();
            let mut job = first;
            let free = || {
                launchers
                    .0
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .idle
                    .push(sender.clone());
            };
            loop {
                job(&free);
                // This thread holds a sender itself, so the channel does not close.
                match jobs.recv() {
                    Ok(next) => job = next,
                    Err(_) => return,
                }
            }
        };
        thread::Builder::new()
            .name("launcher".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(body)
            .map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_that_hangs_holds_up_no_other() {
        let launchers = Launchers::default();
        let (release, wait) = channel::<()>();
        let hanging = launchers.run(move || wait.recv());
        tokio::pin!(hanging);
        assert!(futures_util::poll!(&mut hanging).is_pending());
        for _ in 0..10 {
            assert_eq!(launchers.run(|| 7).await.unwrap(), 7);
        }
        release.send(()).unwrap();
        hanging.await.unwrap().unwrap();
        assert!(launchers.0.lock().unwrap().threads <= 3);
    }
}
