//! Short lines to the machine's console, which never hold the writer up.

use std::{
    fmt,
    fs::File,
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    sync::OnceLock,
};

/// Most bytes of a line; the rest is cut off.
const MAX_LINE: usize = 400;

static CONSOLE: OnceLock<File> = OnceLock::new();

/// Sends later lines to `/dev/console`; before, and if that cannot be opened, they go to standard error.
pub fn open_console() {
    let options = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
    if let Ok(console) = File::options()
        .write(true)
        .custom_flags(options)
        .open("/dev/console")
    {
        drop(CONSOLE.set(console));
    }
}

/// Writes one line. A console that is not read loses it.
pub fn line(words: fmt::Arguments<'_>) {
    let mut text = format!("space-daemon: {words}");
    let mut end = text.len().min(MAX_LINE);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    let mut text = text.replace(['\n', '\r'], " ");
    text.push('\n');
    drop(Console.write(text.as_bytes()));
}

/// Writes one line, like `println!`.
#[macro_export]
macro_rules! say {
    ($($words:tt)*) => { $crate::log::line(format_args!($($words)*)) };
}

/// Lets the services' warnings out on the console.
pub fn install_tracing() {
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .with_writer(|| Console)
        .init();
}

/// The console as a writer that loses what does not fit.
#[derive(Debug, Clone, Copy)]
struct Console;

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match CONSOLE.get() {
            Some(mut console) => drop(console.write(bytes)),
            None => drop(io::stderr().write(bytes)),
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
