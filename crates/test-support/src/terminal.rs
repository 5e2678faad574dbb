//! A program on a terminal of its own, as a person would use it.

use std::{
    io::{Read as _, Write as _},
    os::fd::{AsFd as _, OwnedFd},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Termios, Winsize, tcgetattr, tcsetwinsize},
};

use crate::eventually;

/// A running program, and everything its terminal has shown.
#[derive(Debug)]
pub struct Terminal {
    child: Child,
    master: fs_err::File,
    /// Kept open so that the settings can be looked at after the program has ended.
    slave: OwnedFd,
    shown: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    /// Starts `command` with a terminal of 24 lines and 80 columns as its controlling one.
    ///
    /// # Panics
    ///
    /// If there is no terminal to be had, or the program cannot be started.
    pub fn start(command: &Command) -> Self {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a terminal");
        grantpt(&master).expect("a terminal");
        unlockpt(&master).expect("a terminal");
        let name = ptsname(&master, Vec::new()).expect("a terminal's name");
        let path = name.to_str().expect("a path").to_owned();
        let open = || {
            let mut options = fs_err::File::options();
            options.read(true).write(true);
            // Without a controlling terminal of its own a test's process could be given this one.
            let file = options.open(&path).expect("the terminal can be opened");
            OwnedFd::from(file.into_file())
        };
        let slave = open();
        let stdio = || Stdio::from(slave.try_clone().expect("a descriptor"));
        let mut wrapped = Command::new("setsid");
        wrapped
            .args(["--ctty", "--wait"])
            .arg(command.get_program())
            .args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => wrapped.env(name, value),
                None => wrapped.env_remove(name),
            };
        }
        let child = wrapped
            .stdin(stdio())
            .stdout(stdio())
            .stderr(stdio())
            .spawn()
            .expect("the program can be started");
        let shown = Arc::new(Mutex::new(Vec::new()));
        let master = fs_err::File::from_parts(std::fs::File::from(master), path);
        let mut reader = master.try_clone().expect("a descriptor");
        let sink = Arc::clone(&shown);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count) = reader.read(&mut buffer) {
                if count == 0 {
                    break;
                }
                sink.lock()
                    .expect("not poisoned")
                    .extend_from_slice(&buffer[..count]);
            }
        });
        let terminal = Self {
            child,
            master,
            slave,
            shown,
        };
        terminal.resize(24, 80);
        terminal
    }

    /// Types something.
    ///
    /// # Panics
    ///
    /// If the terminal takes nothing.
    pub fn send(&mut self, text: &str) {
        self.master
            .write_all(text.as_bytes())
            .expect("the terminal takes input");
    }

    /// Changes the terminal's size, which the program is told of.
    ///
    /// # Panics
    ///
    /// If the system refuses.
    pub fn resize(&self, rows: u16, columns: u16) {
        let size = Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(self.master.as_fd(), size).expect("a size");
    }

    /// Waits until `text` has been shown.
    ///
    /// # Panics
    ///
    /// If it is not within 30 s.
    pub fn wait_for(&self, text: &str) {
        let what = format!("\"{text}\" on the terminal");
        eventually(&what, Duration::from_secs(30), || {
            self.shown().contains(text).then_some(())
        });
    }

    /// Everything that was shown.
    pub fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().expect("not poisoned")).into_owned()
    }

    /// The terminal's settings now.
    ///
    /// # Panics
    ///
    /// If the system does not tell.
    pub fn settings(&self) -> Termios {
        tcgetattr(self.slave.as_fd()).expect("settings")
    }

    /// Waits for the program's end.
    ///
    /// # Panics
    ///
    /// If it does not end within 30 s.
    pub fn wait(&mut self) -> ExitStatus {
        let child = &mut self.child;
        eventually("the program's end", Duration::from_secs(30), || {
            child.try_wait().expect("can be waited for")
        })
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
