//! The threads that launch programs.
//!
//! A program's parent is the thread that started it, and when that thread ends its children pass
//! to another one, which may be PID 1's reaper. So these threads never end. There are as many as
//! were ever busy at once, so a launch that hangs (on a slow disk, in a frozen group) holds up no
//! other. When there are as many as there may be, launches wait for one, in the order in which they came.

use std::collections::VecDeque;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::{io, thread};

use tokio::sync::oneshot;

/// Launches at the same time; further ones wait.
const MAX_THREADS: usize = 64;
/// Launches that wait before further ones are refused: more than there can be requests.
const MAX_WAITING: usize = 4096;
const STACK_BYTES: usize = 256 * 1024;

/// Work that calls back when its thread is free again, before anybody learns the result.
type Job = Box<dyn FnOnce(&dyn Fn()) + Send>;

#[derive(Default)]
struct State {
    idle: Vec<Sender<Job>>,
    threads: usize,
    waiting: VecDeque<Job>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("idle", &self.idle.len())
            .field("threads", &self.threads)
            .field("waiting", &self.waiting.len())
            .finish()
    }
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

    /// Runs a job on some thread, a new one if all are busy, or later if there are as many as there may be.
    pub(crate) fn give(&self, mut job: Job) -> io::Result<()> {
        loop {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(thread) = state.idle.pop() else {
                if state.threads >= MAX_THREADS {
                    if state.waiting.len() >= MAX_WAITING {
                        return Err(io::Error::from_raw_os_error(libc::EAGAIN));
                    }
                    state.waiting.push_back(job);
                    return Ok(());
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
                let mut state = launchers.0.lock().unwrap_or_else(PoisonError::into_inner);
                match state.waiting.pop_front() {
                    // The channel is this thread's own, and it reads from it next.
                    Some(next) => drop(sender.send(next)),
                    None => state.idle.push(sender.clone()),
                }
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

    #[tokio::test]
    async fn beyond_the_most_they_wait_for_their_turn() {
        let launchers = Launchers::default();
        let (go, gate) = channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let count = MAX_THREADS * 3;
        let launches: Vec<_> = (0..count)
            .map(|at| {
                let (launchers, gate) = (launchers.clone(), Arc::clone(&gate));
                tokio::spawn(async move {
                    let work = move || {
                        gate.lock().unwrap().recv().unwrap();
                        at
                    };
                    launchers.run(work).await
                })
            })
            .collect();
        while launchers.0.lock().unwrap().waiting.len() < count - MAX_THREADS {
            tokio::task::yield_now().await;
        }
        for _ in 0..count {
            go.send(()).unwrap();
        }
        for (at, launch) in launches.into_iter().enumerate() {
            assert_eq!(launch.await.unwrap().unwrap(), at);
        }
        let state = launchers.0.lock().unwrap();
        assert_eq!((state.threads, state.waiting.len()), (MAX_THREADS, 0));
    }
}
